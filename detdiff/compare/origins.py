"""Which differences are origins: the rules, applied to many rows at once.

A leaf is an origin where all its inputs are equal and an output is not. A composite, and the whole model around all
sites, is one where its inputs are equal, something inside differs, nothing came in through the cache, and no site
inside is an origin: the difference arose between two recorded sites. Everything else that differs is propagated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from .alignment import Columns, CommonPorts, CommonSite, RowPairs
from .digests import Block, Scanner
from .forwards import distinct

Mask = int
"""A set of rows: bit n stands for row n."""

ROOT: Final = -1
"""The place of the model as a whole, where a difference arises between two sites that no composite holds."""


@dataclass
class RowOrigins:
    """The verdict on some rows; masks are keyed by the place of a site, and a place without rows may be absent.

    ``origins`` are final. ``lasting`` are origins unless an earlier row of the request already differed there, since
    a recurrent state or a changed cache entry carries on. ``carried`` rows had a difference come in through the
    cache. ``unclear`` rows read a difference that may be their own entry; ``pending`` are origins unless it was not.
    ``touched`` sites differ at any port. ``first`` gives, for a composite's origin, which site inside differs first
    in which rows. ``blind`` rows differ and no origin can be named, as an input was not recorded.
    """

    origins: dict[int, Mask] = field(default_factory=dict)
    lasting: dict[int, Mask] = field(default_factory=dict)
    carried: dict[int, Mask] = field(default_factory=dict)
    unclear: dict[int, Mask] = field(default_factory=dict)
    pending: dict[int, Mask] = field(default_factory=dict)
    touched: dict[int, Mask] = field(default_factory=dict)
    first: dict[int, list[tuple[int, Mask]]] = field(default_factory=dict)
    blind: int = 0


class Rules:
    """The rules for rows of one pair of tables, looked up once: which column pairs each site asks for."""

    def __init__(self, ports: CommonPorts, columns: Columns) -> None:
        # Rows of one model have no port of the other's sites, which then hides nothing.
        drafted = any(
            bool((columns.pair[list(site.outputs)] >= 0).any()) for site in ports.sites if site.draft
        )
        self.sites = [_SiteColumns.of(ports, columns, site, site.draft == drafted) for site in ports.sites]
        self._past_known = any(site.carrying or site.stateful for site in ports.sites)

    def judge(self, differ: Sequence[Mask]) -> RowOrigins:
        """Apply the rules; ``differ`` has the rows in which each column pair differs."""
        judging = _Judging(self.sites, differ)
        for place, site in enumerate(self.sites):
            judging.visit(place, site)
        judging.visit_root(self._past_known)
        return judging.judged


@dataclass(frozen=True)
class _SiteColumns:
    """A site's column pairs. ``blind`` sites lack the digest of what they read, which may be the cache."""

    layer: int | None
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    carrying: tuple[int, ...]
    inside: tuple[int, ...]
    stateful: bool
    known: bool
    blind: bool

    @classmethod
    def of(cls, ports: CommonPorts, columns: Columns, common: CommonSite, runs: bool) -> _SiteColumns:
        """``runs`` says that the site is of the model whose rows these are."""

        def pairs(numbers: Iterable[int]) -> tuple[int, ...]:
            found = columns.pair[list(numbers)].tolist()
            return tuple(dict.fromkeys(pair for pair in found if pair >= 0))

        site = common.site
        # A row's tokens were compared before its digests, so an embedding's input is known even if not recorded.
        recorded = bool(common.inputs) and bool((columns.pair[list(common.inputs)] >= 0).all())
        known = site.kind == "embedding" or (common.whole and recorded)
        carrying = [n for n in common.inputs if ports.names[n].endswith((".kv", ".written"))]
        return cls(
            layer=site.layer,
            kind=site.kind,
            inputs=pairs(common.inputs),
            outputs=pairs(common.outputs),
            carrying=pairs(carrying) if common.carrying else (),
            inside=common.descendants,
            stateful=common.stateful,
            known=known,
            blind=runs and site.kind == "attention" and "kv" in site.inputs and not known,
        )


class _Judging:
    def __init__(self, sites: Sequence[_SiteColumns], differ: Sequence[Mask]) -> None:
        self.sites = sites
        self.differ = differ
        self.judged = RowOrigins()
        self.explained: dict[int, Mask] = {}
        self.written: dict[int | None, Mask] = {}

    def visit(self, place: int, site: _SiteColumns) -> None:
        entering, leaving = self._any(site.inputs), self._any(site.outputs)
        if site.inside or site.stateful:
            mask = self._origin_between(site.inside, leaving) & ~entering
            if mask and site.known and not self._blind(site.inside):
                self._claim(place, mask, site.inside, lasting=site.stateful)
        elif site.known and site.kind != "state":
            self._claim(place, leaving & ~entering, lasting=site.kind == "cache_read")
        if entering or leaving:
            self.judged.touched[place] = entering | leaving
        if entering and site.carrying:
            self._note_carried(place, site)
        if leaving and site.kind == "cache_write":
            self.written[site.layer] = self.written.get(site.layer, 0) | leaving

    def visit_root(self, past_known: bool) -> None:
        """``past_known`` says that some site shows what earlier rows left; else a later row inherits whatever it is."""
        everything = range(len(self.sites))
        mask = self._origin_between(everything, 0)
        if mask and self._blind(everything):
            self.judged.blind = mask.bit_count()
        else:
            self._claim(ROOT, mask, everything, lasting=not past_known)

    def _origin_between(self, inside: Sequence[int], leaving: Mask) -> Mask:
        """Rows that differ inside, or at ``leaving``, without a cause inside."""
        touched, explained = leaving, 0
        for place in inside:
            touched |= self.judged.touched.get(place, 0)
            explained |= self.explained.get(place, 0)
        return touched & ~explained

    def _claim(self, place: int, mask: Mask, inside: Sequence[int] = (), lasting: bool = False) -> None:
        if not mask:
            return
        unclear = 0
        if inside:
            self.judged.first[place] = self._first_touched(inside, mask)
            unclear = mask & union(self.judged.unclear.get(other, 0) for other in inside)
        if unclear:
            self.judged.pending[place] = unclear
        (self.judged.lasting if lasting else self.judged.origins)[place] = mask & ~unclear
        self.explained[place] = mask & ~unclear

    def _note_carried(self, place: int, site: _SiteColumns) -> None:
        mask = self._any(site.carrying)
        # What a row reads has its own entry in it, so where that differs an earlier one need not.
        own = self.written.get(site.layer, 0)
        self.judged.carried[place], self.judged.unclear[place] = mask & ~own, mask & own
        self.explained[place] = self.explained.get(place, 0) | mask & ~own

    def _first_touched(self, inside: Sequence[int], mask: Mask) -> list[tuple[int, Mask]]:
        first = []
        for place in inside:
            if here := mask & self.judged.touched.get(place, 0):
                first.append((place, here))
                mask &= ~here
        return first

    def _any(self, pairs: tuple[int, ...]) -> Mask:
        found = 0
        for pair in pairs:
            found |= self.differ[pair]
        return found

    def _blind(self, inside: Iterable[int]) -> bool:
        return any(self.sites[place].blind for place in inside)


def union(masks: Iterable[Mask]) -> Mask:
    """The rows that are in any of the masks."""
    found = 0
    for mask in masks:
        found |= mask
    return found


Int64 = NDArray[np.int64]

Calls = Callable[[Int64, int], tuple[Int64, Int64]]

_WAITING_BYTES: Final = 32 << 20
_LOW: Final = (1 << 32) - 1
NEVER: Final = np.int64((1 << 63) - 1)


class OriginWatch(Protocol):
    """Sees what a pass finds, for those who want more of it than the sums."""

    def block(self, block: Block) -> None:
        """Rows that are compared; every row pair comes once, before any origin in it."""

    def claimed(self, place: int, sites: Int64, rows: Int64, at: Int64) -> None:
        """Origins at the site ``place`` or ROOT: the places of the sites that show them, their row pairs, and the places by
        which they are in order, int64 [n] each."""


class Tally:
    """Sums over blocks. ``n`` is the number of row pairs, ``r`` of streams (requests of a model), ``s`` of common sites.

    ``differing`` and ``compared`` int32 [n] count digests per row; ``origins`` int32 [n] origins per row.
    ``entries`` uint8 or uint16 [n, cache and state sites] counts differing cache entries per row.
    ``layer_differing`` and ``layer_compared`` int64 [r, layers].
    ``carried`` int64 [r, s], and ``lasting``, ``touched``, ``pending`` [r, s + 1] with ROOT last, hold the smallest
    position << 32 | row place at which that happened, or NEVER; so does ``differs`` [r, cache and state sites] for
    entries. ``counts`` counts origins by (request, call a, call b, site).
    ``first`` holds per request (forward a, place of the first differing site, row place, site) of the first origin.
    """

    def __init__(
        self,
        ports: CommonPorts,
        pairs: RowPairs,
        calls: Calls,
        watch: OriginWatch | None = None,
        *,
        nameless: bool = False,
    ) -> None:
        """``calls`` numbers, for row pairs and a site's place, the kernel calls of both runs; only origins ask it.

        Nothing is an origin where it would be ``nameless``: between two models, or without sites inside the model.
        """
        self._nameless = nameless
        rows, sites, requests = len(pairs), len(ports.sites), pairs.streams
        self._ports, self._pairs, self._calls, self._watch = ports, pairs, calls, watch
        self.differing = np.zeros(rows, dtype=np.int32)
        self.compared = np.zeros(rows, dtype=np.int32)
        self.origins = np.zeros(rows, dtype=np.int32)
        self.cache_sites = tuple(
            n for n, s in enumerate(ports.sites) if s.site.kind in ("cache_write", "state")
        )
        most = max((len(ports.sites[n].outputs) for n in self.cache_sites), default=0)
        self.entries = np.zeros((rows, len(self.cache_sites)), dtype=np.uint8 if most < 256 else np.uint16)
        self.differs = np.full((requests, len(self.cache_sites)), NEVER, dtype=np.int64)
        self._columns: list[Columns] = []
        self._rules: list[Rules] = []
        # By pair of tables and cache site, the column pairs of its entries, where there are any.
        self._entries_of: list[dict[int, list[int]]] = []
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
        self.lasting = np.full((requests, sites + 1), NEVER, dtype=np.int64)
        self.touched = np.full((requests, sites + 1), NEVER, dtype=np.int64)
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
        if number:
            self._columns_of[rows] = number
        if not block.bits.any():
            return
        differing = np.bitwise_count(block.bits).sum(axis=1, dtype=np.int32)
        self.differing[rows] = differing
        diverged = np.flatnonzero(differing)
        if len(diverged):
            # Judging takes about as long for one row as for a thousand, so rows wait for others of their tables.
            self._waiting.setdefault(number, []).append(Block(rows[diverged], columns, block.bits[diverged]))
            self._waiting_bytes += len(diverged) * columns.words * 8
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

    def judged(self, columns: Columns, differ: Sequence[Mask]) -> RowOrigins:
        """The verdict on some rows of a block; ``differ`` has the rows in which each column pair differs."""
        return self._rules[self._number(columns)].judge(differ)

    def present(self, n: int, rows: Int64) -> Int64:
        """How many entries of cache site ``n`` were compared in each of ``rows``, int64."""
        counts = self._present[n]
        if len(set(counts)) == 1:
            return np.full(len(rows), counts[0], np.int64)
        return np.array(counts, np.int64).take(self._columns_of.take(rows))

    def present_in(self, n: int, rows: Int64) -> int:
        """The same, of all ``rows`` together."""
        counts = self._present[n]
        return counts[0] * len(rows) if len(set(counts)) == 1 else int(self.present(n, rows).sum())

    @cached_property
    def _present(self) -> list[list[int]]:
        """How many entries of each cache site the rows of each pair of tables have; to be asked once all rows are settled."""
        return [
            [len(entries.get(n, ())) for entries in self._entries_of] for n in range(len(self.cache_sites))
        ]

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
            pairs = [
                columns.pair[list(self._ports.sites[place].outputs)].tolist() for place in self.cache_sites
            ]
            there = [[pair for pair in found if pair >= 0] for found in pairs]
            self._entries_of.append({n: found for n, found in enumerate(there) if found})
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
        counts = np.bitwise_count(turned).sum(axis=1, dtype=np.int64)
        self.layer_differing[number] += np.bincount(
            self._layers_of(columns), counts, len(self.layers)
        ).astype(np.int64)
        key = (self._pairs.position[rows] << 32) | rows
        self._count_entries(block, turned, differ, key)
        judged = self.judged(columns, differ)
        self.blind += judged.blind
        self._note_earliest(self.carried[number], judged.carried, key)
        self._note_earliest(self.lasting[number], judged.lasting, key)
        self._note_earliest(self.pending[number], judged.pending, key)
        for place, site in enumerate(self._ports.sites):
            if site.stateful:
                inside = (judged.touched.get(n, 0) for n in site.before)
                self._note_earliest(self.touched[number], {place: union(inside)}, key)
        self._note_earliest(self.touched[number], {ROOT: union(judged.touched.values())}, key)
        for place, mask in judged.origins.items():
            at = np.full(len(rows), place)
            for first, here in judged.first.get(place, ()):
                at[_places(here, len(rows))] = first
            claimed = _places(mask, len(rows))
            if len(claimed):
                self.claim(place, rows[claimed], at[claimed], forward_a)

    def _count_entries(
        self, block: Block, turned: NDArray[np.uint8], differ: Sequence[Mask], key: Int64
    ) -> None:
        """Count the cache entries that differ in each row of one request, and note the earliest of each site."""
        entries = self._entries_of[self._number(block.columns)]
        earliest = {n: union(differ[pair] for pair in found) for n, found in entries.items()}
        self._note_earliest(self.differs[int(self._pairs.stream[block.rows[0]])], earliest, key)
        counts = np.zeros((len(self.cache_sites), len(block.rows)), dtype=self.entries.dtype)
        for n, pairs in entries.items():
            bits = np.unpackbits(turned[pairs], axis=1, count=len(block.rows), bitorder="little")
            # Eight bits at a time are summed in a third of the time of sixteen.
            bits.sum(axis=0, dtype=counts.dtype, out=counts[n])
        self.entries[block.rows] = counts.T

    def _note_earliest(self, into: Int64, masks: Mapping[int, Mask], key: Int64) -> None:
        for place, mask in masks.items():
            if mask:
                into[place] = min(into[place], key[(mask & -mask).bit_length() - 1])

    def claim(self, place: int, rows: Int64, at: Int64, forward_a: Int64) -> None:
        """Count an origin at the site ``place`` (or ROOT) in ``rows`` of one request; ``at`` orders them by site."""
        if self._nameless:
            return
        number = int(self._pairs.stream[rows[0]])
        self.origins[rows] += 1
        site = at if place == ROOT else np.full(len(rows), place)
        if self._watch is not None:
            self._watch.claimed(place, site, rows, at)
        for where in distinct(site).tolist():
            call_a, call_b = self._calls(rows[site == where], where)
            both = (call_a << 32) | call_b
            for calls in distinct(both).tolist():
                count = int(np.count_nonzero(both == calls))
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


@dataclass(frozen=True)
class FoundOrigin:
    """An origin by its row pair, its site's place (or ROOT) and how it was found."""

    row: int
    place: int
    how: str


class SettledOrigins:
    """Applies the rules that ask what earlier rows of the same request did."""

    def __init__(self, tally: Tally, ports: CommonPorts, pairs: RowPairs, scanner: Scanner) -> None:
        self._tally, self._ports, self._pairs, self._scanner = tally, ports, pairs, scanner
        self._known: dict[int, RowOrigins] = {}

    def origins(self) -> list[FoundOrigin]:
        """The settled origins, in no particular order."""
        found = []
        for number in range(len(self._tally.lasting)):
            found += [*self._lasting(number), *self._visible(number), *self._pending(number)]
        return found

    def place_of(self, found: FoundOrigin) -> int:
        """The site that orders an origin: for a composite, the first one inside that differs."""
        if found.how != "composite":
            return found.place
        first = self._judged(found.row).first.get(found.place)
        return first[0][0] if first else found.place

    def _judged(self, row: int) -> RowOrigins:
        if row not in self._known:
            block = self._scanner.pair(row)
            self._known[row] = self._tally.judged(block.columns, block.differ[0].tolist())
        return self._known[row]

    def _lasting(self, number: int) -> Iterator[FoundOrigin]:
        """The first row at which a state or a cache differs by itself; later rows inherit it."""
        for place in np.flatnonzero(self._tally.lasting[number] != NEVER).tolist():
            key = int(self._tally.lasting[number, place])
            if place == len(self._ports.sites):
                if int(self._tally.touched[number, place]) >> 32 >= key >> 32:
                    yield FoundOrigin(key & _LOW, ROOT, "composite")
            elif not self._ports.sites[place].stateful:
                yield FoundOrigin(key & _LOW, place, "changed")
            elif int(self._tally.touched[number, place]) >> 32 >= key >> 32:
                leaf = not self._ports.sites[place].descendants
                yield FoundOrigin(key & _LOW, place, "leaf" if leaf else "composite")

    def _pending(self, number: int) -> Iterator[FoundOrigin]:
        """Origins inside a composite in a row whose attention read a difference: its own entry, or an earlier one.

        Only a row before which no entry differs can have such an origin, so the first candidate decides.
        """
        claimed: dict[int, list[int]] = {}
        sites = range(len(self._ports.sites))
        for place in np.flatnonzero(self._tally.pending[number] != NEVER).tolist():
            key = int(self._tally.pending[number, place])
            place = ROOT if place == len(sites) else place
            row, position = key & _LOW, key >> 32
            inside = sites if place == ROOT else self._ports.sites[place].descendants
            unclear = self._judged(row).unclear
            layers = {self._ports.sites[n].site.layer for n in inside if unclear.get(n)}
            earlier = any(self._explained_from(number, layer) < position for layer in layers)
            if not earlier and not any(n in inside for n in claimed.get(row, ())):
                claimed.setdefault(row, []).append(place)
                yield FoundOrigin(row, place, "composite")

    def _visible(self, number: int) -> Iterator[FoundOrigin]:
        """Rows that read other entries although every entry up to them was written alike.

        At most one for each layer: the first row, at the first site that shows it.
        """
        done: dict[int | None, int] = {}
        for place in np.flatnonzero(self._tally.carried[number] != NEVER).tolist():
            key = int(self._tally.carried[number, place])
            layer = self._ports.sites[place].site.layer
            if key >> 32 < min(done.get(layer, int(NEVER)), self._explained_from(number, layer)):
                done[layer] = key >> 32
                if self._entries_known(number, layer, key >> 32):
                    yield FoundOrigin(key & _LOW, place, "visible")

    def _explained_from(self, number: int, layer: int | None) -> int:
        """The first position from which a differing or changed entry explains a difference in what is read."""
        first = min(
            (int(self._tally.differs[number, n]) >> 32 for n in self._writes(number, layer)),
            default=int(NEVER),
        )
        for place, site in enumerate(self._ports.sites):
            if site.site.kind == "cache_read" and site.site.layer == layer and self._mine(number, place):
                first = min(first, int(self._tally.lasting[number, place]) >> 32)
        return first

    def _mine(self, number: int, place: int) -> bool:
        """Whether a site is of the model that the stream ``number`` is of."""
        return self._ports.sites[place].draft == (number >= self._pairs.requests)

    def _entries_known(self, number: int, layer: int | None, position: int) -> bool:
        """Whether the entries of every position up to this one were compared."""
        rows = self._pairs.of(number)
        rows = rows[self._pairs.position[rows] <= position]
        writes = self._writes(number, layer)
        return (
            bool(writes)
            and len(rows) == position + 1
            and all(bool((self._tally.present(n, rows) > 0).all()) for n in writes)
        )

    def _writes(self, number: int, layer: int | None) -> list[int]:
        """Rows of the tally's entries for a layer's cache; all layers where it has none and reads another's."""
        kinds = [
            (n, self._ports.sites[place].site)
            for n, place in enumerate(self._tally.cache_sites)
            if self._mine(number, place)
        ]
        writes = [n for n, site in kinds if site.kind == "cache_write"]
        return [n for n, site in kinds if site.kind == "cache_write" and site.layer == layer] or writes
