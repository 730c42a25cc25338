"""The map of a request as characters: one line a layer or site, one column some positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .words import NAME, count, escaped

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import RequestSeries

Columns = NDArray[np.intp]
"""The first position of each column, ascending."""
STATES = " .#O"
"""What a cell shows, by state: not compared, equal, propagated, origin."""
LEGEND = "'.' equal, '#' propagated, 'O' an origin, ' ' not compared"
_ROWS = 40


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
    up = np.arange(0, rows, -(-rows // _ROWS))
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
    marks = _marks(request, across, positions)
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


def _marks(request: RequestSeries, across: Columns, positions: int) -> dict[int, str]:
    """By column: where the generated tokens begin, and the flip's row."""
    marks = {}
    for mark, position in (("|", request.prompt), ("^", request.flip_position)):
        if position is not None and 0 < position < positions:
            marks[int(np.searchsorted(across, position, side="right")) - 1] = mark
    return marks


def _key(request: RequestSeries, step: int, marks: Mapping[int, str]) -> Iterator[str]:
    yield LEGEND
    yield f"a column is {count(step, 'position')}"
    if "|" in marks.values():
        yield f"| the first after the prompt ({request.prompt})"
    if "^" in marks.values():
        yield f"^ the flip's row ({request.flip_position})"
