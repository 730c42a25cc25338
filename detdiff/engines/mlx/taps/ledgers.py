"""What was written of every cache entry, where it lies in what the cache gives back, and what each row could see of it.

Where entries lie is not taken from the cache's class or its own count: a column of the keys holds the position whose digest it has.
So it does not matter whether a cache keeps its entries in order, in a ring, cut into chunks or behind padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import head_weight, position_weight

from .digests import EntrySums, digest_entries, fold_entries
from .entries import Source
from .forward import CacheCall, Forward, Memory, Segment, memory
from .visible import Masks, Sight, spread

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]

_LISTED: Final = 8
_NOBODYS: Final[Mapping[int, tuple[int, int]]] = {}
_IN_ORDER: Final[Mapping[int, Int64]] = {}


@dataclass(frozen=True)
class CacheCallRows:
    """One cache call in rows: ``entries`` uint64 [rows, heads], ``written`` and ``read`` uint64 [rows].

    ``rows`` are indices into the forward's row table, ``names`` the entry names (K.0, …) in column order, ``seen`` what each
    attention site that was given these keys saw, uint64 [rows] by its key; ``limited`` are the lines of rows that do not see all
    up to their own position. ``source(h)`` says where the values of entry ``h`` lie (None where entries are stored in several parts).
    """

    rows: Int64
    names: tuple[str, ...]
    entries: UInt64
    written: UInt64
    read: UInt64
    seen: Mapping[str, UInt64]
    limited: list[dict[str, Any]]
    events: list[dict[str, Any]]
    source: Callable[[int], Source] | None


@dataclass
class _Placed:
    """Where entries lie: the position of each column, int64 [columns], negative for nobody's, and the columns of the new rows.

    ``temporal`` says that the newest column comes last and no other is missing; ``whose`` has, by position, the request and
    position whose entry lies there instead.
    """

    positions: Int64
    new: Int64
    temporal: bool
    whose: Mapping[int, tuple[int, int]]


class EntryLedger:
    """The entries of one request in one cache: digests uint64 [capacity, heads] as they were written, by position.

    ``end`` is the position after the last one written; ``parts`` is how many arrays an entry is stored in, more once it is quantised; ``lay`` where entries lay when they were last read;
    ``replaced`` has the position of each entry that was written anew, by its code.
    """

    def __init__(self, written: UInt64) -> None:
        self.written = written
        self.end = len(written)
        self.parts = 0
        self.lay: _Placed | None = None
        self.replaced: dict[int, int] = {}

    def room(self, end: int) -> None:
        if len(self.written) < end:
            grown = np.zeros((max(256, 2 * end), self.written.shape[1]), np.uint64)
            grown[: len(self.written)] = self.written
            self.written = grown

    def write(self, start: int, rows: UInt64, weights: UInt64) -> None:
        """Rows uint64 [n, heads] from a position on; what stood there before is remembered as replaced."""
        if start < self.end:
            self._replace(start, rows, weights)
        self.written[start : start + len(rows)] = rows
        self.end = max(self.end, start + len(rows))

    def added(self, start: int, length: int) -> None:
        """The row ``start`` was written from outside, and lies in the last of ``length`` columns, those before it in order."""
        positions = np.arange(length, dtype=np.int64) + (start + 1 - length)
        positions[positions < 0] = -1
        self.lay = _Placed(positions, np.array([length - 1], np.int64), True, _NOBODYS)
        self.end = max(self.end, start + 1)

    def _replace(self, start: int, rows: UInt64, weights: UInt64) -> None:
        before = self.written[start : start + len(rows)]
        anew = np.flatnonzero(before.any(axis=1) & (before != rows).any(axis=1))
        for place, code in zip(anew.tolist(), _codes(before[anew], weights).tolist(), strict=True):
            self.replaced[code] = start + place


def _codes(rows: UInt64, weights: UInt64) -> UInt64:
    """One number for each entry over all heads, uint64 [n]."""
    codes: UInt64 = (rows * weights).sum(axis=1, dtype=np.uint64)
    return codes


class Ledgers:
    """The entries of all requests of a run, by request and cache."""

    def __init__(self, head_numbers: Mapping[int, Int64] = _IN_ORDER) -> None:
        """``head_numbers``: see ``SiteMap``."""
        self._numbers = head_numbers
        self._of: dict[tuple[int, str], EntryLedger] = {}
        self._prefixes: dict[int, tuple[int, int]] = {}
        self._weights: UInt64 = position_weight(np.arange(1024))
        self._heads: dict[int, UInt64] = {}

    def share(self, request: int, donor: int, tokens: int) -> None:
        """The first ``tokens`` entries of a request are those that ``donor`` wrote."""
        if donor != request:
            self._prefixes[request] = donor, tokens

    def forget(self, request: int) -> None:
        """No row of a request comes any more, and nobody shares its entries."""
        self._of = {key: each for key, each in self._of.items() if key[0] != request}
        self._prefixes.pop(request, None)

    def known(self, request: int, key: str) -> EntryLedger | None:
        """The entries of a request in a cache."""
        return self._of.get((request, key))

    def weights(self, end: int) -> UInt64:
        """Those of at least the positions before ``end``."""
        if len(self._weights) < end:
            self._weights = position_weight(np.arange(2 * end))
        return self._weights

    def _entries(self, request: int, key: str, end: int, heads: int) -> EntryLedger:
        found = self._of.get((request, key))
        if found is None:
            donor, tokens = self._prefixes.get(request, (request, 0))
            given = self._of.get((donor, key)) if tokens else None
            begun = np.zeros((0, heads), np.uint64) if given is None else given.written[:tokens]
            found = self._of[request, key] = EntryLedger(begun.copy())
        found.room(end)
        return found

    def _head_weights(self, heads: int) -> UInt64:
        if heads not in self._heads:
            self._heads[heads] = head_weight(self._numbers.get(heads, np.arange(heads)))
        return self._heads[heads]

    def fold(self, call: CacheCall, forward: Forward, masks: Masks) -> CacheCallRows:
        """Digest one cache call; new entries go into the ledgers, changed ones into the events."""
        digests = _CallDigests(call)
        names = digests.names
        packed = forward.layout == "packed"
        offsets = np.cumsum([0] + [s.count for s in forward.segments])
        rows: list[Int64] = []
        pieces: list[tuple[UInt64, UInt64, UInt64, Int64]] = []
        seen: dict[str, list[UInt64]] = {}
        limited: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        for lane, slot in zip(call.segments, call.slots, strict=True):
            segment = forward.segments[lane]
            if segment.count == 0:
                continue
            end = segment.start + segment.count
            entries = self._entries(segment.request, call.key, end, len(names))
            found = digests.returned(slot)
            placed = self._write(call, segment, entries, digests, slot)
            placed, sums = self._read(call, segment, entries, found, placed)
            columns = segment.count if packed else forward.shape[1]
            sights = {
                reader.key: masks.sight(reader, segment, columns, packed)
                for reader in call.readers
                if reader.columns == len(found)
            }
            for reader in call.readers:
                if reader.chosen is not None and not call.device:
                    own = masks.sight(reader, segment, columns, packed)
                    sights[reader.key] = digests.among(found, reader.chosen, slot, own)
            known = {key: sight for key, sight in sights.items() if sight is not None}
            sight = next(iter(known.values()), None) or _presumed(call, placed)
            written, read = sums.over(sight.first, sight.last, sight.seen)
            for key, each in known.items():
                given = read if each is sight else sums.over(each.first, each.last, each.seen)[1]
                seen.setdefault(key, []).append(given)
            if not (known and placed.temporal and masks.plain(sight, placed.positions, placed.new)):
                events += _contradictions(call, segment, sight if known else None, placed)
                limited += masks.limited(sight, placed.positions, segment) if known else []
            rows.append(np.arange(offsets[lane], offsets[lane + 1]))
            pieces.append((entries.written[segment.start : end].copy(), written, read, placed.new))
            if sums.number:
                events += _changes(call, segment, names, sums, placed)
        order = np.concatenate(rows)
        slots = np.repeat(np.array(call.slots, np.int64), [len(r) for r in rows])
        given, written, read, columns_of = (np.concatenate([p[i] for p in pieces]) for i in range(4))
        return CacheCallRows(
            order,
            names,
            given,
            written,
            read,
            {key: np.concatenate(each) for key, each in seen.items() if len(each) == len(pieces)},
            limited,
            events,
            digests.source(slots, columns_of),
        )

    def _write(
        self, call: CacheCall, segment: Segment, entries: EntryLedger, digests: _CallDigests, slot: int
    ) -> _Placed:
        """Put what the rows of a segment wrote into ``entries``; where entries lie if the newest come last, as in most caches."""
        found, heads = digests.returned(slot), self._head_weights(len(digests.names))
        before = 0 if call.own else segment.column
        positions = np.arange(len(found), dtype=np.int64) + (
            segment.start - before - len(found) + call.columns
        )
        positions[(positions < 0) | (positions >= segment.start + segment.count)] = -1
        new = np.arange(segment.count, dtype=np.int64) + (len(found) - call.columns + before)
        rows, new = _stored(digests, segment, slot, new, heads)
        entries.write(segment.start, rows, heads)
        if digests.parts > entries.parts > 0:
            # Quantising stores older entries anew: from now on that is what was written.
            older = (positions >= 0) & (positions < segment.start)
            entries.written[positions[older]] = found[older]
        entries.parts = digests.parts
        return _Placed(positions, new, True, _NOBODYS)

    def _read(
        self, call: CacheCall, segment: Segment, entries: EntryLedger, found: UInt64, placed: _Placed
    ) -> tuple[_Placed, EntrySums]:
        """Where the entries ``found`` lie, and their sums."""
        weights = self.weights(segment.start + segment.count), self._head_weights(found.shape[1])
        sums = None
        if entries.lay is None or entries.lay.temporal or len(entries.lay.positions) != len(found):
            sums = fold_entries(found, placed.positions, entries.written, weights)
        if sums is None or sums.number:
            placed = self._searched(call, segment, entries, found, placed)
            sums = fold_entries(found, placed.positions, entries.written, weights)
        entries.lay = placed
        return placed, sums

    def _searched(
        self, call: CacheCall, segment: Segment, entries: EntryLedger, found: UInt64, placed: _Placed
    ) -> _Placed:
        """Where each entry lies, by its digest: where it lay before, else wherever that was written."""
        heads, end = self._head_weights(found.shape[1]), segment.start + segment.count
        written = entries.written[:end]
        codes, mine = _codes(found, heads), _codes(written, heads)
        positions, length = np.full(len(found), -1, np.int64), len(found)
        guesses = [placed.positions, np.arange(length, dtype=np.int64)]
        if entries.lay is not None:
            before = np.full(length, -1, np.int64)
            before[: len(entries.lay.positions)] = entries.lay.positions[:length]
            guesses.insert(0, before)
        held: list[int] = []
        for guess in guesses:
            ask = np.flatnonzero((guess >= 0) & (guess < end))
            held.append(int(np.count_nonzero(found[ask] == written[guess[ask]])))
            right = ask[(positions[ask] < 0) & (mine[guess[ask]] == codes[ask])]
            positions[right] = guess[right]
        whose: dict[int, tuple[int, int]] = {}
        left = np.flatnonzero(positions < 0).tolist()
        if left:
            where: dict[int, list[int]] = {}
            for position, code in enumerate(mine.tolist()):
                where.setdefault(code, []).append(position)
            taken = set(positions.tolist())
            # Padding may hold the very bits of an own entry: that one is meant which lies as most others do.
            turned = _turned(positions, [(column, where.get(int(codes[column]), ())) for column in left])
            left.sort(key=lambda column: column not in turned)
            for column in left:
                code = int(codes[column])
                free = [position for position in where.get(code, ()) if position not in taken]
                meant = turned.get(column)
                if meant is not None:
                    positions[positions == meant] = -1
                    positions[column] = meant
                    taken.add(meant)
                elif free:
                    positions[column] = free[-1]
                    taken.add(free[-1])
            # The guess that is right of most entries says what the others should be.
            likely = guesses[int(np.argmax(held))]
            for column in left:
                code = int(codes[column])
                if positions[column] >= 0 or code in where or code in entries.replaced:
                    continue  # an own entry twice, or one that was written anew since: nobody's, and not changed
                expected = int(likely[column])
                if not 0 <= expected < end or expected in taken:
                    continue
                positions[column] = expected
                taken.add(expected)
                other = self._elsewhere(call.key, segment.request, code, heads)
                if other is not None:
                    whose[expected] = other
        return _Placed(positions, placed.new, False, whose)

    def _elsewhere(self, key: str, request: int, code: int, heads: UInt64) -> tuple[int, int] | None:
        """The request and position that wrote an entry of this code into the same layer's cache."""
        for (other, of), entries in self._of.items():
            if of == key and other != request:
                at = np.flatnonzero(_codes(entries.written, heads) == np.uint64(code))
                if len(at) and entries.written[at[0]].any():
                    return other, int(at[0])
        return None


def _turned(positions: Int64, left: Sequence[tuple[int, Sequence[int]]]) -> dict[int, int]:
    """Of columns that may hold several positions, or may not, by column the position that it has where a ring, or a row of
    columns in order, begins as for most: those of ``positions``, by column, and these themselves."""
    length = len(positions)
    known = np.flatnonzero(positions >= 0)
    begins = Counter(((known - positions[known]) % length).tolist())
    begins.update((column - position) % length for column, those in left for position in those)
    if not begins:
        return {}
    begin = max(begins, key=lambda each: begins[each])
    return {
        column: position
        for column, those in left
        for position in those
        if (column - position) % length == begin
    }


def _stored(
    digests: _CallDigests, segment: Segment, slot: int, new: Int64, heads: UInt64
) -> tuple[UInt64, Int64]:
    """What the rows of a segment wrote, uint64 [rows, heads], and the columns where it lies; ``new`` are those where it
    lies in most caches."""
    found, held, given = digests.returned(slot), digests.stored(slot), digests.given(slot, segment)
    inside = bool(new[0] >= 0 and new[-1] < len(held))
    if given is None:
        return (held[new] if inside else found[np.clip(new, 0, len(found) - 1)]), new
    if inside and np.array_equal(found[new], given):
        return given, new
    # What was given lies elsewhere, or something else was stored.
    place = {code: column for column, code in enumerate(_codes(found, heads).tolist())}
    kept = set(_codes(held, heads).tolist())
    rows, columns = given.copy(), new.copy()
    for row, code in enumerate(_codes(given, heads).tolist()):
        if code in place:
            columns[row] = place[code]
        elif code not in kept and inside:
            rows[row] = held[new[row]]
    return rows, columns


def _presumed(call: CacheCall, placed: _Placed) -> Sight:
    """What rows see where the mask that they had is not known: what came before them, or a window of it."""
    own = np.flatnonzero(placed.positions >= 0)
    first = np.full(len(placed.new), own[0] if len(own) else 0, np.int64)
    if not placed.temporal:
        return Sight(first, np.full(len(first), len(placed.positions) - 1, np.int64))
    if call.window is not None:
        first = np.maximum(first, placed.new - call.window + 1)
    return Sight(first, placed.new)


def _changes(
    call: CacheCall, segment: Segment, names: Sequence[str], sums: EntrySums, placed: _Placed
) -> list[dict[str, Any]]:
    """Events of entries that are not what was written."""
    events: list[dict[str, Any]] = []
    for position, head in sums.changed.tolist():
        kind, _, number = names[head].partition(".")
        event = {
            "kind": "cache_changed", "request": segment.request, "layer": call.layer, "entry": kind, "head": int(number),
            "position": position,
        }  # fmt: skip
        if position in placed.whose:
            event["of"], event["at"] = placed.whose[position]
        events.append(event)
    if sums.number > len(sums.changed):
        more = sums.number - len(sums.changed)
        events.append(
            {"kind": "cache_changed_more", "request": segment.request, "layer": call.layer, "entries": more}
        )
    return events


def _contradictions(
    call: CacheCall, segment: Segment, sight: Sight | None, placed: _Placed
) -> list[dict[str, Any]]:
    """Events of rows that see entries of nobody, and of own entries that a cache lost which keeps all, or the first ones."""
    events: list[dict[str, Any]] = []
    about = {"request": segment.request, "layer": call.layer}
    short = call.whole and np.count_nonzero(placed.positions >= 0) < segment.start + segment.count
    if short or call.sink:
        kept = segment.start if call.whole else min(call.sink, segment.start)
        lost = np.setdiff1d(np.arange(kept), placed.positions)
        if len(lost):
            found = {"position": segment.start, "first": int(lost[0]), "entries": len(lost)}
            events.append({"kind": "cache_missing", **about, **found})
    alien = np.flatnonzero(placed.positions < 0)
    if sight is None or not len(alien):
        return events
    for row in range(segment.count):
        shown = alien[(alien >= sight.first[row]) & (alien <= sight.last[row])]
        if sight.seen is not None:
            shown = shown[sight.seen[row, shown]]
        for cell in shown.tolist()[:_LISTED]:
            where = {"position": segment.start + row, "cell": cell, "at": -1, "of": -1}
            events.append({"kind": "cache_foreign", **about, **where})
        if len(events) >= _LISTED:
            break
    return events


class _CallDigests:
    """The digests of one cache call, slot by slot: of what was given, of what is stored, and of what came back."""

    def __init__(self, call: CacheCall) -> None:
        self._call = call
        self._kinds = [kind for kind, _ in call.parts]
        self._heads = [array.shape[1] for _, array in call.parts]
        count = dict(zip(self._kinds, self._heads, strict=True))
        self.names = tuple(f"{kind}.{h}" for kind, n in count.items() for h in range(n))
        self.parts = len(self._kinds)
        self._returned = [] if call.device else [memory(array) for _, array in call.parts]
        stored = [] if call.device else [memory(array) for array in call.stored]
        if all(_same_place(a, b) for a, b in zip(stored, self._returned, strict=False)):
            # What a sound cache returns is a view of what it stores.
            stored = []
        self._stored = stored
        self._given = [] if call.device else [memory(array) for array in call.given]
        self._known: dict[int, UInt64] = {}

    def returned(self, slot: int) -> UInt64:
        """uint64 [columns, heads]; valid until the next call of the same cache."""
        if not self._known:
            self._known = self._all()
        return self._known[slot]

    def _all(self) -> dict[int, UInt64]:
        known = self._call.known
        if known is None:
            return {slot: self._read(slot) for slot in self._call.slots}
        first = 0 if self._call.fresh is None else self._call.fresh.start
        # Of all slots, since one without rows now may have some later, when only those would be read.
        return {
            slot: known.put(slot, first, self._read(slot), self._call.length)
            for slot in range(self._call.parts[0][1].shape[0])
        }

    def _read(self, slot: int) -> UInt64:
        device = [np.asarray(array)[slot] for array in self._call.device]
        return self._joined(device or [digest_entries(part, slot) for part in self._returned])

    def among(self, found: UInt64, keys: Any, slot: int, sight: Sight | None) -> Sight | None:
        """What rows see of ``found`` uint64 [columns, heads] by their ``sight`` of keys that a model chose among these; None where one of
        them is not there."""
        given = digest_entries(memory(keys), slot)
        if sight is None or given.shape[1] > found.shape[1]:
            return None
        places = {row.tobytes(): n for n, row in enumerate(found[:, : given.shape[1]])}
        columns = [places.get(row.tobytes(), -1) for row in given]
        return None if -1 in columns else spread(sight, np.array(columns, np.int64), len(found))

    def stored(self, slot: int) -> UInt64:
        """uint64 [at least as many columns, heads]."""
        if not self._stored:
            return self.returned(slot)
        return self._joined([digest_entries(part, slot) for part in self._stored])

    def given(self, slot: int, segment: Segment) -> UInt64 | None:
        """Of the rows of a segment, uint64 [rows, heads]; None where the cache stores another form of it."""
        rows = slice(segment.column, segment.column + segment.count)
        if self._call.device_given:
            return self._joined([np.asarray(array)[slot, rows] for array in self._call.device_given])
        if not self._given:
            return None
        return self._joined([digest_entries(_rows_of(part, segment), slot) for part in self._given])

    def _joined(self, parts: Sequence[UInt64]) -> UInt64:
        sides: dict[str, UInt64] = {}
        for i, (kind, digests) in enumerate(zip(self._kinds, parts, strict=True)):
            # A quantised entry has several parts; odd weights keep one changed word visible in the sum.
            weight = head_weight(np.array([1000 + i]))[0] if kind in sides else np.uint64(1)
            sides[kind] = sides[kind] + weight * digests if kind in sides else digests
        return np.concatenate(list(sides.values()), axis=1)

    def source(self, slots: Int64, columns: Int64) -> Callable[[int], Source] | None:
        """Where the values of an entry lie, of the rows in these slots and columns."""
        if len(self._kinds) > len(set(self._kinds)) or self._call.device:
            return None
        parts = self._stored or self._returned

        def source(entry: int) -> Source:
            part = 0 if entry < self._heads[0] else 1
            where = parts[part]
            return Source(
                where.numpy()[:, entry - (self._heads[0] if part else 0)], where.dtype, slots, columns
            )

        return source


def _rows_of(part: Memory, segment: Segment) -> Memory:
    """The rows of a segment in an array [slots, heads, columns, width]."""
    slots, heads, _, width = part.shape
    address = part.address + segment.column * part.strides[2]
    return part._replace(address=address, shape=(slots, heads, segment.count, width))


def _same_place(a: Memory, b: Memory) -> bool:
    return (a.address, a.dtype, a.strides[1:]) == (b.address, b.dtype, b.strides[1:])
