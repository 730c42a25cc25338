"""What a pass over all row pairs leaves behind: per-row counts, and the origins found on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .ports import Columns, CommonPorts
from .rows import RowPairs
from .rules import ROOT, Judged, judge
from .scan import Block

Int64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

Plans = Callable[[Int64], tuple[Int64, Int64]]

_WAITING_BYTES: Final = 16 << 20
NEVER: Final = np.int64((1 << 63) - 1)


class Tally:
    """Sums over blocks. ``n`` is the number of row pairs, ``r`` of requests, ``s`` of common sites.

    ``differing`` and ``compared`` int32 [n] count digests per row; ``origins`` int32 [n] origins per row.
    ``entries`` uint16 [cache and state sites, n] counts differing cache entries per row.
    ``layer_differing`` and ``layer_compared`` int64 [r, layers].
    ``carried``, ``lasting``, ``touched`` int64 [r, s], and ``pending`` [r, s + 1] with ROOT last, hold the smallest
    position << 32 | row place at which that happened, or NEVER. ``counts`` counts origins by (request, plan a, plan b, site).
    ``first`` holds per request (forward a, place of the first differing site, row place, site) of the first origin.
    """

    def __init__(self, ports: CommonPorts, pairs: RowPairs, requests: int, plans: Plans) -> None:
        """``plans`` gives the kernel plan numbers of row pairs in both runs; it is asked only where origins are."""
        rows, sites = len(pairs), len(ports.sites)
        self._ports, self._pairs, self._plans = ports, pairs, plans
        self.differing = np.zeros(rows, dtype=np.int32)
        self.compared = np.zeros(rows, dtype=np.int32)
        self.origins = np.zeros(rows, dtype=np.int32)
        self.cache_sites = tuple(
            n for n, s in enumerate(ports.sites) if s.site.kind in ("cache_write", "state")
        )
        self.entries = np.zeros((len(self.cache_sites), rows), dtype=np.uint16)
        self._columns: list[Columns] = []
        self._columns_of = np.zeros(rows, dtype=np.int32)
        self._waiting: dict[int, list[Block]] = {}
        self._waiting_bytes = 0
        layers = {site.site.layer for site in ports.sites}
        self.layers = tuple(sorted(layers, key=lambda layer: (layer is None, layer or 0)))
        place = {layer: n for n, layer in enumerate(self.layers)}
        self._port_layer = np.array(
            [place[ports.sites[site].site.layer] for site in ports.site], dtype=np.int64
        )
        self.layer_differing = np.zeros((requests, len(self.layers)), dtype=np.int64)
        self.layer_compared = np.zeros((requests, len(self.layers)), dtype=np.int64)
        self.carried = np.full((requests, sites), NEVER, dtype=np.int64)
        self.lasting = np.full((requests, sites), NEVER, dtype=np.int64)
        self.touched = np.full((requests, sites), NEVER, dtype=np.int64)
        self.pending = np.full((requests, sites + 1), NEVER, dtype=np.int64)
        self.counts: Counter[tuple[int, int, int, int]] = Counter()
        self.first: dict[int, tuple[int, int, int, int]] = {}
        self.one_sided = 0
        self.blind = 0

    def add(self, block: Block, forward_a: Int64) -> None:
        """Count one block; ``forward_a`` int64 [n] is run A's forward of every row pair. ``settle`` ends the pass."""
        rows, columns = block.rows, block.columns
        number = next((n for n, known in enumerate(self._columns) if known is columns), len(self._columns))
        if number == len(self._columns):
            self._columns.append(columns)
        self._columns_of[rows] = number
        self.compared[rows] = len(columns.a)
        self.one_sided += columns.one_sided * len(rows)
        per_layer = np.bincount(self._layers_of(columns), minlength=len(self.layers))
        per_request = np.bincount(self._pairs.request[rows], minlength=len(self.layer_compared))
        self.layer_compared += per_request[:, None] * per_layer
        parted = np.flatnonzero(block.differ.any(axis=1))
        if len(parted):
            # Judging takes about as long for one row as for a thousand, so rows wait for others of their tables.
            self._waiting.setdefault(number, []).append(Block(rows[parted], columns, block.differ[parted]))
            self._waiting_bytes += len(parted) * len(columns.a)
            if self._waiting_bytes >= _WAITING_BYTES:
                self.settle(forward_a)

    def settle(self, forward_a: Int64) -> None:
        """Judge the rows that still wait."""
        for blocks in self._waiting.values():
            self._judge(Block.joined(blocks), forward_a)
        self._waiting, self._waiting_bytes = {}, 0

    def present(self, n: int, rows: Int64) -> Int64:
        """How many entries of cache site ``n`` were compared in each of ``rows``, int64."""
        outputs = list(self._ports.sites[self.cache_sites[n]].outputs)
        counts = np.array([np.count_nonzero(columns.pair[outputs] >= 0) for columns in self._columns])
        return np.asarray(counts[self._columns_of[rows]], dtype=np.int64)

    def _layers_of(self, columns: Columns) -> Int64:
        """The place in ``layers`` of each column pair; one that several ports share counts for the first of them."""
        layer = np.zeros(len(columns.a), dtype=np.int64)
        both = np.flatnonzero(columns.pair >= 0)[::-1]
        layer[columns.pair[both]] = self._port_layer[both]
        return layer

    def _judge(self, block: Block, forward_a: Int64) -> None:
        rows, columns = block.rows, block.columns
        request = self._pairs.request[rows]
        layer = self._layers_of(columns)
        differ = np.ascontiguousarray(block.differ.T)
        self.differing[rows] = np.count_nonzero(differ, axis=0)
        for number in np.unique(request).tolist():
            per_pair = np.count_nonzero(differ[:, request == number], axis=1)
            self.layer_differing[number] += np.bincount(layer, per_pair, len(self.layers)).astype(np.int64)
        for n, place in enumerate(self.cache_sites):
            found = columns.pair[list(self._ports.sites[place].outputs)]
            self.entries[n, rows] = np.count_nonzero(differ[found[found >= 0]], axis=0)
        judged = judge(self._ports, columns, differ)
        self.blind += judged.blind
        self._note_lasting(judged, rows, request)
        for place, mask in judged.origins.items():
            first = judged.first.get(place)
            at = np.full(len(rows), place) if first is None else first
            self.claim(place, rows[mask], at[mask], forward_a)

    def claim(self, place: int, rows: Int64, at: Int64, forward_a: Int64) -> None:
        """Count an origin at the site ``place`` (or ROOT) in every one of ``rows``; ``at`` orders them by site."""
        request = self._pairs.request[rows]
        self.origins[rows] += 1
        site = at if place == ROOT else np.full(len(rows), place)
        keys = np.stack([request, *self._plans(rows), site], axis=1)
        found, counts = np.unique(keys, axis=0, return_counts=True)
        for (number, plan_a, plan_b, where), count in zip(found.tolist(), counts.tolist(), strict=True):
            self.counts[number, plan_a, plan_b, where] += count
        forward = forward_a[rows]
        order = np.lexsort((rows, at, forward, request))
        leading = order[np.flatnonzero(np.diff(request[order], prepend=-1))]
        for n in leading.tolist():
            mine = (int(forward[n]), int(at[n]), int(rows[n]), place)
            number = int(request[n])
            self.first[number] = min(self.first.get(number, mine), mine)

    def _note_lasting(self, judged: Judged, rows: Int64, request: Int64) -> None:
        key = (self._pairs.position[rows] << 32) | rows
        for place, mask in judged.carried.items():
            np.minimum.at(self.carried[:, place], request[mask], key[mask])
        for place, mask in judged.lasting.items():
            np.minimum.at(self.lasting[:, place], request[mask], key[mask])
        for place, mask in judged.pending.items():
            np.minimum.at(self.pending[:, place], request[mask], key[mask])
        for place, site in enumerate(self._ports.sites):
            if not site.stateful:
                continue
            for inside in (place, *site.descendants):
                if inside in judged.touched:
                    mask = judged.touched[inside]
                    np.minimum.at(self.touched[:, place], request[mask], key[mask])
