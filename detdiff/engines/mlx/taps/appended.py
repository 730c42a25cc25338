"""Cache calls that add one entry to what each request has: only that entry is digested and added to the sums of those before it.

That is sound where nothing else is new in what the cache gave back (``unread``), the entry that is stored is the one that was given, and
each row sees its own entry and all before it, as in the forward before. Any other call is read in full (``ledgers``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numba
import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Rows, head_weight
from detdiff.trace.digest import digest_bias

from .addresses import ADDRESS, ITEM, SHAPE, STRIDES, layouts
from .digests import coefficients_for, sum_words
from .forward import DTYPE_NAMES, CacheCall, ForwardRecord
from .ledgers import CacheCallRows, EntryLedger, Ledgers
from .unread import ColumnDigests, node
from .visible import Masks

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
Event = dict[str, Any]


class _AppendedLane(NamedTuple):
    """The entries of one request in one cache, whose row is in a segment of the forward and in a slot of the cache."""

    entries: EntryLedger
    segment: int
    slot: int


@dataclass
class _AppendedCall:
    """A cache call that gave back ``length`` columns.

    ``entries`` are the columns of digests of its entries, ``read``, ``written`` and ``seen`` those of sums. ``lanes`` are there where its
    new entries alone may have to be looked at; ``added`` says that their ledgers do not know of the last ones yet.
    """

    like: tuple[Any, ...]
    known: ColumnDigests | None
    length: int
    entries: Int64
    read: int
    written: int
    own: str
    seen: dict[str, int]
    lanes: list[_AppendedLane] = field(default_factory=list)
    added: bool = False

    def settle(self, starts: Int64) -> None:
        if self.added:
            for lane in self.lanes:
                lane.entries.added(int(starts[lane.segment]), self.length)
            self.added = False

    def temporal(self) -> bool:
        """Whether the entries lie in order."""
        return all(lane.entries.lay is not None and lane.entries.lay.temporal for lane in self.lanes)

    def room(self, starts: Int64) -> bool:
        """Whether one more entry has a place in the ledgers."""
        known = self.known
        return known is not None and all(
            starts[lane.segment] < len(lane.entries.written) and self.length < len(known.held(lane.slot))
            for lane in self.lanes
        )

    def put(self, folded: CacheCallRows, out: UInt64) -> bool:
        """The digests of a call that was read in full; False where they do not share columns as they did."""
        seen = {self.own: folded.read, **folded.seen}
        if not seen.keys() - {self.own} <= self.seen.keys():
            return False
        sides = [(self.written, folded.written), *((at, seen.get(key)) for key, at in self.seen.items())]
        for column, digests in sides:
            if digests is None or (column == self.read) != np.array_equal(digests, folded.read):
                return False
            out[folded.rows, column] = digests
        out[folded.rows, self.read] = folded.read
        out[folded.rows[:, None], self.entries] = folded.entries
        return True


def _like(call: CacheCall) -> tuple[Any, ...]:
    readers = tuple(reader.key for reader in call.readers)
    return call.key, call.segments, call.slots, call.columns, len(call.parts), len(call.given), readers


class _EntryPlaces(NamedTuple):
    """The new entries of all lanes, head by head.

    ``where`` int64 [n, 6]: lane, number of the stored array and offset in it, those of the given one (-1: none), words; ``base`` is the
    digest of no words; ``rows`` and ``columns`` are where the digest goes, ``weights`` those of heads; ``ends`` is where each lane ends.
    """

    where: Int64
    base: UInt64
    rows: Int64
    columns: Int64
    weights: UInt64
    ends: Int64


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _new_entries(addresses: Int64, where: Int64, base: UInt64, on: Bools, coef: UInt64, out: UInt64) -> bool:
    """Digests of what is stored, in ``out``; False where it is not what was given."""
    for i in range(where.shape[0]):
        if not on[where[i, 0]]:
            continue
        words = where[i, 5]
        out[i] = base[i] + sum_words(addresses[where[i, 1]] + where[i, 2], words, coef, 0)
        if where[i, 3] >= 0:
            given = base[i] + sum_words(addresses[where[i, 3]] + where[i, 4], words, coef, 0)
            if given != out[i]:
                return False
    return True


class Appended:
    """The cache calls of forwards that are alike, learnt from one that was digested the general way."""

    def __init__(
        self, record: ForwardRecord, rows: Rows, folded: Sequence[CacheCallRows], ledgers: Ledgers
    ) -> None:
        self.folded: dict[int, CacheCallRows] = {}
        self._ledgers = ledgers
        self._starts = rows.position.astype(np.int64)
        self._calls: list[_AppendedCall] = []
        self._numbers = {port: number for number, port in enumerate(record.arrays)}
        lies = layouts(list(record.arrays.values()))
        where: list[tuple[int, ...]] = []
        base: list[int] = []
        places: list[tuple[int, int, int]] = []
        ends: list[int] = []
        parts: list[mx.array] = []
        for call, found in zip(record.caches, folded, strict=True):
            made = _described(record, rows, call, found)
            self._calls.append(made)
            given = self._given(record, call, lies)
            ledgers_of = [ledgers.known(int(rows.request[segment]), call.key) for segment in call.segments]
            if given is None or not _goes_on(record, call, made, found, ledgers_of):
                continue
            for segment, slot, ledger in zip(call.segments, call.slots, ledgers_of, strict=True):
                assert ledger is not None
                head = 0
                column = record.forward.segments[segment].column
                for number, (_, array) in enumerate(call.parts):
                    _, heads, _, width = array.shape
                    piece = width * array.itemsize
                    for h in range(heads):
                        stored = len(self._numbers) + len(parts) + number, (slot * heads + h) * piece
                        held = -1, 0
                        if given:
                            steps = lies[given[number], STRIDES:].tolist()
                            held = given[number], slot * steps[0] + h * steps[1] + column * steps[2]
                        where.append((len(ends), *stored, *held, piece // 4))
                        base.append(digest_bias(DTYPE_NAMES[array.dtype], piece))
                        places.append((segment, int(made.entries[head]), head))
                        head += 1
                ends.append(len(where))
                made.lanes.append(_AppendedLane(ledger, segment, slot))
            parts += [array for _, array in call.parts]
        self._forms = _taken(parts)
        self._lanes = [lane for call in self._calls for lane in call.lanes]
        self._rows = np.array([lane.segment for lane in self._lanes], np.int64)
        self._read = np.array([call.read for call in self._calls for _ in call.lanes], np.int64)
        self._totals = rows.digests[self._rows, self._read]
        at = np.array(places, np.int64).reshape(-1, 3)
        self._entries = _EntryPlaces(
            np.array(where, np.int64).reshape(-1, 6),
            np.array(base, np.uint64),
            at[:, 0],
            at[:, 1],
            head_weight(at[:, 2]),
            np.array(ends, np.int64),
        )

    def _given(self, record: ForwardRecord, call: CacheCall, lies: Int64) -> list[int] | None:
        """The numbers of the ports that hold what the cache was given, by part; none where it stores another form of it, None where that
        cannot be told."""
        ports = [record.sites.ports.get((f"{call.key}.write", kind.lower()), -1) for kind, _ in call.parts]
        for array, port in zip(call.given, ports, strict=False):
            if port not in record.arrays or not node(array) or node(array) != node(record.arrays[port]):
                return None
            if lies[self._numbers[port], STRIDES + 3] != array.itemsize:
                return None
        return [self._numbers[port] for port in ports] if call.given else []

    def settle(self) -> None:
        """Tell the ledgers what was added."""
        for call in self._calls:
            call.settle(self._starts)

    def alike(self, record: ForwardRecord) -> bool:
        """Whether these are the same calls, each with rows that follow those before."""
        calls, segments = record.caches, record.forward.segments
        return (
            len(calls) == len(self._calls)
            and self._starts.tolist() == [segment.start - 1 for segment in segments]
            and all(
                mine.like == _like(call) and (not mine.lanes or mine.known is call.known)
                for call, mine in zip(calls, self._calls, strict=True)
            )
        )

    def parts(self, record: ForwardRecord) -> Iterator[mx.array]:
        """The arrays whose layouts ``digest`` is given behind those of all ports."""
        for call, mine in zip(record.caches, self._calls, strict=True):
            if mine.lanes:
                yield from (array for _, array in call.parts)

    def digest(self, record: ForwardRecord, found: Int64, out: UInt64) -> list[Event] | None:
        """Put the digests of all calls into ``out`` uint64 [rows, columns]; None where one is not as it was.

        ``found`` are the layouts of all ports' arrays and of ``parts``.
        """
        starts, masks = self._starts + 1, Masks()
        on = self._adding(record, starts, _comparable(found[len(self._numbers) :]), masks)
        if on is None or not self._add(starts, found[:, ADDRESS], on, out):
            return None
        for call, mine in zip(record.caches, self._calls, strict=True):
            mine.length = call.length
        events: list[Event] = []
        limited: list[tuple[int, list[dict[str, Any]]]] = []
        lane = 0
        for number, (call, mine) in enumerate(zip(record.caches, self._calls, strict=True)):
            lanes = slice(lane, lane + len(mine.lanes))
            lane = lanes.stop
            if mine.added:
                continue
            folded = self.folded[number] = self._ledgers.fold(call, record.forward, masks)
            odd = folded.events or folded.limited or not mine.temporal()
            if (mine.lanes and odd) or not mine.put(folded, out):
                return None
            if mine.lanes:
                self._totals[lanes] = folded.read
            events += folded.events
            if folded.limited:
                limited.append((call.layer, folded.limited))
        # The general way says these itself.
        for layer, lines in limited:
            record.limited.setdefault(layer, []).extend(lines)
        self.folded = {}
        return events

    def _adding(self, record: ForwardRecord, starts: Int64, forms: Int64, masks: Masks) -> Bools | None:
        """Of each lane whether its new entry alone has to be looked at; None where a call is not as it was.

        Calls that are to be read in full have their ledgers settled, which is not undone.
        """
        on = np.zeros(len(self._lanes), bool)
        shown: set[tuple[Any, ...]] = set()
        lane = part = 0
        for call, mine in zip(record.caches, self._calls, strict=True):
            if not mine.lanes:
                continue
            lanes, parts = slice(lane, lane + len(mine.lanes)), slice(part, part + len(call.parts))
            lane, part = lanes.stop, parts.stop
            if call.fresh != range(call.length - 1, call.length):
                mine.settle(self._starts)
                continue
            if call.length != mine.length + 1 or not mine.room(starts):
                return None
            if not np.array_equal(forms[parts], self._forms[parts]):
                return None
            if not _sees_all(record, call, masks, shown):
                return None
            on[lanes] = True
        return on

    def _add(self, starts: Int64, addresses: Int64, on: Bools, out: UInt64) -> bool:
        """Digest new entries and add them; False, and nothing is added, where one is not what was given."""
        if not on.any():
            self._starts = starts
            return True
        entries, end = self._entries, int(starts.max()) + 1
        found = np.zeros(len(entries.base), np.uint64)
        coef = coefficients_for(int(entries.where[:, 5].max()))
        if not _new_entries(addresses, entries.where, entries.base, on, coef, found):
            return False
        begins = np.concatenate([[0], entries.ends[:-1]])
        terms = np.add.reduceat(found * entries.weights, begins)
        self._totals[on] += (terms * self._ledgers.weights(end)[starts[self._rows]])[on]
        out[entries.rows, entries.columns] = found
        out[self._rows, self._read] = self._totals
        self._starts = starts
        lane = 0
        for call in self._calls:
            call.added = bool(call.lanes and on[lane])
            for each in call.lanes:
                if call.added and call.known is not None:
                    rows = found[begins[lane] : entries.ends[lane]]
                    each.entries.written[starts[each.segment]] = rows
                    call.known.held(each.slot)[call.length] = rows
                lane += 1
        return True


def _described(record: ForwardRecord, rows: Rows, call: CacheCall, found: CacheCallRows) -> _AppendedCall:
    ports, table = record.sites.ports, rows.table
    inside, _, again = call.key.rpartition(".cache")
    own = f"{inside}.attention{again}"
    return _AppendedCall(
        _like(call),
        call.known,
        call.length,
        np.array([table[ports[f"{call.key}.write", name]] for name in found.names], np.int64),
        table[ports[f"{call.key}.read", "read"]],
        table[ports[f"{call.key}.read", "written"]],
        own,
        {key: table[ports[key, "kv"]] for key in {own: 0, **found.seen} if (key, "kv") in ports},
    )


def _goes_on(
    record: ForwardRecord,
    call: CacheCall,
    made: _AppendedCall,
    found: CacheCallRows,
    ledgers: Sequence[EntryLedger | None],
) -> bool:
    """Whether a call of the next forward may need nothing but its new entries: all is in order in this one."""
    kinds = [kind for kind, _ in call.parts]
    if found.events or found.limited or {made.read, made.written, *made.seen.values()} != {made.read}:
        return False
    if call.known is None or call.columns != 1 or len(set(kinds)) != len(kinds) or not call.readers:
        return False
    if sorted(call.slots) != list(range(call.parts[0][1].shape[0])):
        return False  # a slot without rows is read beside the others
    if any(array.shape[3] * array.itemsize % 4 for _, array in call.parts):
        return False
    for segment, ledger in zip(call.segments, ledgers, strict=True):
        start = record.forward.segments[segment].start
        if ledger is None or ledger.lay is None or not ledger.lay.temporal:
            return False
        placed = ledger.lay.positions
        if (ledger.end, ledger.parts) != (start + 1, len(kinds)) or len(placed) != call.length:
            return False
    return True


def _sees_all(record: ForwardRecord, call: CacheCall, masks: Masks, shown: set[tuple[Any, ...]]) -> bool:
    """Whether every row sees its own entry, in the last column, and all before it; ``shown`` are masks for which that is so."""
    forward = record.forward
    packed = forward.layout == "packed"
    for reader in call.readers:
        if reader.columns != call.length:
            return False
        about = node(reader.mask) or id(reader.mask), reader.columns, call.segments
        if about in shown:
            continue
        for number in call.segments:
            segment = forward.segments[number]
            sight = masks.sight(reader, segment, 1, packed)
            first, last = call.length - 1 - segment.start, call.length - 1
            if sight is None or sight.seen is not None:
                return False
            if (int(sight.first[0]), int(sight.last[0])) != (first, last):
                return False
        shown.add(about)
    return True


def _taken(parts: Sequence[mx.array]) -> Int64:
    """The layouts that copies of one column of arrays [slots, heads, columns, width] have."""
    found = layouts(parts)
    found[:, SHAPE + 2] = 1
    step = found[:, ITEM].copy()
    for axis in (3, 2, 1, 0):
        found[:, STRIDES + axis] = step
        step *= found[:, SHAPE + axis]
    return _comparable(found)


def _comparable(found: Int64) -> Int64:
    """Layouts without addresses, and without steps along what is one long."""
    forms = found.copy()
    forms[:, ADDRESS] = 0
    forms[:, STRIDES:][forms[:, SHAPE:STRIDES] == 1] = 0
    return forms
