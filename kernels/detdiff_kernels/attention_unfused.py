"""Compiled attention in operations of their own; see ``attention_order.Unfused``."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .attention_order import AttentionShape, Operands, Unfused
from .attention_rows import add_scaled, add_values, attended, chain_scores, halved, place, row_loop
from .compiled import Loop, inner
from .scalar_math import LOWEST, divide, exp_fast, maximum, rounded
from .threads import share

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_MASKED = np.float32(-np.inf)
_READS = 4
_SIMD = 32


class _UnfusedNumbers(NamedTuple):
    threads: int


def attend(order: Unfused, shape: AttentionShape, operands: Operands) -> None:
    """Fills ``operands.out``; the query is scaled already."""
    numbers = _UnfusedNumbers(threads=order.round // _READS)
    loop = _loop()
    share(lambda first, last: loop(shape, operands, numbers, first, last), operands.q.shape[0], operands.cost)


@inner
def _quad(i: Any, start: Any, sink: Any) -> Any:
    """Which four positions the i-th score is among: a sink is position 0, the others follow the offset."""
    return 0 if i < sink else (start + i) // _READS


@inner
def _one_round(scores: Any, start: Any, sink: Any, sums: Any, groups: Any) -> Any:
    """The softmax of at most one round: the maximum and one over the sum; masked scores are -inf."""
    largest = LOWEST
    for i in range(scores.size):
        largest = maximum(largest, scores[i])
    sums[:] = _ZERO
    for i in range(scores.size):
        if scores[i] != _MASKED:
            thread = _quad(i, start, sink)
            sums[thread] = sums[thread] + exp_fast(scores[i] - largest)
    for group in range(groups.size):
        groups[group] = halved(sums[group * _SIMD :], _SIMD)
    return largest, divide(_ONE, halved(groups, groups.size))


@inner
def _rounds(scores: Any, start: Any, sink: Any, sums: Any, groups: Any, most: Any) -> Any:
    """The softmax of several rounds: each thread has a maximum of its own until the end."""
    sums[:] = _ZERO
    most[:] = LOWEST
    low = 0
    while low < scores.size:
        quad = _quad(low, start, sink)
        thread = quad % sums.size
        before = most[thread]
        high = low
        while high < scores.size and _quad(high, start, sink) == quad:
            most[thread] = maximum(most[thread], scores[high])
            high += 1
        sums[thread] = sums[thread] * exp_fast(before - most[thread])
        for i in range(low, high):
            if scores[i] != _MASKED:
                sums[thread] = sums[thread] + exp_fast(scores[i] - most[thread])
        low = high
    largest = LOWEST
    for thread in range(sums.size):
        largest = maximum(largest, most[thread])
    for group in range(groups.size):
        base = group * _SIMD
        larger = most[base]
        for thread in range(base + 1, base + _SIMD):
            larger = maximum(larger, most[thread])
        for thread in range(base, base + _SIMD):
            sums[thread] = sums[thread] * exp_fast(most[thread] - larger)
        groups[group] = halved(sums[base:], _SIMD) * exp_fast(larger - largest)
    return largest, divide(_ONE, halved(groups, groups.size))


@cache
def _loop() -> Loop:
    def unfused_loop(shape: Any, operands: Any, order: Any, first: int, last: int) -> None:
        threads, dtype = order.threads, shape.dtype
        sink = min(operands.sinks.size, 1)
        bias = np.empty(shape.keys, np.float32)
        scores = np.empty(sink + shape.keys, np.float32)
        sums = np.empty(threads, np.float32)
        most = np.empty(threads, np.float32)
        groups = np.empty(threads // _SIMD, np.float32)
        for row in range(first, last):
            batch, head, query, kv = place(shape, row)
            out = operands.out[row]
            end, found = attended(shape, operands.mask, batch, head, query, bias)
            out[:] = _ZERO
            if not found:
                continue
            # The sink stands in front of all positions, the offset's too.
            chain_scores(operands.q[row], operands.keys[kv], end, scores[sink:])
            for key in range(end):
                added = bias[key]
                score = rounded(scores[sink + key], dtype)
                scores[sink + key] = _MASKED if added == _MASKED else rounded(score + added, dtype)
            start = shape.offset
            if sink:
                scores[0] = operands.sinks[head]
            several = sink + start + shape.keys > threads * _READS
            used = scores[: sink + end]
            if several:
                largest, inverse = _rounds(used, start, sink, sums, groups, most)
            else:
                largest, inverse = _one_round(used, start, sink, sums, groups)
            values = operands.values[kv]
            weights = scores[sink : sink + end]
            kept = 0
            for key in range(end):
                kept += bias[key] != _MASKED
                weights[key] = rounded(exp_fast(weights[key] - largest) * inverse, dtype)
            if kept == end:
                add_values(weights, values, out)
            else:
                for key in range(end):
                    if bias[key] != _MASKED:
                        add_scaled(weights[key], values[key], out)
            for i in range(out.size):
                out[i] = rounded(out[i], dtype)

    return row_loop(unfused_loop, _UnfusedNumbers, (types.int64,))
