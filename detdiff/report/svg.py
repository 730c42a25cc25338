"""Writing an SVG picture: shapes, text and legends with CSS classes, scales, colours, and the one place where text becomes XML.

Sizes go from ochre over grey to navy on light ground and from blue over grey to yellow on dark ground: along blue and
yellow, which all kinds of colour vision tell apart, and ever further from the ground in lightness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import ceil, floor, log10
from typing import Any, Final
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

from .words import escaped

TEXT = 12
"""Size of a text in pixels of the picture's natural width."""
SMALL = 11
AREA = 3.5
"""Pixels of a column where a picture has as many as it may."""
Symbol = Callable[["Canvas", float, float], None]
"""Draws a mark of a legend around a point."""


def xml(words: str) -> str:
    """``words`` as XML text or attribute; what XML cannot hold, or a reader would obey, becomes an escape."""
    return escape(escaped(words, ""), {'"': "&quot;"})


def shortened(words: str, longest: int = 60) -> str:
    """A name from a trace, cut in the middle where it is long, and escaped."""
    if len(words) > longest:
        half = longest // 2
        words = f"{words[:half]}…{words[-half:]}"
    return escaped(words)


def coordinate(x: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{x:.2f}".rstrip("0").rstrip(".") if x % 1 else str(int(x))


def text_width(words: str, size: float = TEXT) -> float:
    """About how wide ``words`` will be, in pixels; on the wide side, since fonts differ."""
    return size * sum(map(_share, words))


def _share(c: str) -> float:
    if c in "fijlrt .,:;'|()[]{}!":
        return 0.42
    if c in "mwMW@%…":
        return 0.98
    return 1.0 if east_asian_width(c) in "WF" else 0.65


def fitted(words: str, width: float, size: float = TEXT) -> str:
    """``words`` cut at the front until they fit: names of sites and paths differ most at their end."""
    if text_width(words, size) <= width:
        return words
    kept = words
    while kept and text_width(f"…{kept}", size) > width:
        kept = kept[1:]
    return f"…{kept}" if kept else ""


@dataclass(frozen=True)
class CursorPlaces:
    """Where a reader can stand in a picture: columns of ``step`` pixels from ``left`` on, in rows of (top, height)."""

    left: float
    step: float
    rows: Sequence[tuple[float, float]]

    def attributes(self) -> str:
        """The same for a script, as attributes of the picture."""
        rows = " ".join(coordinate(length) for row in self.rows for length in row)
        return f' data-left="{coordinate(self.left)}" data-step="{self.step:.6g}" data-rows="{rows}"'


Stop = tuple[int | None, int]
"""A row, None for any, and a column."""


@dataclass(frozen=True)
class Axis:
    """The columns of a picture: their ``titles``, and ``about`` each what a reader is told of it, None for nothing.

    Column n begins with position ``first + n * width`` where columns are positions, so that a reader who goes from one
    picture to another stays at the same place.
    """

    titles: Sequence[str]
    about: Sequence[tuple[str, Sequence[str | None]]] = ()
    first: int = 0
    width: int = 1


@dataclass(frozen=True)
class CursorJump:
    """A key, and the places that it leads to one after the other, from the cursor on.

    ``same_row`` is for those of the cursor's row alone, ``in_order`` for those that are not in the order of places.
    """

    key: str
    label: str
    stops: Sequence[Stop]
    same_row: bool = False
    in_order: bool = False


@dataclass(frozen=True)
class DrawingKey:
    """A key that opens another drawing: by row the names of those that it may be, the first that is there is it."""

    key: str
    label: str
    to: Sequence[Sequence[str]]


@dataclass(frozen=True, eq=False)
class Drawing:
    """A picture of a page, and what its reader is told at each place.

    ``cells`` are named values by row and then column: each is None, a text or a number, or with ``words`` the number of
    one of them. ``parent_row`` is this drawing's row in the one that its door Escape leads to.
    """

    svg: str
    rows: Sequence[str]
    axis: Axis
    cells: Sequence[tuple[str, Sequence[str] | None, Sequence[Any]]]
    jumps: Sequence[CursorJump] = ()
    doors: Sequence[DrawingKey] = ()
    start: tuple[int, int] = (0, 0)
    parent_row: int = 0


class Canvas:
    """The parts of one picture, in the order in which they are painted. Lengths are pixels, y grows downwards."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, cls: str) -> None:
        """A rectangle."""
        at = f'x="{coordinate(x)}" y="{coordinate(y)}" width="{coordinate(width)}" height="{coordinate(height)}"'
        self._parts.append(f'<rect class="{cls}" {at}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        """A straight line."""
        self.path(f"M{coordinate(x1)} {coordinate(y1)}L{coordinate(x2)} {coordinate(y2)}", cls)

    def path(self, data: str, cls: str, transform: str = "") -> None:
        """One path of any number of shapes; nothing where there are none."""
        if data:
            moved = f' transform="{transform}"' if transform else ""
            self._parts.append(f'<path class="{cls}" d="{data}"{moved}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        cls: str = "dd-t",
        anchor: str = "start",
        *,
        full: str = "",
        halo: bool = False,
    ) -> None:
        """A text on the baseline ``y``; ``full`` is what was cut from it, ``halo`` for one over other marks."""
        title = f"<title>{xml(full)}</title>" if full and full != words else ""
        end = "" if anchor == "start" else f' text-anchor="{anchor}"'
        at = f'x="{coordinate(x)}" y="{coordinate(y)}"{end}'
        if halo:
            # A part of its own: `paint-order` is not known everywhere.
            self._parts.append(f'<text class="dd-halo" {at}>{xml(words)}</text>')
        self._parts.append(f'<text class="{cls}" {at}>{title}{xml(words)}</text>')

    def heading(self, title: str, width: float, standalone: bool) -> float:
        """The title of a document of its own; the y at which the rest begins."""
        if not standalone:
            return 4.0
        self.text(8, 20, fitted(title, width - 16, 15), "dd-t dd-h")
        return 30.0

    def axis(self, scale: LinearScale, ends: tuple[float, float], y: float, room: float, label: str) -> None:
        """Whole numbers of ``scale`` under a line at ``y`` between ``ends``, one in about ``room`` pixels, and what they are."""
        for number in scale.whole_ticks(max(1, int((ends[1] - ends[0]) / room))):
            x = scale(number)
            self.line(x, y, x, y + 4, "dd-axis")
            self.text(x, y + 16, f"{number:,}", "dd-t2", "middle")
        self.text(ends[0], y + 32, label, "dd-t2")

    def levels(self, scale: LinearScale | Log, ends: tuple[float, float], ticks: Iterable[float]) -> None:
        """A line across for each of ``ticks``, with its value on the left."""
        for tick in ticks:
            self.line(ends[0], scale(tick), ends[1], scale(tick), "dd-grid")
            self.text(ends[0] - 6, scale(tick) + 4, axis_label(tick), "dd-t2", "end")

    def flip(self, x: float, y: float, words: str, width: float) -> None:
        """The mark of a flip at its tip, and what it says beside it, inside of ``width``."""
        self.path(triangle(x, y, 5), "dd-flip-mark")
        left = x + 9 + text_width(words) > width
        self.text(x - 9 if left else x + 9, y - 2, words, "dd-t", "end" if left else "start")

    def legend(
        self, x: float, y: float, width: float, items: Iterable[tuple[Sequence[Symbol], str]]
    ) -> float:
        """Marks with their words, in lines of at most ``width``. Returns the y below the last line."""
        at, line = x, y + 14
        for symbols, words in items:
            wide = 16 * len(symbols) + 2
            whole = wide + text_width(words)
            if at > x and at + whole > x + width:
                at, line = x, line + 19
            for place, symbol in enumerate(symbols):
                symbol(self, at + 7 + 16 * place, line - 4)
            pieces = _lines(words, width - wide)
            for piece in pieces:
                self.text(at + wide + 2, line, fitted(piece, width - wide), full=piece)
                line += 16
            line -= 16
            at += whole + 18 if len(pieces) == 1 else width
        return line + 8

    def svg(
        self,
        cls: str,
        title: str,
        description: str,
        size: tuple[float, float],
        standalone: bool,
        places: CursorPlaces | None = None,
    ) -> str:
        """The whole picture, ``size`` its natural width and height, with ``title`` and ``description`` for who cannot see it.

        In a page it also says where its ``places`` are, for the script that puts a cursor on them.
        """
        width, height = (coordinate(round(length)) for length in size)
        head, style = "", ""
        if standalone:
            head = '<?xml version="1.0" encoding="UTF-8"?>\n'
            paper = f'<rect class="dd-paper" width="{width}" height="{height}"/>'
            style = f"<style>\n{standalone_style()}\n</style>{paper}"
        where = "" if standalone or places is None else places.attributes()
        body = "\n".join(self._parts)
        return (
            f'{head}<svg xmlns="http://www.w3.org/2000/svg" class="dd-plot {cls}" role="img" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" direction="ltr"{where}>\n'
            f"<title>{xml(title)}</title>\n<desc>{xml(description)}</desc>\n{style}\n{body}\n</svg>\n"
        )


def _lines(words: str, width: float) -> list[str]:
    lines = [""]
    for word in words.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def diamond(x: float, y: float, r: float) -> str:
    """Path data of the mark of an origin."""
    step = coordinate(round(r, 1))
    return (
        f"M{coordinate(round(x - r, 1))} {coordinate(round(y, 1))}l{step}-{step} {step} {step}-{step} {step}z"
    )


def triangle(x: float, y: float, r: float) -> str:
    """Path data of a triangle whose tip points down at ``x``, ``y``: the mark of a flip."""
    return f"M{coordinate(x)} {coordinate(y)}l{coordinate(r)} {coordinate(-1.5 * r)}h{coordinate(-2 * r)}z"


def cross(x: float, y: float, r: float) -> str:
    """Path data of an oblique cross."""
    side = coordinate(2 * r)
    return f"M{coordinate(x - r)} {coordinate(y - r)}l{side} {side}m0-{side}l-{side} {side}"


def hatched(x: float, y: float, width: float, height: float, step: float = 6) -> str:
    """Path data of the diagonals over a rectangle; those of neighbouring rectangles meet."""
    parts = []
    k = int((x + y) // step) + 1
    while k * step < x + width + y + height:
        total = k * step
        x1, x2 = max(x, total - (y + height)), min(x + width, total - y)
        if x2 > x1:
            reach = coordinate(round(x2 - x1, 1))
            parts.append(f"M{coordinate(round(x1, 1))} {coordinate(round(total - x1, 1))}l{reach}-{reach}")
        k += 1
    return "".join(parts)


def swatch(cls: str) -> Symbol:
    """A square of a legend."""
    return lambda canvas, x, y: canvas.rect(x - 6, y - 6, 12, 12, cls)


def stroke(cls: str) -> Symbol:
    """A short horizontal line of a legend."""
    return lambda canvas, x, y: canvas.line(x - 7, y, x + 7, y, cls)


def mark(data: Callable[[float, float], str], cls: str) -> Symbol:
    """A mark of a legend from its path data."""
    return lambda canvas, x, y: canvas.path(data(x, y), cls)


@dataclass(frozen=True)
class LinearScale:
    """``low`` is drawn at ``start`` and ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        """The pixel of ``x``."""
        reach = self.high - self.low
        return self.start + (self.end - self.start) * ((x - self.low) / reach if reach else 0.5)

    def ticks(self, most: int) -> list[float]:
        """Round values within the range, at most about ``most``."""
        reach = self.high - self.low
        if reach <= 0:
            return [self.low] if reach == 0 else []
        raw = reach / max(1, most)
        ten = 10.0 ** floor(log10(raw))
        step = next(n * ten for n in (1, 2, 5, 10) if n * ten >= raw * 0.999)
        return [step * n for n in range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)]

    def whole_ticks(self, most: int) -> list[int]:
        """The same, without fractions."""
        return sorted({round(x) for x in self.ticks(most) if abs(x - round(x)) < 1e-9})


@dataclass(frozen=True)
class Log:
    """Powers of ten of ``low`` to ``high`` between ``start`` and ``end``; all below ``low``, such as zero, at ``floor``."""

    low: float
    high: float
    start: float
    end: float
    floor: float

    def __call__(self, x: float) -> float:
        """The pixel of ``x``."""
        if x < self.low:
            return self.floor
        reach = log10(self.high / self.low)
        share = log10(x / self.low) / reach if reach else 0.5
        return self.start + (self.end - self.start) * min(1.0, share)

    def ticks(self, most: int) -> list[float]:
        """Powers of ten within the range, at most about ``most``."""
        first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
        step = max(1, ceil((last - first + 1) / max(1, most)))
        return [10.0**n for n in range(first, last + 1, step)]


def log_range(values: list[float]) -> tuple[float, float]:
    """The whole powers of ten around the positive values; one decade where there are none."""
    positive = [x for x in values if 0 < x < float("inf")]
    if not positive:
        return 0.1, 1.0
    low, high = 10.0 ** floor(log10(min(positive))), 10.0 ** ceil(log10(max(positive)))
    return (low, high) if high > low else (low, low * 10)


def axis_label(x: float) -> str:
    """A value of an axis, short: ``0.01``, ``1e-06``, ``2,500``."""
    if x and abs(x) < 0.001:
        return f"{x:.0e}"
    return f"{x:,.6g}" if x % 1 else f"{int(x):,}"


STEPS: Final = 8
"""Steps of the scale of sizes: classes ``dd-s0`` to ``dd-s7``."""
REQUESTS: Final = 5
"""Requests with a colour of their own, ``dd-r0`` to ``dd-r4``; all others share ``dd-rx``."""
PATHS: Final = 4
"""Kernel paths with a colour of their own, ``dd-p0`` to ``dd-p3``; the last one is also that of all further ones."""
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "bg": ("#ffffff", "#14171c"),
    "ink": ("#1b1f24", "#e8eaed"),
    "soft": ("#555d68", "#aab2bd"),
    "axis": ("#7a828d", "#858e9a"),
    "grid": ("#dfe3e8", "#2f353d"),
    "equal": ("#eff1f4", "#22272e"),
    "none": ("#8a919b", "#7f8894"),
    "unsized": ("#6f7782", "#98a1ad"),
    "origin": ("#c8330a", "#ff8552"),
    "near": ("#c8330a", "#ff8552"),
    "s0": ("#a97c00", "#5580c4"),
    "s1": ("#96762a", "#6e89b2"),
    "s2": ("#806d40", "#8793a3"),
    "s3": ("#6b634f", "#a09f92"),
    "s4": ("#56595c", "#b9ab80"),
    "s5": ("#404c66", "#d2b96a"),
    "s6": ("#283a6b", "#ebca50"),
    "s7": ("#0a1c4f", "#ffe755"),
    "r0": ("#1769aa", "#6fb4f0"),
    "r1": ("#a06a00", "#e3b04b"),
    "r2": ("#0b7d5b", "#4fc79b"),
    "r3": ("#9c3f84", "#e08fc8"),
    "r4": ("#76624d", "#c9b39b"),
    "rx": ("#737b86", "#98a1ad"),
    "p0": ("#5b6470", "#a9b2bd"),
    "p1": ("#7a3ff2", "#b896ff"),
    "p2": ("#0a7a7a", "#4cc5c5"),
    "p3": ("#8a5a00", "#d9a94a"),
    "a": ("#1769aa", "#6fb4f0"),
    "b": ("#a2470c", "#f0a36b"),
}
"""On light ground and on dark."""
LIGHT: Final = {name: light for name, (light, _) in COLOURS.items()}
DARK: Final = {name: dark for name, (_, dark) in COLOURS.items()}
# A file of its own keeps its size, and not every program takes a height of `auto`.
_FITTING: Final = ".dd-plot{max-width:100%;height:auto}"


@cache
def _rules() -> str:
    """What every class of a picture looks like, by the custom properties."""
    return (
        files("detdiff.report").joinpath("templates", "picture.css").read_text(encoding="utf-8").rstrip("\n")
    )


def style(dark: bool | None = None) -> str:
    """The rules and the custom properties ``--dd-*``: light, dark, or, with None, as the reader's system has it.

    With None an attribute ``data-theme`` of ``light`` or ``dark`` at the root decides, and paper is always light.
    """
    if dark is not None:
        return f":root{{{variables(dark)}}}\n{_FITTING}\n{_rules()}\n"
    light, night = variables(False), variables(True)
    return (
        f":root{{{light}}}\n"
        f"@media screen{{:root[data-theme=dark]{{{night}}}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{night}}}}}\n"
        f"{_FITTING}\n{_rules()}\n"
    )


def variables(dark: bool) -> str:
    """The custom properties alone, as declarations of a rule."""
    return "".join(f"--dd-{name}:{value};" for name, value in (DARK if dark else LIGHT).items())


def standalone_style() -> str:
    """The rules with light colours in their place: many programs that show SVG know no custom properties."""
    return re.sub(r"var\(--dd-([a-z0-9-]+)\)", lambda found: LIGHT[found[1]], _rules())
