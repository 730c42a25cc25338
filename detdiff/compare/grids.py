"""What a comparison found at every site and position: the arrays that a report draws as maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .alignment import Columns, CommonPorts, CommonSite, RowPairs
from .digests import Block, Distances

Int64 = NDArray[np.int64]
UInt8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]

NOT_COMPARED: Final = 0
EQUAL: Final = 1
PROPAGATED: Final = 2
ORIGIN: Final = 3


@dataclass(frozen=True, eq=False)
class Grid:
    """Named rows × the positions of a request, from 0.

    ``state`` uint8 [rows, positions]: 0 not compared, 1 equal, 2 propagated, 3 origin. ``share`` uint8 of the same
    shape: 255 × differing digests / compared ones, rounded up. ``ulp`` and ``rel`` float32 of the same shape: the
    largest ULP distance and relative difference of those values that differ and that both traces hold, NaN where there
    are none; None where the whole grid has none.
    """

    name: str
    rows: tuple[str, ...]
    state: UInt8
    share: UInt8
    ulp: Float32 | None
    rel: Float32 | None


@dataclass(frozen=True)
class LayerGroup:
    """A layer, or what comes before or after all layers: places of its sites, and its cache entries as (name, port)."""

    name: str
    draft: bool
    sites: tuple[int, ...]
    entries: tuple[tuple[str, int], ...]


def parts_of(ports: CommonPorts) -> tuple[LayerGroup, ...]:
    """The parts of the target in order, then those of the draft; each has at least one site."""
    found: list[LayerGroup] = []
    for draft in (False, True):
        mine = [n for n, site in enumerate(ports.sites) if site.draft == draft]
        layered = [n for n in mine if ports.sites[n].site.layer is not None]
        first = layered[0] if layered else len(ports.sites)
        groups = {"before the layers": [n for n in mine if n < first and n not in layered]}
        for layer in sorted({ports.sites[n].site.layer or 0 for n in layered}):
            groups[f"layer {layer}"] = [n for n in layered if ports.sites[n].site.layer == layer]
        groups["after the layers"] = [n for n in mine if n > first and ports.sites[n].site.layer is None]
        for name, sites in groups.items():
            entries = tuple(entry for n in sites for entry in _entries(ports, ports.sites[n]))
            if sites:
                found.append(LayerGroup(f"draft: {name}" if draft else name, draft, tuple(sites), entries))
    return tuple(found)


def _entries(ports: CommonPorts, site: CommonSite) -> list[tuple[str, int]]:
    if site.site.kind not in ("cache_write", "state"):
        return []
    found = []
    for port in site.outputs:
        side, _, head = ports.names[port].removeprefix(f"{site.site.name}.").rpartition(".")
        found.append((f"{side} head {head}" if side else f"state {head}", port))
    return found


class Cells:
    """Watches a pass and keeps a cell for each site, part and cache entry at each position of each request.

    Cells are laid out [positions of all requests one after the other, lines], where lines are first the sites, then the
    parts, then the entries; a line stands for a set of ports.
    """

    def __init__(self, ports: CommonPorts, pairs: RowPairs, distances: Distances) -> None:
        self._pairs, self._distances = pairs, distances
        self.parts = parts_of(ports)
        sites = [(*site.inputs, *site.outputs) for site in ports.sites]
        inside = [tuple(port for n in part.sites for port in sites[n]) for part in self.parts]
        entries = [(port,) for part in self.parts for _, port in part.entries]
        self._lines: list[tuple[int, ...]] = [*sites, *inside, *entries]
        self._names = [site.site.name for site in ports.sites]
        self._part_of = np.zeros(len(sites), dtype=np.int64)
        for number, part in enumerate(self.parts):
            self._part_of[list(part.sites)] = len(sites) + number
        self.lengths = np.zeros(pairs.requests, dtype=np.int64)
        np.maximum.at(self.lengths, pairs.request, pairs.position + 1)
        self._starts = np.append(0, np.cumsum(self.lengths))
        shape = int(self._starts[-1]), len(self._lines)
        self._state, self._share = np.zeros(shape, dtype=np.uint8), np.zeros(shape, dtype=np.uint8)
        self._sizes: tuple[Float32, Float32] | None = None
        self._layouts: list[_GridLines] = []

    def block(self, block: Block) -> None:
        layout = self._layout(block.columns)
        self._state[np.ix_(self._at(block.rows), layout.lines)] = EQUAL
        diverged = np.flatnonzero(block.bits.any(axis=1))
        if not len(diverged):
            return
        rows, at = block.rows[diverged], self._at(block.rows[diverged])
        differ = Block(rows, block.columns, block.bits[diverged]).differ
        counts = np.add.reduceat(differ[:, layout.pairs], layout.starts, axis=1, dtype=np.int32)
        cells = np.ix_(at, layout.lines)
        self._state[cells] = np.where(counts, PROPAGATED, EQUAL)
        self._share[cells] = (counts * 255 + layout.compared - 1) // layout.compared
        if self._distances.known:
            self._measure(rows, at, layout, differ)

    def claimed(self, place: int, sites: Int64, rows: Int64, at: Int64) -> None:
        at = self._at(rows)
        self._state[at, sites] = ORIGIN
        self._state[at, self._part_of[sites]] = ORIGIN

    def layers(self, request: int) -> Grid:
        """One row for each part."""
        shown = self._shown(request)
        lines = [len(self._names) + n for n in shown]
        return self._grid("layers", [self.parts[n].name for n in shown], lines, request)

    def sites(self, request: int) -> tuple[Grid, ...]:
        """For each row of ``layers`` its sites in execution order."""
        parts = [self.parts[n] for n in self._shown(request)]
        return tuple(
            self._grid(part.name, [self._names[n] for n in part.sites], part.sites, request) for part in parts
        )

    def entries(self, request: int) -> tuple[Grid, ...]:
        """For each part with cache entries the entries written at each position."""
        found, first, shown = [], len(self._names) + len(self.parts), self._shown(request)
        for number, part in enumerate(self.parts):
            lines = range(first, first + len(part.entries))
            first = lines.stop
            if lines and number in shown:
                found.append(self._grid(part.name, [name for name, _ in part.entries], lines, request))
        return tuple(found)

    def _shown(self, request: int) -> list[int]:
        """The parts of the target, and those of the draft where rows of it were compared."""
        state = self._state[self._starts[request] : self._starts[request + 1]]
        return [
            n
            for n, part in enumerate(self.parts)
            if not part.draft or bool(state[:, len(self._names) + n].any())
        ]

    def _grid(self, name: str, rows: Sequence[str], lines: Sequence[int], request: int) -> Grid:
        here = np.ix_(range(self._starts[request], self._starts[request + 1]), lines)
        state, share = (np.ascontiguousarray(cells[here].T) for cells in (self._state, self._share))
        sizes: tuple[Float32 | None, ...] = (None, None)
        if self._sizes is not None:
            found = [np.ascontiguousarray(cells[here].T) for cells in self._sizes]
            sizes = tuple(None if np.isnan(cells).all() else cells for cells in found)
        return Grid(name, tuple(rows), state, share, *sizes)

    def _at(self, rows: Int64) -> Int64:
        return self._starts[self._pairs.request[rows]] + self._pairs.position[rows]

    def _layout(self, columns: Columns) -> _GridLines:
        found = next((layout for layout in self._layouts if layout.columns is columns), None)
        if found is None:
            found = _GridLines(columns, self._lines)
            self._layouts.append(found)
        return found

    def _measure(self, rows: Int64, at: Int64, layout: _GridLines, differ: NDArray[np.bool_]) -> None:
        for pair in np.flatnonzero(differ.any(axis=0)).tolist():
            which = np.flatnonzero(differ[:, pair])
            columns = int(layout.columns.a[pair]), int(layout.columns.b[pair])
            found = self._distances.of(rows[which], *columns)
            if found is None:
                continue
            if self._sizes is None:
                self._sizes = (
                    np.full(self._state.shape, np.nan, dtype=np.float32),
                    np.full(self._state.shape, np.nan, dtype=np.float32),
                )
            cells = np.ix_(at[which], layout.lines_of[pair])
            for into, values in zip(self._sizes, found, strict=True):
                into[cells] = np.fmax(into[cells], values[:, None].astype(np.float32))


class _GridLines:
    """The lines that two tables have, and their column pairs one line after the other.

    ``lines`` int64 [m]; ``pairs`` int64, of which line i has ``compared[i]`` from ``starts[i]`` on.
    """

    def __init__(self, columns: Columns, lines: Sequence[tuple[int, ...]]) -> None:
        self.columns = columns
        found = [np.unique(columns.pair[list(ports)]) for ports in lines]
        found = [pairs[pairs >= 0] for pairs in found]
        self.lines = np.array([n for n, pairs in enumerate(found) if len(pairs)], dtype=np.int64)
        self.pairs = np.concatenate([np.zeros(0, dtype=np.int64), *found])
        self.compared = np.array([len(pairs) for pairs in found if len(pairs)], dtype=np.int64)
        self.starts = np.cumsum(self.compared) - self.compared

    @cached_property
    def lines_of(self) -> list[Int64]:
        """The lines that each column pair is in."""
        line = np.repeat(self.lines, self.compared)
        order = np.argsort(self.pairs, kind="stable")
        ends = np.cumsum(np.bincount(self.pairs, minlength=len(self.columns.a)))
        return [np.asarray(lines) for lines in np.split(line[order], ends[:-1])]
