"""The map: which layers differ at which positions, how much, and where differences arose; as a picture, a table and in characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..document import Block, Code, Item, Table, ViewSubject
from ..svg import Drawing
from ..words import NAME, count, escaped, named
from .map_cells import ORIGIN
from .map_drawings import map_drawings
from .map_picture import map_svg

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import RequestSeries


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
