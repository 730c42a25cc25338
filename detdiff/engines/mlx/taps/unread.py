"""Which columns of what a cache gives back need no reading, because MLX's graph says that they are those of the forward before.

An array of MLX is a value. A cache that writes rows in place makes a new array of the one that its last update left, and the two
differ in those rows only. So where a cache's arrays are the very nodes of the graph that its last update left, and the update is
mlx-lm's own, the digests of all other columns are known. Reading them anew would take as long as attention does at long contexts;
holding the arrays until somebody reads them is worse, since MLX copies an array that is held at the next write.

What MLX does not know of, as a kernel that writes past the end of its own output, is found by reading a layer anew when its turn
comes; the recorder does that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache as once
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as caches
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

# Where an instance of a nanobind class begins: behind PyObject, and an offset and flags of 4 bytes each. The first member of
# mlx::core::array is its shared pointer to the node.
_NODE = object.__basicsize__ + 8

# By class: the functions beside `update_and_fetch` that say which columns are written.
_WRITING: dict[type, tuple[str, ...]] = {
    caches.KVCache: ("keys_and_values",),
    caches.BatchKVCache: ("keys_and_values",),
    caches.QuantizedKVCache: ("keys_and_values",),
    caches.RotatingKVCache: ("keys_and_values", "_update_in_place", "_trim"),
}


def node(array: Any) -> int:
    """A number that all handles on one array have in common, and no other array while one of them lives; 0: it is not known."""
    if not isinstance(array, mx.array) or not nodes_are_known():
        return 0
    return _address(array)


def _address(array: mx.array) -> int:
    return ctypes.c_void_p.from_address(id(array) + _NODE).value or 0


def _handles(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Other Python objects for the same nodes: a write gives the object that is written to another node."""
    return [array.astype(array.dtype) for array in arrays]


@once
def nodes_are_known() -> bool:
    """Whether the node of an array can be told here: two handles have the same one, and a write gives an array another."""
    first, other = mx.zeros((2, 2)), mx.zeros((2, 2))
    if type(first).__basicsize__ < _NODE + ctypes.sizeof(ctypes.c_void_p):
        return False
    second, written = _handles([first, first])
    written[0] = 1
    same, apart = _address(first) == _address(second) != 0, {_address(a) for a in (first, other, written)}
    return same and len(apart) == 3


class ColumnDigests:
    """The digests of what one cache gave back last, by slot: uint64 [columns, heads].

    ``updates`` counts the updates of the cache, ``recorded`` is the last one that was recorded.
    """

    def __init__(self) -> None:
        self.updates = self.recorded = 0
        self._of: dict[int, UInt64] = {}

    def put(self, slot: int, first: int, digests: UInt64, length: int) -> UInt64:
        """Columns were read from ``first`` on; all ``length`` of them. Valid until the next call."""
        held = self._of.get(slot)
        if held is None or len(held) < length:
            grown = np.zeros((max(256, 2 * length), digests.shape[1]), np.uint64)
            if held is not None:
                grown[: len(held)] = held
            held = self._of[slot] = grown
        held[first : first + len(digests)] = digests
        return held[:length]

    def held(self, slot: int) -> UInt64:
        """The digests of a slot, of at least as many columns as were put."""
        return self._of[slot]


class CacheUpdate(NamedTuple):
    """One ``update_and_fetch``: the cache, what it gave back, and the columns of that which may be new (None: all).

    ``known`` holds the digests of the others.
    """

    cache: Any
    result: Any
    fresh: range | None = None
    known: ColumnDigests | None = None


@dataclass
class _Left:
    """What an update left: handles on the cache's arrays, how many columns it gave back, and their digests."""

    arrays: Sequence[mx.array]
    length: int
    known: ColumnDigests


class _Before(NamedTuple):
    left: int
    at: int
    known: ColumnDigests


@dataclass
class CacheUpdates:
    """Follows the caches of one run from update to update. ``begins`` must come right before a write, ``ended`` right after."""

    _left: WeakKeyDictionary[Any, _Left] = field(default_factory=WeakKeyDictionary)

    def begins(self, cache: Any, native: Any) -> _Before | None:
        """What is known of a cache that ``native`` will now write to; None where its columns have to be read anew."""
        # Taken out: what is held here while MLX writes would be copied.
        left = self._left.pop(cache, None)
        if left is None or not _is_mlx_lms(cache, native):
            return None
        arrays = _arrays(cache)
        if [node(array) for array in arrays] != [node(array) for array in left.arrays]:
            return None
        rotating = type(cache) is caches.RotatingKVCache
        if rotating and arrays[0].shape[2] > cache.max_size:
            return None  # it will cut its oldest columns off
        at = cache._idx if type(cache) is caches.BatchKVCache else cache.offset
        return _Before(left.length, int(at), left.known)

    def ended(self, cache: Any, native: Any, result: Any, before: _Before | None) -> CacheUpdate:
        """What that update did."""
        if not nodes_are_known() or not _is_mlx_lms(cache, native):
            return CacheUpdate(cache, result)
        keys = result[0][0] if isinstance(result[0], tuple | list) else result[0]
        length = int(keys.shape[2])
        fresh = None if before is None else _fresh(cache, before, length)
        known = before.known if before is not None and fresh is not None else ColumnDigests()
        known.updates += 1
        self._left[cache] = _Left(_handles(_arrays(cache)), length, known)
        return CacheUpdate(cache, result, fresh, known)


def _fresh(cache: Any, before: _Before, length: int) -> range | None:
    """The columns that an update wrote, where those beside them are as they were."""
    if type(cache) is caches.RotatingKVCache:
        if cache.offset != before.at + 1 or length > before.left + 1:
            return None
        return range(cache._idx - 1, cache._idx)
    end = cache._idx if type(cache) is caches.BatchKVCache else cache.offset
    return range(before.at, end) if before.at <= before.left and end == length else None


def _is_mlx_lms(cache: Any, native: Any) -> bool:
    """Whether mlx-lm's own code writes to a cache of a class that is known."""
    others = _WRITING.get(type(cache))
    if others is None:
        return False
    functions = (native, *(getattr(type(cache), name, None) for name in others))
    return all(_file(function) == caches.__file__ for function in functions if function is not None)


def _file(function: Any) -> str | None:
    # Of the code, since a wrapper may bear the name and module of what it wraps.
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def _arrays(cache: Any) -> list[mx.array]:
    found: list[mx.array] = []
    for side in (cache.keys, cache.values):
        found += side if isinstance(side, tuple | list) else (side,)
    return found
