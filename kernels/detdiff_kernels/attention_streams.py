"""Compiled attention over streams of keys; see ``attention_order.Streams``."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .attention_order import AttentionShape, Operands, Streams
from .attention_rows import CHUNK, add_scaled, attended, halve, halved, lane_scores, place, row_loop
from .compiled import Loop
from .scalar_math import LOG2E, divide, exp2, exp_fast, fma, maximum, rounded
from .threads import share

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
# The lanes behind a block's streams bring this maximum with them.
_NO_STREAM = np.float32(-1e9)


class _StreamNumbers(NamedTuple):
    blocks: int
    in_block: int
    lane_items: int
    two: int
    floor: float
    partials: int
    chained: int
    guarded: int
    reciprocal: int


_KINDS = tuple(types.float64 if name == "floor" else types.int64 for name in _StreamNumbers._fields)


def attend(order: Streams, shape: AttentionShape, operands: Operands, blocks: int) -> None:
    """Fills ``operands.out``; the query is multiplied by the scale already."""
    numbers = _StreamNumbers(
        blocks=blocks,
        in_block=order.in_block,
        lane_items=-(-shape.width // 32),
        two=int(order.base == "2"),
        floor=order.floor,
        partials=shape.dtype if order.partials == "dtype" else 0,
        chained=int(order.lanes == "fma"),
        guarded=int(order.divide == "guarded"),
        reciprocal=int(order.divide == "reciprocal"),
    )
    loop = _loop()
    share(lambda first, last: loop(shape, operands, numbers, first, last), operands.q.shape[0], operands.cost)


@cache
def _loop() -> Loop:
    def stream_loop(shape: Any, operands: Any, order: Any, first: int, last: int) -> None:
        lanes = np.int64(32)
        streams = order.blocks * order.in_block
        width = shape.value_width
        floor = np.float32(order.floor)
        bias = np.empty(shape.keys, np.float32)
        scores = np.empty(shape.keys, np.float32)
        part = np.empty((lanes + 1, CHUNK), np.float32)
        most = np.empty(streams, np.float32)
        total = np.empty(streams, np.float32)
        output = np.empty((streams, width), np.float32)
        sums = np.empty(lanes, np.float32)
        lane_output = np.empty((lanes, width), np.float32)
        factors = np.empty(order.in_block, np.float32)
        for row in range(first, last):
            batch, head, query, kv = place(shape, row)
            out = operands.out[row]
            end, found = attended(shape, operands.mask, batch, head, query, bias)
            if not found:
                out[:] = _ZERO
                continue
            lane_scores(operands.q[row], operands.keys[kv], end, scores, order.lane_items, False, part)
            most[:] = floor
            total[:] = _ZERO
            output[:] = _ZERO
            if operands.sinks.size:
                most[0] = operands.sinks[head]
                total[0] = _ONE
            masked = operands.mask.shape[3] > 0
            values = operands.values[kv]
            for key in range(end):
                added = bias[key]
                if added == np.float32(-np.inf):
                    continue
                score = scores[key]
                if masked:
                    score = fma(LOG2E, added, score) if order.two else score + added
                stream = (key + shape.offset) % streams
                larger = maximum(most[stream], score)
                if order.two:
                    factor = exp2(most[stream] - larger)
                    weight = exp2(score - larger)
                else:
                    factor = exp_fast(most[stream] - larger)
                    weight = exp_fast(score - larger)
                most[stream] = larger
                total[stream] = fma(total[stream], factor, weight)
                sum_of, value = output[stream], values[key]
                for i in range(width):
                    sum_of[i] = fma(sum_of[i], factor, weight * value[i])
            if order.in_block > 1:
                for block in range(order.blocks):
                    start = block * order.in_block
                    larger = _NO_STREAM
                    for stream in range(start, start + order.in_block):
                        larger = maximum(larger, most[stream])
                    for i in range(order.in_block):
                        apart = most[start + i] - larger
                        factors[i] = exp2(apart) if order.two else exp_fast(apart)
                        sums[i] = total[start + i] * factors[i]
                    most[block] = larger
                    total[block] = halved(sums, order.in_block)
                    joined = lane_output[0]
                    for i in range(order.in_block):
                        factor, sum_of = factors[i], output[start + i]
                        for d in range(width):
                            product = sum_of[d] * factor
                            joined[d] = product if i == 0 else joined[d] + product
                    for d in range(width):
                        output[block][d] = joined[d]
            largest = most[0]
            for block in range(1, order.blocks):
                largest = maximum(largest, most[block])
            sums[:] = _ZERO
            lane_output[:] = _ZERO
            for block in range(order.blocks):
                apart = most[block] - largest
                factor = exp2(apart) if order.two else exp_fast(apart)
                lane = block % lanes
                sum_of = output[block]
                if order.partials:
                    for i in range(width):
                        sum_of[i] = rounded(sum_of[i], order.partials)
                if order.chained:
                    sums[lane] = fma(factor, total[block], sums[lane])
                    add_scaled(factor, sum_of, lane_output[lane])
                else:
                    sums[lane] = factor * total[block]
                    into = lane_output[lane]
                    for i in range(width):
                        into[i] = factor * sum_of[i]
            whole = halved(sums, lanes)
            halve(lane_output, lanes, width)
            joined = lane_output[0]
            inverse = _ZERO if whole == _ZERO else divide(_ONE, whole)
            for i in range(width):
                if order.reciprocal:
                    result = joined[i] * inverse
                elif order.guarded and whole == _ZERO:
                    result = joined[i]
                else:
                    result = divide(joined[i], whole)
                out[i] = rounded(result, shape.dtype)

    return row_loop(stream_loop, _StreamNumbers, _KINDS)
