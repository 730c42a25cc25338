"""What a pass over all row pairs leaves behind: per-row counts, and the origins found on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .ports import CommonPorts
from .rows import RowPairs
from .rules import ROOT, Judged, judge
from .scan import Block

Int64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

Plans = Callable[[Int64], tuple[Int64, Int64]]

NEVER: Final = np.int64((1 << 63) - 1)


class Tally:
    """Sums over blocks. ``n`` is the number of row pairs, ``r`` of requests, ``s`` of common sites.

    ``differing`` and ``compared`` int32 [n] count digests per row; ``origins`` int32 [n] origins per row.
    ``entries`` and ``present`` uint16 [cache and state sites, n] count differing and compared cache entries per row.
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
        self.present = np.zeros((len(self.cache_sites), rows), dtype=np.uint16)
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
        """Count one block; ``forward_a`` int64 [n] is run A's forward of every row pair."""
        rows, columns = block.rows, block.columns
        request = self._pairs.request[rows]
        layer = np.zeros(len(columns.a), dtype=np.int64)
        both = np.flatnonzero(columns.pair >= 0)
        # A column shared by several ports counts for the first of them in execution order.
        layer[columns.pair[both[::-1]]] = self._port_layer[both[::-1]]
        per_layer = np.bincount(layer, minlength=len(self.layers))
        per_request = np.bincount(request, minlength=len(self.layer_compared))
        self.layer_compared += per_request[:, None] * per_layer
        self.compared[rows] = len(columns.a)
        self.one_sided += columns.one_sided * len(rows)
        for n, place in enumerate(self.cache_sites):
            outputs = self._ports.sites[place].outputs
            self.present[n, rows] = np.count_nonzero(columns.pair[list(outputs)] >= 0)
        parted = np.flatnonzero(block.differ.any(axis=1))
        if not len(parted):
            return
        rows, request = rows[parted], request[parted]
        differ = np.ascontiguousarray(block.differ[parted].T)
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
