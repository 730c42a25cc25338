"""What the page's script opens of a map: the layers, close-ups, each layer's sites and cache entries, with what is told of each cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..svg import Axis, CursorJump, Drawing, DrawingKey
from ..words import count, full_path, named, runs_of, spans
from .map_cells import NOT_COMPARED, ORIGIN, PROPAGATED, Bins, binned, origins, scale_of
from .map_picture import COLUMNS, frame_of, grid_svg

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import ForwardPoint, RequestSeries, Series, TokenPoint

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
