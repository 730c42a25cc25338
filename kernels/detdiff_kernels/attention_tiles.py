"""Compiled attention over tiles of consecutive keys; see ``attention_order.Tiles``."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .attention_order import AttentionShape, Operands, Tiles
from .attention_rows import add_values, attended, chain_scores, halved, place, row_loop
from .compiled import Loop, inner
from .rounding import DTYPES
from .scalar_math import LOG2E, divide, exp, exp2, exp_fast, fma, log, maximum, rounded
from .threads import share

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_MASKED = np.float32(-np.inf)
_SCALES = ("query", "score", "exponent", "fused")
_QUERY, _SCORE, _EXPONENT, _FUSED = range(4)
_SUMS = ("eights", "pairs", "quads")
_EIGHTS, _PAIRS, _QUADS = range(3)
_HALF = DTYPES.index("float16")
# FlashAttention's joining kernel has 128 threads; the rows that it takes leave so many of them to the splits.
_THREADS = 128


class _TileNumbers(NamedTuple):
    tile: int
    scale: int
    sums: int
    two: int
    descending: int
    weights: int
    accumulator: int
    reciprocal: int
    sinks_last: int
    splits: int
    lanes: int
    floor: float
    factor: float
    softmax_scale: float


_FLOATS = ("floor", "factor", "softmax_scale")
_KINDS = tuple(types.float64 if name in _FLOATS else types.int64 for name in _TileNumbers._fields)


def attend(order: Tiles, shape: AttentionShape, operands: Operands, scale: np.float32, splits: int) -> None:
    """Fills ``operands.out``; the query is rounded, or scaled, as the order says."""
    bfloat16 = shape.dtype == DTYPES.index("bfloat16")
    factor = scale
    if order.scale == "score":
        factor = scale * np.float32(1.4426950408889634)
    elif order.scale == "exponent":
        factor = np.float32(float(scale) * 1.4426950408889634)
    numbers = _TileNumbers(
        tile=order.size(shape.width),
        scale=_SCALES.index(order.scale),
        sums=_SUMS.index(order.sums),
        two=int(order.base == "2"),
        descending=int(order.descending),
        weights=shape.dtype if order.weights == "dtype" else 0,
        accumulator=_HALF if order.half_output and bfloat16 else 0,
        reciprocal=int(order.divide == "reciprocal"),
        sinks_last=int(order.sinks == "last"),
        splits=splits,
        lanes=_lanes(shape.value_width, splits),
        floor=order.floor,
        factor=float(factor),
        softmax_scale=float(scale),
    )
    loop = _loop()
    share(lambda first, last: loop(shape, operands, numbers, first, last), operands.q.shape[0], operands.cost)


def _lanes(width: int, splits: int) -> int:
    """Lanes over which the sum of the splits' weights halves."""
    rows = 4 if width % 128 == 0 else 8 if width % 64 == 0 else 16
    most = 2
    while most < splits:
        most *= 2
    return min(_THREADS // rows, most)


@inner
def _score(order: Any, score: Any, added: Any) -> Any:
    """A score with its scale and its mask; ``added`` is +0.0 where there is no float mask."""
    factor = np.float32(order.factor)
    if order.scale == _FUSED:
        return fma(score, factor, added)
    if order.scale == _SCORE:
        score = score * factor
    if added == _ZERO:
        return score
    if order.scale == _EXPONENT:
        return score + divide(added, np.float32(order.softmax_scale))
    return fma(LOG2E, added, score)


@inner
def _weigh(order: Any, weights: Any, largest: Any) -> Any:
    """Turns the scores in ``weights`` into weights; the masked ones, -inf, into +0.0."""
    if order.scale == _EXPONENT:
        factor = np.float32(order.factor)
        shift = _ZERO if largest == _MASKED else largest * factor
        for i in range(weights.size):
            weights[i] = _ZERO if weights[i] == _MASKED else exp2(fma(weights[i], factor, -shift))
    elif order.two:
        for i in range(weights.size):
            weights[i] = _ZERO if weights[i] == _MASKED else exp2(weights[i] - largest)
    else:
        for i in range(weights.size):
            weights[i] = _ZERO if weights[i] == _MASKED else exp_fast(weights[i] - largest)


@inner
def _rescale(order: Any, before: Any, largest: Any) -> Any:
    """What sums and outputs are multiplied by when the maximum grows."""
    if order.scale == _EXPONENT:
        current = _ZERO if largest == _MASKED else largest
        return exp2((before - current) * np.float32(order.factor))
    return exp2(before - largest) if order.two else exp_fast(before - largest)


@inner
def _tile_sum(order: Any, weights: Any, numbers: Any) -> Any:
    if order.sums == _EIGHTS:
        total = _ZERO
        for i in range(0, weights.size, 8):
            low = (weights[i] + weights[i + 1]) + (weights[i + 2] + weights[i + 3])
            high = (weights[i + 4] + weights[i + 5]) + (weights[i + 6] + weights[i + 7])
            total = total + (low + high)
        return total
    for i in range(weights.size // 2):
        numbers[i] = weights[2 * i] + weights[2 * i + 1]
    return halved(numbers, weights.size // 2)


@inner
def _join(order: Any, output: Any, lse: Any, numbers: Any, joined: Any) -> Any:
    """Splits become one row, by the exponentials of their log-sum-exp."""
    largest = lse[0]
    for split in range(1, order.splits):
        largest = maximum(largest, lse[split])
    largest = _ZERO if largest == _MASKED else largest
    numbers[: order.lanes] = _ZERO
    for split in range(order.splits):
        lane = split % order.lanes
        numbers[lane] = numbers[lane] + exp(lse[split] - largest)
    total = halved(numbers, order.lanes)
    inverse = divide(_ONE, total) if total > _ZERO else _ZERO
    joined[:] = _ZERO
    for split in range(order.splits):
        weight = exp(lse[split] - largest) * inverse
        part = output[split]
        for i in range(joined.size):
            joined[i] = fma(weight, part[i], joined[i])


@cache
def _loop() -> Loop:
    def tile_loop(shape: Any, operands: Any, order: Any, first: int, last: int) -> None:
        tile, width = order.tile, shape.value_width
        bias = np.empty(shape.keys, np.float32)
        scores = np.empty(shape.keys, np.float32)
        weights = np.empty(tile, np.float32)
        numbers = np.empty(max(tile, order.lanes), np.float32)
        quads = np.empty(4, np.float32)
        output = np.empty((order.splits, width), np.float32)
        lse = np.empty(order.splits, np.float32)
        joined = np.empty(width, np.float32)
        tiles = -(-(shape.offset + shape.keys) // tile)
        tiles_of_a_split = -(-tiles // order.splits)
        for row in range(first, last):
            batch, head, query, kv = place(shape, row)
            out = operands.out[row]
            end, found = attended(shape, operands.mask, batch, head, query, bias)
            if not found:
                out[:] = _ZERO
                continue
            chain_scores(operands.q[row], operands.keys[kv], end, scores)
            for key in range(end):
                added = bias[key]
                scores[key] = _MASKED if added == _MASKED else _score(order, scores[key], added)
            values = operands.values[kv]
            for split in range(order.splits):
                sum_of = output[split]
                sum_of[:] = _ZERO
                quads[:] = _ZERO
                total = _ZERO
                largest = np.float32(order.floor)
                if operands.sinks.size and not order.sinks_last:
                    largest = operands.sinks[head]
                    total = _ONE
                first_tile = split * tiles_of_a_split
                last_tile = min(first_tile + tiles_of_a_split, tiles)
                for step in range(last_tile - first_tile):
                    number = last_tile - 1 - step if order.descending else first_tile + step
                    start = max(number * tile - shape.offset, 0)
                    stop = min((number + 1) * tile - shape.offset, end)
                    shift = shape.offset - number * tile
                    weights[:] = _MASKED
                    before = largest
                    kept = 0
                    for key in range(start, stop):
                        if bias[key] != _MASKED:
                            kept += 1
                            weights[key + shift] = scores[key]
                            largest = maximum(largest, scores[key])
                    if not kept:
                        continue
                    factor = _rescale(order, before, largest)
                    _weigh(order, weights, largest)
                    if order.sums == _QUADS:
                        for quad in range(4):
                            quads[quad] = quads[quad] * factor
                        for i in range(tile):
                            quad = i % 8 // 2
                            quads[quad] = quads[quad] + weights[i]
                    else:
                        total = fma(total, factor, _tile_sum(order, weights, numbers))
                    if order.weights:
                        for i in range(tile):
                            weights[i] = rounded(weights[i], order.weights)
                    for i in range(width):
                        sum_of[i] = rounded(sum_of[i] * factor, order.accumulator)
                    if kept == stop - start and not order.accumulator:
                        add_values(weights[start + shift : stop + shift], values[start:stop], sum_of)
                        continue
                    for key in range(start, stop):
                        if bias[key] != _MASKED:
                            weight, value = weights[key + shift], values[key]
                            for i in range(width):
                                sum_of[i] = fma(weight, value[i], sum_of[i])
                        if order.accumulator and ((key + shift) % 8 == 7 or key == stop - 1):
                            for i in range(width):
                                sum_of[i] = rounded(sum_of[i], order.accumulator)
                if order.sums == _QUADS:
                    total = (quads[0] + quads[2]) + (quads[1] + quads[3])
                if operands.sinks.size and order.sinks_last:
                    sink = operands.sinks[head]
                    before = largest
                    largest = maximum(largest, sink)
                    factor = _rescale(order, before, largest)
                    total = fma(total, factor, exp_fast(sink - largest))
                    for i in range(width):
                        sum_of[i] = rounded(sum_of[i] * factor, order.accumulator)
                inverse = _ZERO if total == _ZERO else divide(_ONE, total)
                for i in range(width):
                    sum_of[i] = sum_of[i] * inverse if order.reciprocal else divide(sum_of[i], total)
                empty = total == _ZERO or total != total
                scale = np.float32(order.softmax_scale)
                lse[split] = _MASKED if empty else fma(largest, scale, log(total))
            if order.splits > 1:
                _join(order, output, lse, numbers, joined)
            else:
                for i in range(width):
                    joined[i] = output[0][i]
            for i in range(width):
                out[i] = rounded(joined[i], shape.dtype)

    return row_loop(tile_loop, _TileNumbers, _KINDS)
