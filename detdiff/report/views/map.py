"""The map: which rows of a grid differ at which positions, how much, and where differences arose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..document import Block, Code, Item, Table, ViewSubject
from ..svg import (
    AREA,
    SMALL,
    STEPS,
    Axis,
    Canvas,
    CursorJump,
    CursorPlaces,
    Drawing,
    DrawingKey,
    LinearScale,
    Symbol,
    diamond,
    fitted,
    hatched,
    mark,
    shortened,
    swatch,
    text_width,
    triangle,
)
from ..words import NAME, count, escaped, full_path, named, runs_of, spans

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import ForwardPoint, RequestSeries, Series, TokenPoint

COLUMNS = 240
"""Columns of a wide picture; one for a narrow screen has about 72."""
_HEIGHT: Final = 560
_LISTED: Final = 6
_NARROWEST: Final = 60


@dataclass(frozen=True)
class Frame:
    """What a grid's positions are: those below ``prompt`` are the prompt's; the flip is chosen at position ``flip``."""

    request: str
    prompt: int
    flip: int | None


def map_svg(request: RequestSeries, *, columns: int = COLUMNS, standalone: bool = False) -> str:
    """The map of a request: its layers over all positions."""
    return grid_svg(request.layers, frame_of(request), columns=columns, standalone=standalone)


def frame_of(request: RequestSeries) -> Frame:
    """The frame of each of a request's grids."""
    return Frame(request.id, request.prompt, request.flip_position)


def grid_svg(
    grid: Grid,
    frame: Frame,
    first: int = 0,
    last: int | None = None,
    *,
    columns: int = COLUMNS,
    scale: Scale | None = None,
    standalone: bool = False,
) -> str:
    """Rows of ``grid`` (layers, sites of a layer, cache entries) over its positions ``first`` to ``last``, both included.

    More positions than ``columns`` share columns, each of which shows the strongest state and the largest size among
    its positions. Without ``scale`` sizes are ULPs where they are known, otherwise the share of digests that differ.
    """
    end = grid.state.shape[1] - 1
    last = end if last is None else min(last, end)
    first = max(0, min(first, last))
    bins = binned(grid, first, last, columns, scale or scale_of(grid))
    plan = _CellPlan.of(grid, bins, columns)
    canvas = Canvas()
    title = f"Map of {shortened(frame.request)}: {shortened(grid.name)}"
    top = _head(canvas, plan, bins, frame, canvas.heading(title, plan.width, standalone))
    _cells(canvas, plan, bins, top)
    _rows(canvas, plan, grid, top)
    bottom = top + plan.height
    _columns(canvas, plan, bins, frame, top)
    _origins(canvas, plan, bins, top)
    height = canvas.legend(8, bottom + 40, plan.width - 16, _legend(bins, frame)) + 6
    rows = [(top + plan.row * n, plan.row) for n in range(plan.rows)]
    places = CursorPlaces(plan.left, plan.cell, rows)
    return canvas.svg("dd-map", title, _said(grid, bins, frame), (plan.width, height), standalone, places)


@dataclass(frozen=True)
class _CellPlan:
    """Where the cells lie: their left edge, and the width and height of one."""

    left: float
    cell: float
    row: float
    columns: int
    rows: int
    width: float

    @classmethod
    def of(cls, grid: Grid, bins: Bins, columns: int) -> _CellPlan:
        area = AREA * max(columns, _NARROWEST)
        longest = max((text_width(_short(row)) for row in grid.rows), default=0)
        left = min(max(44.0, longest + 16), area * 0.42)
        # A narrow screen has to hold the names of rows as well.
        area = max(60.0, area - max(0.0, left - 60))
        cell = max(0.5, min(24.0, area / max(1, bins.columns)))
        rows = len(grid.rows)
        row = max(3.0, min(18.0, _HEIGHT / max(1, rows)))
        # Whole pixels, so that no row looks thicker than another.
        row = float(int(row)) if row >= 5 else row
        left = float(round(left))
        # The legend of a short request needs more room than its cells.
        width = left + max(cell * bins.columns, min(area, 560 - left)) + 14
        return cls(left, cell, row, bins.columns, rows, width)

    @property
    def right(self) -> float:
        return self.left + self.cell * self.columns

    @property
    def height(self) -> float:
        return self.row * self.rows


def _short(row: str) -> str:
    """What stands beside a row: next to the layers it is plain what another row comes before or after."""
    return shortened(row.removesuffix(" the layers"))


def _head(canvas: Canvas, plan: _CellPlan, bins: Bins, frame: Frame, top: float) -> float:
    """The flip's name and the strip that tells the prompt from what was generated; gives the y of the first row."""
    strip = top + (33 if _flip_shown(bins, frame) else 18)
    split = plan.left + plan.cell * min(max(bins.column(frame.prompt), 0), bins.columns)
    parts = (("prompt", plan.left, split), ("generated", split, plan.right))
    for words, x1, x2 in parts:
        if x2 - x1 > 0.5:
            canvas.rect(x1, strip, x2 - x1, 5, f"dd-{words}")
            if text_width(words, SMALL) <= x2 - x1:
                canvas.text(x1, strip - 4, words, "dd-t2")
    return strip + 9


def _flip_shown(bins: Bins, frame: Frame) -> bool:
    return frame.flip is not None and bins.first <= frame.flip <= bins.last


def _cells(canvas: Canvas, plan: _CellPlan, bins: Bins, top: float) -> None:
    place = f"translate({plan.left:g} {top:g}) scale({plan.cell:.6g} {plan.row:.6g})"
    canvas.path(cell_path(bins.state == EQUAL), "dd-cells dd-equal", place)
    for step in range(STEPS):
        canvas.path(cell_path(bins.step == step), f"dd-cells dd-s{step}", place)
    # Without a size a cell is only half as high, so that nobody looks for its colour in the scale.
    canvas.path(cell_path(bins.step == UNSIZED), "dd-cells dd-unsized", place)
    lines = "".join(
        hatched(plan.left + plan.cell * x, top + plan.row * y, plan.cell * w, plan.row * h)
        for x, y, w, h in rectangles(bins.state == NOT_COMPARED)
    )
    canvas.path(lines, "dd-none")
    gaps = ""
    if plan.row >= 5:
        gaps += "".join(
            f"M{plan.left:g} {top + plan.row * row:.6g}H{plan.right:.6g}" for row in range(1, plan.rows)
        )
    if plan.cell >= 5:
        gaps += "".join(
            f"M{plan.left + plan.cell * column:.6g} {top:g}v{plan.height:.6g}"
            for column in range(1, plan.columns)
        )
    canvas.path(gaps, "dd-gap")


def _rows(canvas: Canvas, plan: _CellPlan, grid: Grid, top: float) -> None:
    every = max(1, -(-13 // max(1, int(plan.row))))
    for place, row in enumerate(grid.rows):
        if place % every == 0:
            full = shortened(row)
            shown = fitted(_short(row), plan.left - 14)
            canvas.text(plan.left - 6, top + plan.row * (place + 0.5) + 4, shown, anchor="end", full=full)


def _columns(canvas: Canvas, plan: _CellPlan, bins: Bins, frame: Frame, top: float) -> None:
    bottom = top + plan.height
    canvas.line(plan.left, bottom, plan.right, bottom, "dd-axis")
    if bins.first < frame.prompt <= bins.last:
        x = plan.left + plan.cell * bins.column(frame.prompt)
        canvas.line(x, top - 9, x, bottom, "dd-split")
    half = plan.cell / bins.width / 2
    ends = plan.left + half, plan.right - half
    positions = LinearScale(bins.first, bins.last, *ends)
    canvas.axis(positions, (plan.left, plan.right), bottom, 60, "position")
    if frame.flip is not None and _flip_shown(bins, frame):
        # The flip's cell is in a column; its line is in the middle of that column.
        x = plan.left + plan.cell * (int(bins.column(frame.flip)) + 0.5)
        canvas.line(x, top - 27, x, bottom, "dd-under")
        canvas.line(x, top - 27, x, bottom, "dd-flip")
        canvas.flip(x, top - 26, f"flip, {frame.flip:,}", plan.width)


def _origins(canvas: Canvas, plan: _CellPlan, bins: Bins, top: float) -> None:
    r = min(7.0, max(5.0, 0.45 * min(plan.cell, plan.row)))
    marks = "".join(
        diamond(plan.left + plan.cell * (column + 0.5), top + plan.row * (row + 0.5), r)
        for row, column in origins(bins)
    )
    # All rings first: a ring over its neighbour would cut it.
    canvas.path(marks, "dd-ring")
    canvas.path(marks, "dd-origin")


def _legend(bins: Bins, frame: Frame) -> list[tuple[Sequence[Symbol], str]]:
    def empty(canvas: Canvas, x: float, y: float) -> None:
        canvas.path(hatched(x - 6, y - 6, 12, 12, 5), "dd-none")

    def half(canvas: Canvas, x: float, y: float) -> None:
        canvas.line(x - 6, y, x + 6, y, "dd-unsized")

    def flip(canvas: Canvas, x: float, y: float) -> None:
        canvas.line(x, y - 7, x, y + 7, "dd-flip")
        canvas.path(triangle(x, y, 5), "dd-flip-mark")

    items: list[tuple[Sequence[Symbol], str]] = []
    if (bins.state == ORIGIN).any():
        items.append(((mark(lambda x, y: diamond(x, y, 6), "dd-origin"),), "origin here"))
    if ((bins.step >= 0) & (bins.step < UNSIZED)).any():
        steps = [swatch(f"dd-s{step}") for step in range(STEPS)]
        if bins.scale == "ulp":
            words = f"differs, in ULP: 1, {', '.join(f'{n:,}+' for n in ULP_STEPS)}"
        else:
            words = "differs: few to all of the digests"
        items.append((steps, words))
    if (bins.step == UNSIZED).any():
        items.append(((half,), "differs, size not recorded"))
    if (bins.state == EQUAL).any():
        items.append(((swatch("dd-equal"),), "bit-equal"))
    if (bins.state == NOT_COMPARED).any():
        items.append(((empty,), "not compared"))
    if _flip_shown(bins, frame):
        items.append(((flip,), "the flip is chosen here"))
    if bins.width > 1:
        items.append(((), f"A column is {bins.width:,} positions and shows the strongest of them."))
    return items


def _said(grid: Grid, bins: Bins, frame: Frame) -> str:
    """The picture in words."""
    state = grid.state[:, bins.first : bins.last + 1]
    per = [f"{(state == kind).sum():,}" for kind in (EQUAL, PROPAGATED, ORIGIN, NOT_COMPARED)]
    found = [
        f"{shortened(grid.rows[row])} at position {position + bins.first:,}"
        for position, row in sorted(
            (int(p), int(r)) for r, p in zip(*(state == ORIGIN).nonzero(), strict=True)
        )
    ]
    origins_here = "No difference arose here."
    if found:
        more = f", and {len(found) - _LISTED:,} more" if len(found) > _LISTED else ""
        origins_here = f"Origin: {'; '.join(found[:_LISTED])}{more}."
    where = f"positions {spans([(bins.first, bins.last)])}" if bins.columns else "no position"
    flip = "" if frame.flip is None else f" The flip is chosen at position {frame.flip:,}."
    return (
        f"{count(len(grid.rows), 'row')} over {where}, the first {frame.prompt:,} of "
        f"the request its prompt: {per[0]} cells bit-equal, {per[1]} propagated, {per[2]} origins, {per[3]} not compared. "
        f"{origins_here}{flip}"
    )


NOT_COMPARED, EQUAL, PROPAGATED, ORIGIN = range(4)
UNSIZED: Final = STEPS
"""The step of a cell that differs and whose size is not known."""
ULP_STEPS: Final = (2, 4, 16, 64, 256, 4096, 65536)
"""The least ULP of each step of the scale but the first, which is 1 ULP."""
Scale = Literal["ulp", "share"]
Cells = NDArray[np.int8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Bins:
    """Positions ``first`` to ``last`` of a grid in columns of ``width`` positions; the last one may be narrower.

    ``state`` is uint8 [rows, columns], the strongest of a column's states. ``step`` is int8 [rows, columns], the
    largest size among what differs: 0 to ``STEPS - 1``, ``UNSIZED`` where no size is known, -1 where nothing differs.
    """

    first: int
    last: int
    width: int
    state: NDArray[np.uint8]
    step: Cells
    scale: Scale

    @property
    def columns(self) -> int:
        """How many there are."""
        return int(self.state.shape[1])

    def column(self, position: float) -> float:
        """Where the left edge of a position lies, in columns."""
        return (position - self.first) / self.width


def scale_of(grid: Grid) -> Scale:
    """ULPs where they are known of half of what differs or more; else the share of digests that differ."""
    if grid.ulp is None:
        return "share"
    differs = grid.state >= PROPAGATED
    known = differs & np.isfinite(grid.ulp)
    return "ulp" if known.any() and 2 * known.sum() >= differs.sum() else "share"


def binned(grid: Grid, first: int, last: int, columns: int, scale: Scale) -> Bins:
    """Positions ``first`` to ``last``, both included, in at most ``columns`` bins."""
    here = slice(first, last + 1)
    state = grid.state[:, here]
    positions = state.shape[1]
    width = max(1, -(-positions // columns))
    starts = np.arange(0, positions, width)
    step = np.full(state.shape, -1, np.int8)
    differs = state >= PROPAGATED
    if scale == "ulp" and grid.ulp is not None:
        ulp = grid.ulp[:, here]
        # An infinite distance, as to a NaN, is the largest there is; one that is not known is none.
        known = differs & ~np.isnan(ulp)
        step[known] = np.searchsorted(np.array(ULP_STEPS, np.float32), ulp[known], side="right")
    else:
        share = grid.share[:, here]
        known = differs & (share > 0)
        step[known] = (share[known].astype(np.int16) - 1) * STEPS // 255
    if positions:
        state = np.maximum.reduceat(state, starts, axis=1)
        step = np.maximum.reduceat(step, starts, axis=1)
    step[(step < 0) & (state >= PROPAGATED)] = UNSIZED
    return Bins(first, last, width, state.astype(np.uint8), step, scale)


def origins(bins: Bins) -> list[tuple[int, int]]:
    """Row and column of each cell in which something arose."""
    return [(int(row), int(column)) for row, column in np.argwhere(bins.state == ORIGIN)]


def stretches(mask: Mask) -> list[tuple[int, int, int]]:
    """The cells of ``mask`` as stretches of a row: row, first column, columns; row by row."""
    edges = np.zeros((mask.shape[0], mask.shape[1] + 2), np.int8)
    edges[:, 1:-1] = mask
    change = np.diff(edges, axis=1)
    rows, starts = np.nonzero(change == 1)
    ends = np.nonzero(change == -1)[1]
    return list(zip(rows.tolist(), starts.tolist(), (ends - starts).tolist(), strict=True))


def rectangles(mask: Mask) -> Iterator[tuple[int, int, int, int]]:
    """The cells of ``mask`` as disjoint rectangles: column, row, columns, rows. Equal stretches of rows in turn are one."""
    open_: dict[
        tuple[int, int], tuple[int, int]
    ] = {}  # first column and columns to first row and the one after the last
    for row, column, columns in stretches(mask):
        top, below = open_.get((column, columns), (row, row))
        if below != row:
            yield column, top, columns, below - top
            top = row
        open_[column, columns] = top, row + 1
    for (column, columns), (top, below) in open_.items():
        yield column, top, columns, below - top


def cell_path(mask: Mask) -> str:
    """The cells of ``mask`` as path data of lines in the middle of each row; a column and a row are 1 long.

    Stroked as wide as a row they are its cells, in a third of the characters that rectangles take.
    """
    parts, row, end = [], -1, 0
    for at, column, columns in stretches(mask):
        parts.append(f"m{column - end} 0h{columns}" if at == row else f"M{column} {at}.5h{columns}")
        row, end = at, column + columns
    return "".join(parts)


# What the script opens.

_STATES: Final = (
    "not compared",
    "bit-equal",
    "propagated: its inputs differed already",
    "origin: inputs equal, outputs not",
)
_SHARES: Final = tuple(f"{n} % of the digests" for n in range(101))
_ALL: Final = "all layers"


def map_drawings(
    series: Series, request: RequestSeries, position: int | None
) -> list[tuple[str, Callable[[], Drawing]]]:
    """The layers, then close-ups of what has too many positions for one column each, then each layer's sites and entries.

    ``position`` is that of the request's first origin, None where there is none. What is needed most comes first.
    """
    layers = request.layers
    if position is None:
        origins_here = np.flatnonzero((layers.state == ORIGIN).any(axis=0))
        position = int(origins_here[0]) if origins_here.size else None
    axes = _MapAxes(series, request)
    windows = [] if request.positions <= COLUMNS else [position, request.flip_position]
    close = [_window(at, request.positions) for at in windows if at is not None]
    near = close[:1] if position is not None else []
    first = 0
    if position is not None and layers.state.shape[1] > position:
        first = int(np.argmax(layers.state[:, position] == ORIGIN))
    grids = [(f"sites of {grid.name}", grid) for grid in request.sites]
    entries = [(f"cache entries of {grid.name}", grid) for grid in request.entries]
    parts = [*grids[first : first + 1], *entries[first : first + 1]]
    parts += [each for each in (*grids, *entries) if each not in parts]
    whole = (0, request.positions - 1)
    wanted = [(_ALL, layers, whole)]
    wanted += [(_ALL, layers, window) for window in dict.fromkeys(close)]
    for n, (name, grid) in enumerate(parts):
        wanted.append((name, grid, whole))
        wanted += [(name, grid, window) for window in near if n < 2]
    return [
        (
            _windowed(name, window, whole),
            partial(_drawing, name, grid, window, request, axes, position),
        )
        for name, grid, window in wanted
    ]


def _window(position: int, positions: int) -> tuple[int, int]:
    """As many positions as there are columns, with ``position`` in the middle where that can be."""
    first = max(0, min(positions - COLUMNS, position - COLUMNS // 2))
    return first, min(positions, first + COLUMNS) - 1


def _windowed(name: str, window: tuple[int, int], whole: tuple[int, int]) -> str:
    shown = named(name)
    return shown if window == whole else f"{shown}, positions {window[0]:,} to {window[1]:,}"


def _drawing(
    name: str,
    grid: Grid,
    window: tuple[int, int],
    request: RequestSeries,
    axes: _MapAxes,
    origins_here: int | None,
) -> Drawing:
    whole = (0, request.positions - 1)
    bins = binned(grid, *window, COLUMNS, scale_of(grid))
    axis = axes.of(bins, grid.name.startswith("draft: "))

    def column(position: int | None) -> int | None:
        inside = position is not None and bins.first <= position <= bins.last
        return int(bins.column(position)) if inside and position is not None else None

    found = [(row, at) for row, at in sorted(origins(bins), key=lambda cell: (cell[1], cell[0]))]
    jumps = []
    at = column(origins_here)
    if at is not None:
        jumps.append(CursorJump("b", "Origin", [next((each for each in found if each[1] == at), (None, at))]))
    if (flip := column(request.flip_position)) is not None:
        jumps.append(CursorJump("f", "Flip", [(None, flip)]))
    if found:
        jumps.append(CursorJump("n", "Next origin", found))
    layers = grid is request.layers
    names = grid.rows if layers else (grid.name,) * len(grid.rows)
    doors = [
        DrawingKey(
            key,
            label,
            [(_windowed(f"{part} of {each}", window, whole), named(f"{part} of {each}")) for each in names],
        )
        for key, label, part in (
            ("Enter", "Open sites", "sites"),
            ("c", "Open cache entries", "cache entries"),
        )
        if not name.startswith(part)
    ]
    if not layers:
        doors.append(
            DrawingKey("Escape", "Back to layers", [(_windowed(_ALL, window, whole), _ALL)] * len(names))
        )
    start = next((each for each in found if each[1] == at), found[0] if found else (0, 0))
    return Drawing(
        svg=grid_svg(grid, frame_of(request), *window),
        rows=[named(row) for row in grid.rows],
        axis=axis,
        cells=_cell_values(grid, bins),
        jumps=jumps,
        doors=doors,
        start=(start[0] or 0, start[1]),
        parent_row=request.layers.rows.index(grid.name) if grid.name in request.layers.rows else 0,
    )


def _cell_values(grid: Grid, bins: Bins) -> list[tuple[str, Sequence[str] | None, Sequence[Any]]]:
    """The largest of each column's values; sizes only of what differs."""
    here = slice(bins.first, bins.last + 1)
    starts = np.arange(0, bins.last + 1 - bins.first, bins.width)
    differs = bins.state >= PROPAGATED
    found: list[tuple[str, Sequence[str] | None, Sequence[Any]]] = [
        ("state", _STATES, bins.state.ravel().tolist())
    ]
    if not starts.size or not differs.any():
        return found
    if bins.width > 1:
        state = grid.state[:, here]
        several = np.add.reduceat((state >= PROPAGATED).astype(np.int64), starts, axis=1)
        compared = np.add.reduceat((state > NOT_COMPARED).astype(np.int64), starts, axis=1)
        words = [
            f"{n:,} of {of:,} positions" if n else None
            for n, of in zip(several.ravel().tolist(), compared.ravel().tolist(), strict=True)
        ]
        found.append(("differ", None, words))
        found.append(("origin at", None, _origin_at(state, bins)))
    share = np.maximum.reduceat(grid.share[:, here], starts, axis=1)
    percent = np.where(differs, np.rint(share / 255 * 100), -1).astype(int)
    found.append(("at most" if bins.width > 1 else "differ", _SHARES, percent.ravel().tolist()))
    for label, sizes in (("max ULP", grid.ulp), ("max relative", grid.rel)):
        if sizes is not None:
            largest = np.fmax.reduceat(sizes[:, here], starts, axis=1)
            known = np.where(differs, largest, np.nan).ravel().tolist()
            found.append((label, None, [_told_size(x) for x in known]))
    return found


def _origin_at(state: NDArray[np.uint8], bins: Bins) -> list[str | None]:
    places: list[str | None] = [None] * bins.state.size
    for row, column in origins(bins):
        first = column * bins.width
        at = np.flatnonzero(state[row, first : first + bins.width] == ORIGIN) + bins.first + first
        places[row * bins.columns + column] = f"position {spans(runs_of(at.tolist()))}"
    return places


def _told_size(x: float) -> str | float | None:
    if np.isnan(x):
        return None
    return "infinite" if np.isinf(x) else float(f"{x:.3g}") if x < 1000 else round(x)


class _MapAxes:
    """What is told of a position: its token, and which forward ran its row in either run. One axis for all grids alike."""

    def __init__(self, series: Series, request: RequestSeries) -> None:
        self._series, self._request = series, request
        self._made: dict[tuple[int, int, bool], Axis] = {}
        b = {token.index: token for token in request.tokens_b}
        self._tokens = {token.position: _chosen(token, b.get(token.index)) for token in request.tokens_a}

    def of(self, bins: Bins, draft: bool) -> Axis:
        key = bins.first, bins.width, draft
        if key not in self._made:
            firsts = range(bins.first, bins.last + 1, bins.width)
            ends = [min(bins.last, first + bins.width - 1) for first in firsts]
            titles = [
                f"position {first}" if first == last else f"positions {first} to {last}"
                for first, last in zip(firsts, ends, strict=True)
            ]
            about: list[tuple[str, Sequence[str | None]]] = [
                ("token", [self._token(first) for first in firsts])
            ]
            for run, points in (("a", self._series.a), ("b", self._series.b)):
                wrote = self._forwards(points, "draft" if draft else "target")
                about.append((f"in {run}", [wrote.get(first) for first in firsts]))
            self._made[key] = Axis(titles, about, bins.first, bins.width)
        return self._made[key]

    def _token(self, position: int) -> str:
        prompt = self._request.prompt
        return self._tokens.get(position) or f"of the prompt, {position + 1} of {prompt}"

    def _forwards(self, points: Sequence[ForwardPoint], model: str) -> dict[int, str]:
        """By position the last forward that ran the request's row."""
        found: dict[int, str] = {}
        for point in points:
            if point.model != model:
                continue
            for member in point.members:
                if member.request == self._request.id:
                    caption = _forward(point)
                    found |= dict.fromkeys(range(member.start, member.start + member.rows), caption)
        return found


def _chosen(token: TokenPoint, other: TokenPoint | None) -> str:
    sentence = f'chooses generated token {token.index} "{_cut(token.text)}"'
    if other is None or other.token == token.token:
        return sentence
    return f'{sentence} in a, "{_cut(other.text)}" in b'


def _cut(text: str) -> str:
    return named(text) if len(text) <= 40 else f"{named(text[:40])}…"


def _forward(point: ForwardPoint) -> str:
    who = " + ".join(f"{m.rows} {m.phase} of {named(m.request, 80)}" for m in point.members[:3])
    if len(point.members) > 3:
        who += f" + {len(point.members) - 3} more"
    path = "" if point.linear_path is None else f"; linear calls on {full_path(point.linear_path)}"
    return f"forward {point.forward}, {count(point.rows, 'row')} ({who}){path}"


class MapView:
    """Which layers and positions differ, and where differences arose."""

    name = "map"
    title = "Map"
    sentence = "Which layers and positions differ, and where differences arose."
    section = "origin", "Where it arose"
    of_request = True

    def shows(self, subject: ViewSubject) -> bool:
        return subject.request is not None and bool(subject.request.layers.rows)

    def picture(self, subject: ViewSubject, *, columns: int, standalone: bool) -> str:
        return map_svg(subject.one, columns=columns, standalone=standalone)

    def drawings(self, subject: ViewSubject) -> Sequence[tuple[str, Callable[[], Drawing]]]:
        origin = subject.origin
        return map_drawings(subject.series, subject.one, None if origin is None else origin.position)

    def table(self, subject: ViewSubject, most: int) -> Table:
        headers = ("layer", "positions", "propagated", "origins", "first", "last", "max ULP", "max relative")
        grid = subject.one.layers
        rows = list(range(len(grid.rows)))
        caption = "Positions that differ in each layer"
        if len(rows) > most:
            caption += f"; {most} of {len(rows):,} layers, those with origins first"
            origins_here = (grid.state == ORIGIN).sum(axis=1)
            rows = sorted(sorted(rows, key=lambda n: (-origins_here[n], n))[:most])
        return Table(headers, tuple(_layer(grid, n) for n in rows), caption=caption)

    def words(self, subject: ViewSubject, columns: int) -> Iterator[Block]:
        """The map in characters, and that of the sites of the layer in which the first origin lies."""
        request = subject.one
        yield from _grid_blocks(
            "layers", request.layers, request, f"{request.positions:,} positions", columns
        )
        origin = subject.origin
        sites = None if origin is None else next((g for g in request.sites if origin.site in g.rows), None)
        if sites is not None:
            where = f"{named(sites.name)}, where the first arose"
            yield from _grid_blocks("sites", sites, request, where, columns)


def _layer(grid: Grid, n: int) -> tuple[str, ...]:
    state = grid.state[n]
    differing = np.flatnonzero(state >= 2)
    ends = (str(differing[0]), str(differing[-1])) if differing.size else ("-", "-")
    return (
        named(grid.rows[n]),
        f"{np.count_nonzero(state):,}",
        f"{np.count_nonzero(state == 2):,}",
        f"{np.count_nonzero(state == ORIGIN):,}",
        *ends,
        _largest(grid.ulp, n),
        _largest(grid.rel, n),
    )


def _largest(sizes: Any, n: int) -> str:
    if sizes is None or not np.isfinite(sizes[n]).any():
        return "-"
    return f"{np.nanmax(np.where(np.isfinite(sizes[n]), sizes[n], np.nan)):,.4g}"


def _grid_blocks(of: str, grid: Grid, request: RequestSeries, sentence: str, columns: int) -> Iterator[Block]:
    made = map_text(grid, request, columns)
    if made is not None:
        yield Item(f"  map of {of}: ", f"{named(request.id)}, {sentence}")
        yield Code("\n".join(made.lines), "text")
        yield Item("    key: ", made.key)


Columns = NDArray[np.intp]
"""The first position of each column, ascending."""
STATES = " .#O"
"""What a cell shows, by state: not compared, equal, propagated, origin."""
LEGEND = "'.' equal, '#' propagated, 'O' an origin, ' ' not compared"
_TEXT_ROWS = 40


@dataclass(frozen=True)
class MapText:
    """``lines`` with a line of marks under them, and the ``key`` to both."""

    lines: list[str]
    key: str


def map_text(grid: Grid, request: RequestSeries, columns: int) -> MapText | None:
    """The grid in at most ``columns`` characters a line and 40 lines; of each cell the most that happened in it.

    None where it has no cell.
    """
    rows, positions = grid.state.shape
    if not rows or not positions:
        return None
    up = np.arange(0, rows, -(-rows // _TEXT_ROWS))
    size = int(up[1]) if len(up) > 1 else rows
    labels = [_label(grid.rows[first : first + size], columns // 3) for first in up.tolist()]
    wide = max(map(len, labels))
    across = _edges(positions, max(8, columns - wide - 1))
    # The states are in the order of what matters most.
    found = np.maximum.reduceat(np.maximum.reduceat(grid.state, up, axis=0), across, axis=1)
    lines = [
        f"{label:<{wide}} {''.join(STATES[state] for state in row)}".rstrip()
        for label, row in zip(labels, found.tolist(), strict=True)
    ]
    marks = _text_marks(request, across, positions)
    if marks:
        lines.append(" " * (wide + 1) + "".join(marks.get(n, " ") for n in range(max(marks) + 1)))
    return MapText(lines, "; ".join(_key(request, int(across[1]) if len(across) > 1 else positions, marks)))


def _label(names: Sequence[str], longest: int) -> str:
    """The end of a long name is what tells it from the others."""
    more = "" if len(names) == 1 else f" and {len(names) - 1} more"
    name = names[0] if len(names[0]) <= NAME else names[0][-NAME:]
    name = escaped(name)
    room = max(4, longest - len(more))
    return f"{name if len(name) <= room else f'…{name[1 - room :]}'}{more}"


def _edges(positions: int, columns: int) -> Columns:
    """The first position of each column."""
    return np.arange(0, positions, -(-positions // columns), dtype=np.intp)


def _text_marks(request: RequestSeries, across: Columns, positions: int) -> dict[int, str]:
    """By column: where the generated tokens begin, and the flip's row."""
    marks = {}
    for sign, position in (("|", request.prompt), ("^", request.flip_position)):
        if position is not None and 0 < position < positions:
            marks[int(np.searchsorted(across, position, side="right")) - 1] = sign
    return marks


def _key(request: RequestSeries, step: int, marks: Mapping[int, str]) -> Iterator[str]:
    yield LEGEND
    yield f"a column is {count(step, 'position')}"
    if "|" in marks.values():
        yield f"| the first after the prompt ({request.prompt})"
    if "^" in marks.values():
        yield f"^ the flip's row ({request.flip_position})"
