"""What a pass over all row pairs leaves behind: per-row counts, and the origins found on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from .ports import Columns, CommonPorts
from .rows import RowPairs
from .rules import ROOT, Judged, Mask, Rules, union
from .scan import Block

Int64 = NDArray[np.int64]

Calls = Callable[[Int64, int], tuple[Int64, Int64]]

_WAITING_BYTES: Final = 32 << 20
_LOW: Final = (1 << 32) - 1
NEVER: Final = np.int64((1 << 63) - 1)


class Watch(Protocol):
    """Sees what a pass finds, for those who want more of it than the sums."""

    def block(self, block: Block) -> None:
        """Rows that are compared; every row pair comes once, before any origin in it."""

    def claimed(self, sites: Int64, rows: Int64) -> None:
        """Origins: the places of their sites and their row pairs, int64 [n] each."""


class Tally:
    """Sums over blocks. ``n`` is the number of row pairs, ``r`` of streams (requests of a model), ``s`` of common sites.

    ``differing`` and ``compared`` int32 [n] count digests per row; ``origins`` int32 [n] origins per row.
    ``entries`` uint16 [cache and state sites, n] counts differing cache entries per row.
    ``layer_differing`` and ``layer_compared`` int64 [r, layers].
    ``carried``, ``lasting``, ``touched`` int64 [r, s], and ``pending`` [r, s + 1] with ROOT last, hold the smallest
    position << 32 | row place at which that happened, or NEVER; so does ``differs`` [r, cache and state sites] for
    entries. ``counts`` counts origins by (request, call a, call b, site).
    ``first`` holds per request (forward a, place of the first differing site, row place, site) of the first origin.
    """

    def __init__(self, ports: CommonPorts, pairs: RowPairs, calls: Calls, watch: Watch | None = None) -> None:
        """``calls`` numbers, for row pairs and a site's place, the kernel calls of both runs; only origins ask it."""
        rows, sites, requests = len(pairs), len(ports.sites), pairs.streams
        self._ports, self._pairs, self._calls, self._watch = ports, pairs, calls, watch
        self.differing = np.zeros(rows, dtype=np.int32)
        self.compared = np.zeros(rows, dtype=np.int32)
        self.origins = np.zeros(rows, dtype=np.int32)
        self.cache_sites = tuple(
            n for n, s in enumerate(ports.sites) if s.site.kind in ("cache_write", "state")
        )
        self.entries = np.zeros((len(self.cache_sites), rows), dtype=np.uint16)
        self.differs = np.full((requests, len(self.cache_sites)), NEVER, dtype=np.int64)
        self._columns: list[Columns] = []
        self._rules: list[Rules] = []
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
        if self._watch is not None:
            self._watch.block(block)
        rows, columns = block.rows, block.columns
        number = self._number(columns)
        self._columns_of[rows] = number
        differing = np.bitwise_count(block.bits).sum(axis=1, dtype=np.int32)
        self.differing[rows] = differing
        parted = np.flatnonzero(differing)
        if len(parted):
            # Judging takes about as long for one row as for a thousand, so rows wait for others of their tables.
            self._waiting.setdefault(number, []).append(Block(rows[parted], columns, block.bits[parted]))
            self._waiting_bytes += len(parted) * columns.words * 8
            if self._waiting_bytes >= _WAITING_BYTES:
                self._judge_waiting(forward_a)

    def settle(self, forward_a: Int64) -> None:
        """Judge the rows that still wait, and count what was compared."""
        self._judge_waiting(forward_a)
        for number, columns in enumerate(self._columns):
            rows = np.flatnonzero(self._columns_of == number)
            self.compared[rows] = len(columns.a)
            self.one_sided += columns.one_sided * len(rows)
            per_layer = np.bincount(self._layers_of(columns), minlength=len(self.layers))
            per_request = np.bincount(self._pairs.stream[rows], minlength=len(self.layer_compared))
            self.layer_compared += per_request[:, None] * per_layer

    def judged(self, columns: Columns, differ: Sequence[Mask]) -> Judged:
        """The verdict on some rows of a block; ``differ`` has the rows in which each column pair differs."""
        return self._rules[self._number(columns)].judge(differ)

    def present(self, n: int, rows: Int64) -> Int64:
        """How many entries of cache site ``n`` were compared in each of ``rows``, int64."""
        outputs = list(self._ports.sites[self.cache_sites[n]].outputs)
        counts = np.array([np.count_nonzero(columns.pair[outputs] >= 0) for columns in self._columns])
        return counts.astype(np.int64).take(self._columns_of.take(rows))

    def _layers_of(self, columns: Columns) -> Int64:
        """The place in ``layers`` of each column pair; one that several ports share counts for the first of them."""
        layer = np.zeros(len(columns.a), dtype=np.int64)
        both = np.flatnonzero(columns.pair >= 0)[::-1]
        layer[columns.pair[both]] = self._port_layer[both]
        return layer

    def _number(self, columns: Columns) -> int:
        number = next((n for n, known in enumerate(self._columns) if known is columns), len(self._columns))
        if number == len(self._columns):
            self._columns.append(columns)
            self._rules.append(Rules(self._ports, columns))
        return number

    def _judge_waiting(self, forward_a: Int64) -> None:
        for blocks in self._waiting.values():
            block = Block.joined(blocks)
            request = self._pairs.stream[block.rows]
            order = np.lexsort((self._pairs.position[block.rows], request))
            for mine in np.split(order, np.flatnonzero(np.diff(request[order])) + 1):
                self._judge(Block(block.rows[mine], block.columns, block.bits[mine]), forward_a)
        self._waiting, self._waiting_bytes = {}, 0

    def _judge(self, block: Block, forward_a: Int64) -> None:
        """Rows of one request by ascending position, so that the lowest bit of a mask is its earliest row."""
        rows, columns = block.rows, block.columns
        number = int(self._pairs.stream[rows[0]])
        turned = block.turned()
        differ = [int.from_bytes(bits.tobytes(), "little") for bits in turned]
        counts = [mask.bit_count() for mask in differ]
        self.layer_differing[number] += np.bincount(
            self._layers_of(columns), counts, len(self.layers)
        ).astype(np.int64)
        key = (self._pairs.position[rows] << 32) | rows
        for n, place in enumerate(self.cache_sites):
            found = columns.pair[list(self._ports.sites[place].outputs)]
            self._note_earliest(
                self.differs[number], {n: union(differ[pair] for pair in found if pair >= 0)}, key
            )
            bits = np.unpackbits(turned[found[found >= 0]], axis=1, count=len(rows), bitorder="little")
            self.entries[n, rows] = bits.sum(axis=0, dtype=np.uint16)
        judged = self.judged(columns, differ)
        self.blind += judged.blind
        self._note_earliest(self.carried[number], judged.carried, key)
        self._note_earliest(self.lasting[number], judged.lasting, key)
        self._note_earliest(self.pending[number], judged.pending, key)
        for place, site in enumerate(self._ports.sites):
            if site.stateful:
                inside = (judged.touched.get(n, 0) for n in site.before)
                self._note_earliest(self.touched[number], {place: union(inside)}, key)
        for place, mask in judged.origins.items():
            at = np.full(len(rows), place)
            for first, here in judged.first.get(place, ()):
                at[_places(here, len(rows))] = first
            claimed = _places(mask, len(rows))
            if len(claimed):
                self.claim(place, rows[claimed], at[claimed], forward_a)

    def _note_earliest(self, into: Int64, masks: Mapping[int, Mask], key: Int64) -> None:
        for place, mask in masks.items():
            if mask:
                into[place] = min(into[place], key[(mask & -mask).bit_length() - 1])

    def claim(self, place: int, rows: Int64, at: Int64, forward_a: Int64) -> None:
        """Count an origin at the site ``place`` (or ROOT) in ``rows`` of one request; ``at`` orders them by site."""
        number = int(self._pairs.stream[rows[0]])
        self.origins[rows] += 1
        site = at if place == ROOT else np.full(len(rows), place)
        if self._watch is not None:
            self._watch.claimed(site, rows)
        for where in np.unique(site).tolist():
            call_a, call_b = self._calls(rows[site == where], where)
            found, counts = np.unique((call_a << 32) | call_b, return_counts=True)
            for calls, count in zip(found.tolist(), counts.tolist(), strict=True):
                self.counts[number, calls >> 32, calls & _LOW, where] += count
        forward = forward_a[rows]
        leading = np.flatnonzero(forward == forward.min())
        n = leading[np.lexsort((rows[leading], at[leading]))[0]]
        mine = (int(forward[n]), int(at[n]), int(rows[n]), place)
        self.first[number] = min(self.first.get(number, mine), mine)


def _places(mask: Mask, rows: int) -> Int64:
    """The rows of a mask, ascending."""
    packed = np.frombuffer(mask.to_bytes(-(-rows // 8), "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(packed, count=rows, bitorder="little"))
