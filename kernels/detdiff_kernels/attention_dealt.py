"""Compiled attention over blocks of keys dealt to simdgroups; see ``attention_order.Dealt``."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from .attention_order import AttentionShape, Dealt, Operands
from .attention_rows import CHUNK, attended, halve, halved, lane_scores, place, row_loop
from .compiled import Loop
from .scalar_math import LOWEST, divide, exp_fast, fma, maximum, rounded
from .threads import share

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_MASKED = np.float32(-np.inf)
_FLOOR = np.float32(LOWEST / np.float32(2.0))
_ITEMS = 4


class _DealtNumbers(NamedTuple):
    block: int
    workgroups: int
    simdgroups: int
    teams: int
    scale: float


_KINDS = tuple(types.float64 if name == "scale" else types.int64 for name in _DealtNumbers._fields)


def attend(order: Dealt, shape: AttentionShape, operands: Operands, scale: np.float32) -> None:
    """Fills ``operands.out``; query, keys and values are rounded already."""
    numbers = _DealtNumbers(
        block=order.block,
        workgroups=order.workgroups,
        simdgroups=order.simdgroups(shape.offset + shape.keys),
        teams=order.teams(shape.width),
        scale=float(scale),
    )
    loop = _loop()
    share(lambda first, last: loop(shape, operands, numbers, first, last), operands.q.shape[0], operands.cost)


@cache
def _loop() -> Loop:
    def dealt_loop(shape: Any, operands: Any, order: Any, first: int, last: int) -> None:
        block, teams, width = order.block, order.teams, shape.value_width
        groups = order.simdgroups
        slots = order.workgroups * groups
        scale = np.float32(order.scale)
        bias = np.empty(shape.keys, np.float32)
        scores = np.empty(shape.keys, np.float32)
        part = np.empty((32 // teams + 1, CHUNK), np.float32)
        most = np.empty(slots, np.float32)
        total = np.empty(slots, np.float32)
        output = np.empty((slots, width), np.float32)
        weights = np.empty(block, np.float32)
        numbers = np.empty(max(block, order.workgroups), np.float32)
        team_output = np.empty((teams, width), np.float32)
        joined = np.empty((order.workgroups, width), np.float32)
        blocks = -(-(shape.offset + shape.keys) // block)
        for row in range(first, last):
            batch, head, query, kv = place(shape, row)
            out = operands.out[row]
            end, found = attended(shape, operands.mask, batch, head, query, bias)
            if not found:
                out[:] = _ZERO
                continue
            lane_scores(operands.q[row], operands.keys[kv], end, scores, _ITEMS, True, part)
            values = operands.values[kv]
            most[:] = _FLOOR
            total[:] = _ZERO
            output[:] = _ZERO
            for number in range(blocks):
                start = max(number * block - shape.offset, 0)
                stop = min((number + 1) * block - shape.offset, end)
                shift = shape.offset - number * block
                slot = number % slots
                weights[:] = _ZERO
                before = most[slot]
                larger = before
                some = False
                for key in range(start, stop):
                    if bias[key] != _MASKED:
                        some = True
                        score = fma(scores[key], scale, bias[key])
                        weights[key + shift] = score
                        larger = maximum(larger, score)
                if not some:
                    continue
                for key in range(start, stop):
                    if bias[key] != _MASKED:
                        weights[key + shift] = exp_fast(weights[key + shift] - larger)
                factor = exp_fast(before - larger)
                numbers[:block] = weights
                most[slot] = larger
                total[slot] = fma(total[slot], factor, halved(numbers, block))
                team_output[:] = _ZERO
                for key in range(start, stop):
                    if bias[key] != _MASKED:
                        weight, value = weights[key + shift], values[key]
                        sum_of = team_output[(key + shift) % teams]
                        for i in range(width):
                            sum_of[i] = fma(value[i], weight, sum_of[i])
                halve(team_output, teams, width)
                sum_of, step = output[slot], team_output[0]
                for i in range(width):
                    sum_of[i] = sum_of[i] * factor + step[i]
            if operands.sinks.size:
                before, sink = most[0], operands.sinks[head]
                most[0] = maximum(before, sink)
                factor = exp_fast(before - most[0])
                total[0] = fma(total[0], factor, exp_fast(sink - most[0]))
                sum_of = output[0]
                for i in range(width):
                    sum_of[i] = sum_of[i] * factor
            apart = groups // 2
            while apart:
                for slot in range(slots):
                    if slot % groups < apart:
                        other = slot + apart
                        larger = maximum(most[slot], most[other])
                        factor = exp_fast(most[slot] - larger)
                        weight = exp_fast(most[other] - larger)
                        most[slot] = larger
                        total[slot] = fma(total[slot], factor, total[other] * weight)
                        sum_of, step = output[slot], output[other]
                        for i in range(width):
                            sum_of[i] = fma(sum_of[i], factor, step[i] * weight)
                apart //= 2
            larger = most[0]
            for workgroup in range(1, order.workgroups):
                larger = maximum(larger, most[workgroup * groups])
            for workgroup in range(order.workgroups):
                slot = workgroup * groups
                factor = exp_fast(most[slot] - larger)
                numbers[workgroup] = total[slot] * factor
                sum_of, step = joined[workgroup], output[slot]
                for i in range(width):
                    sum_of[i] = step[i] * factor
            whole = halved(numbers, order.workgroups)
            halve(joined, order.workgroups, width)
            inverse = _ZERO if whole == _ZERO else divide(_ONE, whole)
            for i in range(width):
                out[i] = rounded(joined[0, i] * inverse, shape.dtype)

    return row_loop(dealt_loop, _DealtNumbers, _KINDS)
