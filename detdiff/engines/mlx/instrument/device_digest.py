"""The same digests computed by MLX on its own device, so that only 8 bytes a row leave it.

Integer sums are exact in any order, so the numbers equal those of the host (a property test holds this).
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from detdiff.trace.digest import coefficients, digest_bias

from .buffers import DTYPE_NAMES

_cache: dict[int, mx.array] = {}


def _coefficients(words: int) -> mx.array:
    found = _cache.get(words)
    if found is None:
        found = _cache[words] = mx.array(coefficients(words))
    return found


def _digest_last(array: mx.array) -> mx.array:
    """Digests uint64 [...] over the last axis of ``array`` [..., D]."""
    n_bytes = array.shape[-1] * array.itemsize
    if array.dtype == mx.bool_:
        array = array.astype(mx.uint8)
        dtype = "BOOL"
    else:
        dtype = DTYPE_NAMES[array.dtype]
    array = mx.contiguous(array)
    if array.itemsize >= 4:
        words = array.view(mx.uint32)
    else:
        raw = array.view(mx.uint8)
        if n_bytes % 4:
            widths = [(0, 0)] * (raw.ndim - 1) + [(0, 4 - n_bytes % 4)]
            raw = mx.contiguous(mx.pad(raw, widths))
        words = raw.view(mx.uint32)
    total = (words.astype(mx.uint64) * _coefficients(words.shape[-1])).sum(axis=-1)
    # As a numpy array: MLX refuses Python integers from 2**63 on.
    return total + mx.array(np.array(digest_bias(dtype, n_bytes), np.uint64))


def device_rows(array: mx.array, axis: int | None) -> mx.array:
    """Digests uint64 [slots, columns] of the rows of ``array``; ``axis`` None: one row a slot, [slots, 1]."""
    moved = mx.expand_dims(array, 1) if axis is None else mx.moveaxis(array, axis, 1)
    # The width is said and not left to -1, which an array without rows could not answer.
    return _digest_last(moved.reshape(*moved.shape[:2], math.prod(moved.shape[2:])))


def device_entries(array: mx.array) -> mx.array:
    """Digests uint64 [slots, T, heads] of cache entries in ``array`` [slots, heads, T, width]."""
    return _digest_last(array).swapaxes(1, 2)
