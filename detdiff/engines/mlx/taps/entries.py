"""Columns of a forward and its cache entries: what was written where, what each row could see, whether it is still what was written.

A column is one distinct value of the forward's rows; a capture keeps the values of some.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as caches
from numpy.typing import NDArray

from detdiff.errors import ScenarioError
from detdiff.scenario import Capture
from detdiff.trace import head_weight, position_weight
from detdiff.trace.digest import STORAGE

from .digests import digest_entries, fold_entries
from .forward import CacheCall, ForwardRows, Memory, Segment, handle, memory
from .sites import SiteMap
from .unread import CacheUpdate

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class KeptValues:
    """Captured values [m, width] in storage form of the rows ``rows`` [m] of the forward's row table."""

    rows: Int64
    data: NDArray[Any]
    dtype: str


@dataclass(frozen=True)
class DistinctValue:
    """One distinct value of a row: its digests uint64 [m] for the rows ``present`` [m] of the row table.

    ``ports`` are the ports that hold this value; ``kept`` the captured values, copied out of MLX's memory.
    """

    ports: list[int]
    present: Int64
    digests: UInt64
    kept: KeptValues | None = None


@dataclass(frozen=True)
class Source:
    """Where values lie: an array as unsigned integers [slots, rows, ...], and each row's slot and column."""

    view: NDArray[Any]
    dtype: str
    slots: Int64
    columns: Int64

    def take(self, present: Int64, keep: NDArray[np.bool_]) -> KeptValues | None:
        """Copies of the values of the rows ``present`` that ``keep`` (over the row table) wants."""
        wanted = np.flatnonzero(keep[present])
        if not len(wanted):
            return None
        data = self.view[self.slots[wanted], self.columns[wanted]].reshape(len(wanted), -1)
        return KeptValues(present[wanted], np.ascontiguousarray(data).view(STORAGE[self.dtype]), self.dtype)


@dataclass(frozen=True)
class Selection:
    """Which values a capture keeps: ports, and positions per request index (None: all of that request's; None instead of all
    of them: of every request, whichever come)."""

    ports: frozenset[int]
    positions: Mapping[int, Collection[int] | None] | None

    @classmethod
    def of(
        cls, capture: Capture, sites: SiteMap, request_ids: Sequence[str], beside: Sequence[SiteMap] = ()
    ) -> Selection | None:
        """None for the digest level, everything for ``full``, what the window names for ``window``; ``beside`` as in
        ``at``."""
        if capture.level == "digest":
            return None
        window = capture.level == "window"
        wanted = capture.sites if window and capture.sites else ("*",)
        names = capture.requests if window and capture.requests else request_ids
        span = capture.positions if window else None
        positions = None if span is None else range(span[0], span[1] + 1)
        return cls.at({name: positions for name in names}, sites, request_ids, wanted, beside)

    @classmethod
    def at(
        cls,
        positions: Mapping[str, Collection[int] | None],
        sites: SiteMap,
        request_ids: Sequence[str],
        patterns: Sequence[str] = ("*",),
        beside: Sequence[SiteMap] = (),
    ) -> Selection:
        """Values at ``positions`` by request id, at sites that match one of the fnmatch ``patterns``.

        Raises ScenarioError for a pattern that matches no site of the model or of those ``beside`` it: nothing captured
        is not what was asked for.
        """
        own = [site.name for site in sites.sites]
        names = [*own, *(site.name for other in beside for site in other.sites)]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = (
                    ", ".join(get_close_matches(pattern, names, 3))
                    or f"one of {len(names)}, such as {names[-1]}"
                )
                raise ScenarioError(
                    f"The window site {pattern!r} matches none of this model's {len(names)} sites; expected a site's "
                    f"name or a pattern of it ({near}). `detdiff show TRACE --sites` lists them."
                )
        ports = frozenset(
            port
            for (key, _), port in sites.ports.items()
            if any(fnmatchcase(own[sites.index[key]], pattern) for pattern in patterns)
        )
        return cls(ports, {request_ids.index(name): where for name, where in positions.items()})

    def rows(self, table: ForwardRows) -> NDArray[np.bool_]:
        """The rows of a forward whose values are kept, bool [n]."""
        if self.positions is None:
            return np.ones(len(table.request), bool)
        keep = np.zeros(len(table.request), bool)
        for request, where in self.positions.items():
            mine = table.request == request
            keep |= mine if where is None else mine & np.isin(table.position, list(where))
        return keep


EVERYTHING = 1 << 40

_KNOWN: Final[tuple[type, ...]] = (
    caches.KVCache,
    caches.QuantizedKVCache,
    caches.RotatingKVCache,
    caches.ChunkedKVCache,
    caches.ConcatenateKVCache,
    caches.BatchKVCache,
    caches.BatchRotatingKVCache,
)
"""Classes of which it is known what they give back: every entry, or those of a window or a chunk."""


def cache_kind(cache: Any) -> type | None:
    """The class of mlx-lm's that ``cache`` behaves as; None where nothing is known of what it gives back.

    A subclass that writes, masks or trims in a way of its own may evict or compress, and nothing is presumed of it.
    """
    cls = type(cache)
    if cls.__module__.partition(".")[0] == "detdiff":
        return next((kind for kind in _KNOWN if issubclass(cls, kind)), _KNOWN[0])
    for kind in _KNOWN:
        if issubclass(cls, kind):
            ways = ("update_and_fetch", "make_mask", "trim")
            alike = all(getattr(cls, way, None) is getattr(kind, way, None) for way in ways)
            return kind if alike else None
    return None


@dataclass(frozen=True)
class CacheCallRows:
    """One cache call in rows: ``entries`` uint64 [rows, heads], ``written`` and ``read`` uint64 [rows].

    ``rows`` are indices into the forward's row table, ``names`` the entry names (K.0, …) in column order,
    ``source(h)`` where the values of entry ``h`` lie (None where entries are stored in several parts).
    """

    rows: Int64
    names: tuple[str, ...]
    entries: UInt64
    written: UInt64
    read: UInt64
    events: list[dict[str, Any]]
    source: Callable[[int], Source] | None


def physical_places(call: CacheCall, length: int, segment: Segment) -> tuple[int, Int64]:
    """(low, places): the oldest position that the cache still holds, and where each from there on lies.

    The newest column of the forward is the newest entry in temporal order; a ring only rotates that order. The
    anchor is what the engine wrote, not what the cache says of itself, so a cache whose own bookkeeping is wrong
    shows up as entries that are not what was written.
    """
    end = segment.start + segment.count
    first = segment.start - (0 if call.own else segment.column)  # the position of the first column written
    if length < end and call.ring is None and call.window is None and call.chunk is None:
        # Too few for all positions: its newest old ones are missing, and those before lie where they always did.
        old = length - call.columns
        left = np.minimum(np.arange(first, dtype=np.int64), max(0, old - 1))
        return 0, np.concatenate([left, np.arange(first, end, dtype=np.int64) - first + old])
    oldest = max(0, first - (length - call.columns))
    keep = 0
    if call.ring is not None:
        keep = call.ring[1]
        oldest = max(oldest, first - (length - keep - call.columns))
    if call.window is not None:
        oldest = max(oldest, segment.start - call.window + 1)
    temporal = np.arange(oldest, end, dtype=np.int64) - first + (length - call.columns)
    if call.ring is None:
        return oldest, temporal
    index, _, size = call.ring
    return oldest, keep + (index - keep + temporal - keep) % (size - keep)


def _alike_rows(call: CacheCall, low: int, segment: Segment) -> list[tuple[int, int, int]]:
    """(first position that they see, first row, rows) of rows of a segment that see entries from one place on."""
    end = segment.start + segment.count
    if call.chunk is None:
        return [(low, segment.start, segment.count)]
    size = call.chunk
    starts = [segment.start, *range((segment.start // size + 1) * size, end, size)]
    return [
        (max(low, start // size * size), start, stop - start)
        for start, stop in zip(starts, [*starts[1:], end], strict=True)
    ]


class Ledgers:
    """Digests of every cache entry as it was written, uint64 [capacity, heads] per request and cache."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, str], UInt64] = {}
        self._parts: dict[
            tuple[int, str], int
        ] = {}  # arrays an entry is stored in: more once it is quantised
        self._prefixes: dict[int, tuple[int, int]] = {}
        self._weights: UInt64 = position_weight(np.arange(1024))
        self._heads: dict[int, UInt64] = {}

    def share(self, request: int, donor: int, tokens: int) -> None:
        """The first ``tokens`` entries of a request are those that ``donor`` wrote."""
        if donor != request:
            self._prefixes[request] = donor, tokens

    def forget(self, request: int) -> None:
        """No row of a request comes any more, and nobody shares its entries."""
        self._written = {key: each for key, each in self._written.items() if key[0] != request}
        self._parts = {key: each for key, each in self._parts.items() if key[0] != request}
        self._prefixes.pop(request, None)

    def _ledger(self, request: int, key: str, end: int, heads: int) -> UInt64:
        ledger = self._written.get((request, key))
        if ledger is None:
            donor, tokens = self._prefixes.get(request, (request, 0))
            given = self._written.get((donor, key)) if tokens else None
            ledger = None if given is None else given[:tokens]
        if ledger is None or len(ledger) < end:
            grown = np.zeros((max(256, 2 * end), heads), np.uint64)
            if ledger is not None:
                grown[: len(ledger)] = ledger
            ledger = self._written[request, key] = grown
        if len(self._weights) < end:
            self._weights = position_weight(np.arange(2 * end))
        return ledger

    def _head_weights(self, heads: int) -> UInt64:
        if heads not in self._heads:
            self._heads[heads] = head_weight(np.arange(heads))
        return self._heads[heads]

    def fold(self, call: CacheCall, segments: Sequence[Segment]) -> CacheCallRows:
        """Digest one cache call; new entries go into the ledgers, changed ones into the events."""
        memories = [] if call.device else [memory(array) for _, array in call.parts]
        stored = [] if call.device else [memory(array) for array in call.stored]
        if all(_same_place(a, b) for a, b in zip(stored, memories, strict=False)):
            # What a sound cache returns is a view of what it stores.
            stored = []
        kinds = [kind for kind, _ in call.parts]
        heads = [array.shape[1] for _, array in call.parts]
        names = _entry_names(kinds, heads)
        weights = self._head_weights(len(names))
        offsets = np.cumsum([0] + [s.count for s in segments])
        returned = self._returned(call, memories, kinds, heads)
        pieces: list[tuple[UInt64, UInt64, UInt64]] = []
        rows: list[Int64] = []
        places: list[Int64] = []
        events: list[dict[str, Any]] = []
        for lane, slot in zip(call.segments, call.slots, strict=True):
            segment = segments[lane]
            if segment.count == 0:
                continue
            found = returned[slot]
            low, physical = physical_places(call, len(found), segment)
            end = segment.start + segment.count
            ledger = self._ledger(segment.request, call.key, end, len(names))
            held = self._found(call, stored, kinds, heads, slot) if stored else found
            if len(kinds) > self._parts.setdefault((segment.request, call.key), len(kinds)):
                # Quantising stores older entries anew: from now on that is what was written.
                self._parts[segment.request, call.key] = len(kinds)
                ledger[low : segment.start] = held[physical[: segment.start - low]]
            ledger[segment.start : end] = held[physical[segment.start - low :]]
            sums: list[tuple[UInt64, UInt64]] = []
            changed: list[tuple[int, int]] = []
            total = 0
            for first, start, count in _alike_rows(call, low, segment):
                where = physical[first - low : start + count - low]
                span = (first, start, count, call.window or EVERYTHING)
                *both, differ, number = fold_entries(found, where, span, (self._weights, weights), ledger)
                sums.append((both[0], both[1]))
                changed += [(int(p), int(h)) for p, h in differ]
                total += number
            written, read = (np.concatenate([each[i] for each in sums]) for i in range(2))
            pieces.append((ledger[segment.start : end].copy(), written, read))
            rows.append(np.arange(offsets[lane], offsets[lane + 1]))
            places.append(physical[segment.start - low :])
            events += [
                {
                    "kind": "cache_changed",
                    "request": segment.request,
                    "layer": call.layer,
                    "entry": names[h].partition(".")[0],
                    "head": int(names[h].partition(".")[2]),
                    "position": p,
                }
                for p, h in changed
            ]
            if total > len(changed):
                events.append(
                    {
                        "kind": "cache_changed_more",
                        "request": segment.request,
                        "layer": call.layer,
                        "entries": total - len(changed),
                    }
                )
        order = np.concatenate(rows)
        slots = np.repeat(np.array(call.slots, np.int64), [len(r) for r in rows])
        columns = np.concatenate(places)
        single = len(kinds) == len(set(kinds)) and not call.device

        def source(entry: int) -> Source:
            part = 0 if entry < heads[0] else 1
            where = (stored or memories)[part]
            return Source(where.numpy()[:, entry - (heads[0] if part else 0)], where.dtype, slots, columns)

        entries, written, read = (np.concatenate([p[i] for p in pieces]) for i in range(3))
        return CacheCallRows(order, names, entries, written, read, events, source if single else None)

    def _returned(
        self, call: CacheCall, memories: list[Memory], kinds: list[str], heads: list[int]
    ) -> dict[int, UInt64]:
        """Digests uint64 [columns, heads] of all that came back, by slot."""
        known = call.known
        if known is None:
            return {slot: self._found(call, memories, kinds, heads, slot) for slot in call.slots}
        first = 0 if call.fresh is None else call.fresh.start
        # Of all slots, since one without rows now may have some later, when only those would be read.
        return {
            slot: known.put(slot, first, self._found(call, memories, kinds, heads, slot), call.length)
            for slot in range(call.parts[0][1].shape[0])
        }

    def _found(
        self, call: CacheCall, memories: list[Memory], kinds: list[str], heads: list[int], slot: int
    ) -> UInt64:
        """Digests uint64 [T, heads] of the entries as they lie in the cache."""
        parts: dict[str, UInt64] = {}
        for i, kind in enumerate(kinds):
            if call.device:
                digests = np.asarray(call.device[i])[slot]
            else:
                digests = digest_entries(memories[i], slot)
            # A quantised entry has several parts; odd weights keep one changed word visible in the sum.
            weight = head_weight(np.array([1000 + i]))[0] if kind in parts else np.uint64(1)
            parts[kind] = parts[kind] + weight * digests if kind in parts else digests
        return np.concatenate(list(parts.values()), axis=1)


def _same_place(a: Memory, b: Memory) -> bool:
    return (a.address, a.dtype, a.strides[1:]) == (b.address, b.dtype, b.strides[1:])


def _entry_names(kinds: list[str], heads: list[int]) -> tuple[str, ...]:
    count = dict(zip(kinds, heads, strict=True))
    return tuple(f"{kind}.{h}" for kind, n in count.items() for h in range(n))


def cache_call(
    key: str,
    layer: int,
    update: CacheUpdate,
    fresh: range | None,
    columns: int,
    lanes: tuple[tuple[int, ...], tuple[int, ...], bool],
    unkept: str = "",
) -> CacheCall | None:
    """Describe one ``update_and_fetch`` right after it happened; None where the entries cannot be addressed, as in a
    cache whose class is not known.

    ``fresh`` are the columns that have to be read, None for all; ``lanes`` are (segments, slots, own) as in CacheCall; ``unkept`` is a side that is left out.
    """
    cache, result = update.cache, update.result
    kind = cache_kind(cache)
    parts = None if kind is None else entry_parts(result)
    if parts is None:
        return None
    own = _parts(getattr(cache, "keys", None), getattr(cache, "values", None)) or []
    parts, own = ([part for part in side if part[0] != unkept] for side in (parts, own))
    fits = [kind for kind, _ in own] == [kind for kind, _ in parts] and all(
        a.shape[:2] == b.shape[:2] and a.shape[2] >= b.shape[2]
        for (_, a), (_, b) in zip(own, parts, strict=True)
    )
    stored = tuple(array for _, array in own) if fits else ()
    length = parts[0][1].shape[2]
    ring: tuple[int, int, int] | None = None
    window: int | None = None
    if kind is caches.RotatingKVCache:
        window = cache.max_size
        if columns == 1 and cache.offset > length:
            ring = (cache._idx, cache.keep, length)
    elif kind is caches.BatchRotatingKVCache:
        window = cache.max_size
        if columns == 1 and cache.rotated:
            ring = (cache._idx, 0, length)
    chunk = cache.chunk_size if kind is caches.ChunkedKVCache else None
    if fresh is not None:
        # Taking copies, where a slice of a single head would hold the cache's own memory.
        parts = [(side, mx.take(part, _places(fresh.start, fresh.stop), axis=2)) for side, part in parts]
    return CacheCall(
        key,
        layer,
        tuple(parts),
        lanes[0],
        lanes[1],
        columns,
        ring,
        window,
        lanes[2],
        chunk=chunk,
        stored=() if fresh is not None else stored,
        length=length,
        fresh=fresh,
        known=update.known,
    )


@lru_cache(8)
def _places(start: int, stop: int) -> mx.array:
    return mx.array(list(range(start, stop)), mx.uint32)


def entry_parts(result: Any) -> list[tuple[str, mx.array]] | None:
    """The arrays of what an ``update_and_fetch`` returned; None unless they are keys and values by position."""
    pair = isinstance(result, tuple | list) and len(result) == 2
    return _parts(*result) if pair else None


def _parts(keys: Any, values: Any) -> list[tuple[str, mx.array]] | None:
    """Handles on the arrays of keys and values, a quantised side in several; None unless all are [.., .., .., ..]."""
    parts: list[tuple[str, mx.array]] = []
    for kind, side in (("K", keys), ("V", values)):
        for piece in side if isinstance(side, tuple | list) else (side,):
            if not isinstance(piece, mx.array) or piece.ndim != 4:
                return None
            parts.append((kind, handle(piece)))
    return parts
