"""What the compiled attention loops share: which keys a row attends, and its scores.

Keys lie in columns, so that neighbouring keys fill a vector; their scores do not meet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from . import attention_order, scalar_math
from .attention_order import AttentionShape, Operands
from .compiled import Loop, compiled, inner
from .scalar_math import fma

# Keys whose scores run side by side; a lane's partial sums for them stay in the nearest cache.
CHUNK = 64

_ZERO = np.float32(0.0)
_MASKED = np.float32(-np.inf)


def _array(dimensions: int) -> Any:
    return types.Array(types.float32, dimensions, "C", readonly=True)


SHAPE = types.NamedUniTuple(types.int64, len(AttentionShape._fields), AttentionShape)
OPERANDS = types.NamedTuple(
    (_array(2), _array(3), _array(3), _array(4), _array(1), types.Array(types.float32, 2, "C")), Operands
)


def row_loop(loop: Callable[..., None], order: type[tuple[Any, ...]], kinds: tuple[Any, ...]) -> Loop:
    """Compiles ``loop(shape, operands, order, first, last)``; ``kinds`` are the types of the order's fields."""
    same = len(set(kinds)) == 1
    numbers = types.NamedUniTuple(kinds[0], len(kinds), order) if same else types.NamedTuple(kinds, order)
    signature = types.void(SHAPE, OPERANDS, numbers, types.int64, types.int64)
    return compiled(loop, [signature], scalar_math, attention_order, sys.modules[__name__])


@inner
def place(shape: Any, row: Any) -> Any:
    """Batch, head, query row and key head (over the batch) of a flat row."""
    query = row % shape.rows
    head = row // shape.rows % shape.heads
    batch = row // (shape.rows * shape.heads)
    return batch, head, query, batch * shape.kv_heads + head // (shape.heads // shape.kv_heads)


@inner
def attended(shape: Any, mask: Any, batch: Any, head: Any, query: Any, bias: Any) -> Any:
    """Fills ``bias`` with what is added to each key's score, -inf where masked; returns (end, any).

    Keys from ``end`` on are masked too; ``any`` is whether a key is left.
    """
    end = shape.keys
    if shape.causal:
        end = min(end, max(0, shape.keys - shape.rows + query + 1))
    if mask.shape[3] == 0:
        bias[:end] = _ZERO
        return end, end > 0
    row = mask[
        batch if mask.shape[0] > 1 else 0,
        head if mask.shape[1] > 1 else 0,
        query if mask.shape[2] > 1 else 0,
    ]
    found = False
    for key in range(end):
        bias[key] = row[key]
        found = found or row[key] != _MASKED
    return end, found


@inner
def add_scaled(weight: Any, values: Any, total: Any) -> Any:
    """total = fma(weight, values, total), item by item."""
    for i in range(total.size):
        total[i] = fma(weight, values[i], total[i])


@inner
def add_values(weights: Any, values: Any, total: Any) -> Any:
    """The chain ``total`` goes on over the keys in ascending order: fma(weights[key], values[key], total)."""
    whole = weights.size - weights.size % 4
    for key in range(0, whole, 4):
        w0, w1, w2, w3 = weights[key], weights[key + 1], weights[key + 2], weights[key + 3]
        v0, v1, v2, v3 = values[key], values[key + 1], values[key + 2], values[key + 3]
        for i in range(total.size):
            total[i] = fma(w3, v3[i], fma(w2, v2[i], fma(w1, v1[i], fma(w0, v0[i], total[i]))))
    for key in range(whole, weights.size):
        add_scaled(weights[key], values[key], total)


@inner
def chain_scores(q: Any, keys: Any, end: Any, out: Any) -> Any:
    """out[key] = one chain over q in ascending order, from +0.0."""
    out[:end] = _ZERO
    whole = q.size - q.size % 4
    for d in range(0, whole, 4):
        q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        for key in range(end):
            out[key] = fma(q3, k3[key], fma(q2, k2[key], fma(q1, k1[key], fma(q0, k0[key], out[key]))))
    for d in range(whole, q.size):
        add_scaled(q[d], keys[d], out[:end])


@inner
def lane_scores(q: Any, keys: Any, end: Any, out: Any, each: Any, dots: Any, part: Any) -> Any:
    """out[key] = a sum over lanes that halve; a lane takes ``each`` consecutive items of every lanes * each.

    A lane is one chain, or adds its steps' dot products (a product, then FMAs) in turn if ``dots``. ``part`` is
    (lanes + 1, CHUNK) of scratch.
    """
    lanes = part.shape[0] - 1
    dot = part[lanes]
    for first in range(0, end, CHUNK):
        count = min(CHUNK, end - first)
        for lane in range(lanes):
            total = part[lane][:count]
            total[:] = _ZERO
            for start in range(lane * each, q.size, lanes * each):
                last = min(start + each, q.size)
                if not dots:
                    for d in range(start, last):
                        add_scaled(q[d], keys[d][first : first + count], total)
                    continue
                column = keys[start][first : first + count]
                for i in range(count):
                    dot[i] = q[start] * column[i]
                for d in range(start + 1, last):
                    add_scaled(q[d], keys[d][first : first + count], dot[:count])
                for i in range(count):
                    total[i] = total[i] + dot[i]
        halve(part, lanes, count)
        for i in range(count):
            out[first + i] = part[0][i]


@inner
def halve(part: Any, lanes: Any, count: Any) -> Any:
    """part[0] = the rows 0 to lanes - 1 added lane by lane: half of them apart, then a quarter, down to 1."""
    apart = lanes // 2
    while apart:
        for lane in range(apart):
            low, high = part[lane], part[lane + apart]
            for i in range(count):
                low[i] = low[i] + high[i]
        apart //= 2


@inner
def halved(numbers: Any, lanes: Any) -> Any:
    """The first ``lanes`` numbers added as lanes that halve; they are overwritten."""
    apart = lanes // 2
    while apart:
        for lane in range(apart):
            numbers[lane] = numbers[lane] + numbers[lane + apart]
        apart //= 2
    return numbers[0]
