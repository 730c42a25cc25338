"""Attention in tiles, said one operation at a time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from attention_numbers import (
    LOG2E,
    LOWEST,
    ONE,
    ZERO,
    Number,
    Row,
    chain,
    exp,
    exp2,
    exp_fast,
    fma,
    largest,
    log,
    to_dtype,
    tree,
)


@dataclass(frozen=True)
class Tiles:
    tile: Callable[[int], int]
    scale: str
    sums: str
    two: bool = True
    descending: bool = False
    query_half: Callable[[str], bool] = lambda dtype: False
    round_weights: bool = False
    half_output: bool = False
    reciprocal: bool = True
    floor: Number = LOWEST
    sink: str = "first"
    splits: Callable[[Row, int], int] = lambda row, tile: 1
    weigh: Callable[[Number], Number] | None = None

    def row(self, row: Row) -> list[Number]:
        q = row.q
        if self.scale == "query":
            factor = to_dtype(row.scale * LOG2E, row.dtype)
            q = [to_dtype(factor * item, row.dtype) for item in q]
        elif self.query_half(row.dtype):
            q = [to_dtype(item, "float16") for item in q]
        tile = self.tile(len(q))
        scores = {key: self._score(row, chain(q, row.keys[key]), row.added(key)) for key in row.used}
        tiles = -(-row.positions // tile)
        splits = self.splits(row, tile)
        each = -(-tiles // splits)
        parts = [
            self._split(row, scores, tile, range(split * each, min((split + 1) * each, tiles)))
            for split in range(splits)
        ]
        if splits == 1:
            return [to_dtype(item, row.dtype) for item in parts[0][0]]
        return [to_dtype(item, row.dtype) for item in join_splits(parts)]

    def _score(self, row: Row, score: Number, added: Number) -> Number:
        if self.scale == "fused":
            return fma(score, row.scale, added)
        if self.scale == "exponent":
            return score + added / row.scale if added != 0 else score
        if self.scale == "score":
            score = score * (row.scale * LOG2E)
        return fma(LOG2E, added, score) if added != 0 else score

    def _split(
        self, row: Row, scores: dict[int, Number], tile: int, tiles: range
    ) -> tuple[list[Number], Number]:
        power = self.weigh or (exp2 if self.two else exp_fast)
        c = Number(float(row.scale) * math.log2(math.e))
        output = [ZERO] * len(row.values[0])
        held = "float16" if self.half_output and row.dtype == "bfloat16" else "float32"
        most, total, quads = self.floor, ZERO, [ZERO] * 4
        if row.sink is not None and self.sink == "first":
            most, total = LOG2E * row.sink, ONE
        for number in reversed(tiles) if self.descending else tiles:
            here = [key for key in row.used if (key + row.offset) // tile == number]
            if not here:
                continue
            before, most = most, largest([most, *(scores[key] for key in here)])
            weights = [ZERO] * tile
            for key in here:
                place = (key + row.offset) % tile
                if self.scale == "exponent":
                    shift = ZERO if most == -np.inf else most * c
                    weights[place] = power(fma(scores[key], c, -shift))
                else:
                    weights[place] = power(scores[key] - most)
            if self.scale == "exponent":
                factor = power((before - (ZERO if most == -np.inf else most)) * c)
            else:
                factor = power(before - most)
            if self.sums == "quads":
                quads = [quad * factor for quad in quads]
                for place, weight in enumerate(weights):
                    quads[place % 8 // 2] = quads[place % 8 // 2] + weight
            else:
                total = fma(total, factor, self._sum(weights))
            if self.round_weights:
                weights = [to_dtype(weight, row.dtype) for weight in weights]
            output = [to_dtype(item * factor, held) for item in output]
            for eight in range(0, tile, 8):
                for key in here:
                    place = (key + row.offset) % tile
                    if eight <= place < eight + 8:
                        output = [
                            fma(weights[place], v, o) for v, o in zip(row.values[key], output, strict=True)
                        ]
                output = [to_dtype(item, held) for item in output]
        if self.sums == "quads":
            total = (quads[0] + quads[2]) + (quads[1] + quads[3])
        if row.sink is not None and self.sink == "last":
            before, most = most, largest([most, row.sink])
            factor = power(before - most)
            total = fma(total, factor, power(row.sink - most))
            output = [to_dtype(item * factor, held) for item in output]
        if self.reciprocal:
            inverse = ZERO if total == 0 else ONE / total
            output = [item * inverse for item in output]
        else:
            output = [item / total for item in output]
        empty = total == 0 or np.isnan(total)
        return output, Number(-np.inf) if empty else fma(most, row.scale, log(total))

    def _sum(self, weights: list[Number]) -> Number:
        if self.sums == "pairs":
            return tree([weights[i] + weights[i + 1] for i in range(0, len(weights), 2)])
        if self.sums == "chain":
            return Number(np.add.accumulate(np.array(weights))[-1])
        total = ZERO
        for i in range(0, len(weights), 8):
            a, b, c, d, e, f, g, h = weights[i : i + 8]
            total = total + (((a + b) + (c + d)) + ((e + f) + (g + h)))
        return total


def join_splits(parts: list[tuple[list[Number], Number]]) -> list[Number]:
    width = len(parts[0][0])
    power = next(count for count in (2, 4, 8, 16, 32, 64, 128) if count >= len(parts))
    lanes = min(128 // (4 if width % 128 == 0 else 8 if width % 64 == 0 else 16), power)
    top = largest([lse for _, lse in parts])
    top = ZERO if top == -np.inf else top
    sums = [ZERO] * lanes
    for number, (_, lse) in enumerate(parts):
        sums[number % lanes] = sums[number % lanes] + exp(lse - top)
    whole = tree(sums)
    inverse = ONE / whole if whole > 0 else ZERO
    joined = [ZERO] * width
    for output, lse in parts:
        joined = [
            fma(exp(lse - top) * inverse, item, total) for item, total in zip(output, joined, strict=True)
        ]
    return joined


def flash_splits(row: Row, tile: int) -> int:
    heads, rows = row.heads, row.rows
    if rows == 1 and heads > row.kv_heads and len(row.q) % 8 == 0:
        heads, rows = row.kv_heads, heads // row.kv_heads
    jobs, tiles, units = row.batch * heads * -(-rows // 64), -(-row.positions // tile), 216
    if jobs >= 0.8 * units:
        return 1
    best, efficiency = 0.0, {}
    for splits in range(1, min(128, units, tiles) + 1):
        if splits > 1 and -(-tiles // splits) == -(-tiles // (splits - 1)):
            continue
        waves = Number(jobs * splits) / Number(units)
        efficiency[splits] = float(waves / np.ceil(waves))
        best = max(best, efficiency[splits])
    return min(splits for splits, reached in efficiency.items() if reached >= 0.85 * best)
