"""Columns of a forward, and what a cache gave back when rows were written to it.

A column is one distinct value of the forward's rows; a capture keeps the values of some.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from detdiff.trace.digest import STORAGE

from .forward import CacheCall, ForwardRows, handle
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
_WHOLE: Final = (caches.KVCache, caches.QuantizedKVCache, caches.ConcatenateKVCache, caches.BatchKVCache)
"""Those that give back every entry."""


def cache_kind(cache: Any) -> type | None:
    """The class of mlx-lm's that ``cache`` behaves as; None where nothing is known of what it gives back.

    A subclass that writes, masks or trims in a way of its own may evict or compress, and nothing is presumed of it.
    """
    cls = type(cache)
    if cls in _KNOWN:
        return cls
    if cls.__module__.partition(".")[0] == "detdiff":
        return next((kind for kind in _KNOWN if issubclass(cls, kind)), _KNOWN[0])
    for kind in _KNOWN:
        if issubclass(cls, kind):
            ways = ("update_and_fetch", "make_mask", "trim")
            alike = all(getattr(cls, way, None) is getattr(kind, way, None) for way in ways)
            return kind if alike else None
    return None


def cache_call(
    key: str,
    layer: int,
    update: CacheUpdate,
    fresh: range | None,
    given: tuple[mx.array, mx.array],
    columns: int,
    lanes: tuple[tuple[int, ...], tuple[int, ...], bool],
    unkept: str = "",
) -> CacheCall | None:
    """Describe one ``update_and_fetch`` right after it happened; None where the entries cannot be addressed, as in a
    cache whose class is not known.

    ``fresh`` are the columns that have to be read, None for all; ``given`` are the keys and values that the cache was given; ``lanes``
    are (segments, slots, own) as in CacheCall; ``unkept`` is a side that is left out.
    """
    cache, result = update.cache, update.result
    kind = cache_kind(cache)
    parts = None if kind is None else entry_parts(result)
    if parts is None:
        return None
    if unkept:
        parts = [part for part in parts if part[0] != unkept]
    length = parts[0][1].shape[2]
    window = cache.max_size if kind in (caches.RotatingKVCache, caches.BatchRotatingKVCache) else None
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
        window,
        lanes[2],
        stored=() if fresh is not None else _stored(cache, parts, unkept),
        length=length,
        fresh=fresh,
        known=update.known,
        given=_comparable(given, parts, unkept),
        returned=result[0],
        whole=kind in _WHOLE,
        sink=int(cache.keep) if kind is caches.RotatingKVCache else 0,
    )


def _stored(cache: Any, parts: Sequence[tuple[str, mx.array]], unkept: str) -> tuple[mx.array, ...]:
    """A cache's own arrays in the order of ``parts``; empty where it does not show such."""
    own = _parts(getattr(cache, "keys", None), getattr(cache, "values", None)) or []
    own = [part for part in own if part[0] != unkept]
    fits = [kind for kind, _ in own] == [kind for kind, _ in parts] and all(
        a.shape[:2] == b.shape[:2] and a.shape[2] >= b.shape[2]
        for (_, a), (_, b) in zip(own, parts, strict=True)
    )
    return tuple(array for _, array in own) if fits else ()


@lru_cache(8)
def _places(start: int, stop: int) -> mx.array:
    return mx.array(list(range(start, stop)), mx.uint32)


def _comparable(
    given: tuple[mx.array, mx.array], parts: Sequence[tuple[str, mx.array]], unkept: str
) -> tuple[mx.array, ...]:
    """The handles that were given, in the order of ``parts``, where a cache stores just that; empty where it stores another form of it."""
    sides = [side for side, kind in zip(given, "KV", strict=True) if kind != unkept] if unkept else given
    fits = len(sides) == len(parts) and all(
        side.ndim == 4
        and (side.dtype, side.shape[1], side.shape[3]) == (part.dtype, part.shape[1], part.shape[3])
        for side, (_, part) in zip(sides, parts, strict=True)
    )
    return tuple(sides) if fits else ()


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
