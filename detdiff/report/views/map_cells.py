"""A grid's positions in as many columns as a picture has, each with what matters most in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..svg import STEPS

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid

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
