"""Writing an SVG picture: shapes, text and legends with CSS classes, and the one place where text becomes XML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

from .plot_style import standalone_style
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


def name(words: str, longest: int = 60) -> str:
    """A name from a trace, cut in the middle where it is long, and escaped."""
    if len(words) > longest:
        half = longest // 2
        words = f"{words[:half]}…{words[-half:]}"
    return escaped(words)


def number(x: float) -> str:
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


class Canvas:
    """The parts of one picture, in the order in which they are painted. Lengths are pixels, y grows downwards."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, cls: str) -> None:
        """A rectangle."""
        at = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._parts.append(f'<rect class="{cls}" {at}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        """A straight line."""
        self.path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", cls)

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
        at = f'x="{number(x)}" y="{number(y)}"{end}'
        if halo:
            # A part of its own: `paint-order` is not known everywhere.
            self._parts.append(f'<text class="dd-halo" {at}>{xml(words)}</text>')
        self._parts.append(f'<text class="{cls}" {at}>{title}{xml(words)}</text>')

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

    def svg(self, cls: str, title: str, said: str, size: tuple[float, float], standalone: bool) -> str:
        """The whole picture, ``size`` its natural width and height, with ``title`` and ``said`` for who cannot see it."""
        width, height = (number(round(length)) for length in size)
        head, style = "", ""
        if standalone:
            head = '<?xml version="1.0" encoding="UTF-8"?>\n'
            paper = f'<rect class="dd-paper" width="{width}" height="{height}"/>'
            style = f"<style>\n{standalone_style()}\n</style>{paper}"
        body = "\n".join(self._parts)
        return (
            f'{head}<svg xmlns="http://www.w3.org/2000/svg" class="dd-plot {cls}" role="img" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" direction="ltr">\n'
            f"<title>{xml(title)}</title>\n<desc>{xml(said)}</desc>\n{style}\n{body}\n</svg>\n"
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
    step = number(round(r, 1))
    return f"M{number(round(x - r, 1))} {number(round(y, 1))}l{step}-{step} {step} {step}-{step} {step}z"


def triangle(x: float, y: float, r: float) -> str:
    """Path data of a triangle whose tip points down at ``x``, ``y``: the mark of a flip."""
    return f"M{number(x)} {number(y)}l{number(r)} {number(-1.5 * r)}h{number(-2 * r)}z"


def cross(x: float, y: float, r: float) -> str:
    """Path data of an oblique cross."""
    side = number(2 * r)
    return f"M{number(x - r)} {number(y - r)}l{side} {side}m0-{side}l-{side} {side}"


def hatched(x: float, y: float, width: float, height: float, step: float = 6) -> str:
    """Path data of the diagonals over a rectangle; those of neighbouring rectangles meet."""
    parts = []
    k = int((x + y) // step) + 1
    while k * step < x + width + y + height:
        total = k * step
        x1, x2 = max(x, total - (y + height)), min(x + width, total - y)
        if x2 > x1:
            reach = number(round(x2 - x1, 1))
            parts.append(f"M{number(round(x1, 1))} {number(round(total - x1, 1))}l{reach}-{reach}")
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
