"""The picture of a grid: which rows differ at which positions, how much, and where differences arose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..svg import (
    AREA,
    SMALL,
    STEPS,
    Canvas,
    CursorPlaces,
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
from ..words import count, spans
from .map_cells import (
    EQUAL,
    NOT_COMPARED,
    ORIGIN,
    PROPAGATED,
    ULP_STEPS,
    UNSIZED,
    Bins,
    Scale,
    binned,
    cell_path,
    origins,
    rectangles,
    scale_of,
)

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import RequestSeries

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
