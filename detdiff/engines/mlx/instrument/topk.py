"""The largest logits of a row, and every layer's view of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .buffers import memory

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def top(logits: Float32, k: int) -> tuple[Int32, Float32]:
    """Ids int32 [rows, k] and logits float32 [rows, k] of the largest of ``logits`` [rows, V].

    Descending; equal logits by lower id, NaN last.
    """
    k = min(k, logits.shape[-1])
    ids = np.empty((len(logits), k), np.int32)
    for row, values in enumerate(logits):
        ranked = np.where(np.isnan(values), -np.inf, values)
        kth = np.partition(ranked, len(ranked) - k)[len(ranked) - k]
        candidates = np.flatnonzero(ranked >= kth)
        order = np.lexsort((candidates, np.isnan(values[candidates]), -ranked[candidates]))
        ids[row] = candidates[order[:k]]
    return ids, np.take_along_axis(logits, ids, axis=1)


def as_float32(logits: mx.array) -> Float32:
    """An evaluated MLX array as float32, exactly (half and bfloat16 are subsets of float32)."""
    where = memory(logits)
    bits = where.numpy()
    if where.dtype == "BF16":
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
    kinds = {"F16": np.float16, "F32": np.float32}
    return np.ascontiguousarray(bits).view(kinds[where.dtype]).astype(np.float32)


def lens_logits(
    hidden: mx.array, norm: Callable[[mx.array], mx.array], head: Callable[[mx.array], mx.array]
) -> mx.array:
    """Logits [rows, V] of ``hidden`` [rows, D] as if the model ended after this layer (lazy)."""
    return head(norm(hidden[None]))[0]
