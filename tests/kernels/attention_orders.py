"""The orders of the attention kernels, said one operation at a time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from attention_numbers import (
    LOG2E,
    LOWEST,
    ONE,
    ZERO,
    Bias,
    Float32,
    Number,
    Row,
    chain,
    columns,
    exp2,
    exp_fast,
    fma,
    largest,
    to_dtype,
    tree,
)
from attention_tiles_statement import Tiles, flash_splits
from numpy.typing import NDArray


class Statement(Protocol):
    def row(self, row: Row) -> list[Number]: ...


@dataclass(frozen=True)
class Streams:
    blocks: int | None = 32
    in_block: int = 1
    two: bool = False
    double: bool = False
    floor: Number = LOWEST
    round_partials: bool = False
    chained: bool = False
    divide: str = "guarded"
    halving: bool = True
    weigh: Callable[[Number], Number] | None = None

    def row(self, row: Row) -> list[Number]:
        power = self.weigh or (exp2 if self.two else exp_fast)
        blocks = self.blocks or two_pass_blocks(row.shared, row.positions)
        scale = row.scale
        if self.two:
            scale = Number(float(scale) * math.log2(math.e)) if self.double else scale * LOG2E
        q = [scale * item for item in row.q]
        each = -(-len(q) // 32)
        count = blocks * self.in_block
        most, total = [self.floor] * count, [ZERO] * count
        output = [[ZERO] * len(row.values[0]) for _ in range(count)]
        if row.sink is not None:
            most[0] = Number(float(row.sink) * math.log2(math.e)) if self.two else row.sink
            total[0] = ONE
        for key in row.used:
            lanes = [
                chain(q[lane * each : (lane + 1) * each], row.keys[key][lane * each : (lane + 1) * each])
                for lane in range(32)
            ]
            score = tree(lanes)
            if row.masked:
                score = fma(LOG2E, row.added(key), score) if self.two else score + row.added(key)
            i = (key + row.offset) % count
            larger = largest([most[i], score])
            factor, weight = power(most[i] - larger), power(score - larger)
            most[i], total[i] = larger, fma(total[i], factor, weight)
            output[i] = [fma(o, factor, weight * v) for o, v in zip(output[i], row.values[key], strict=True)]
        if self.in_block > 1:
            most, total, output = self._blocks(most, total, output, power)
        top = largest(most)
        sums = [ZERO] * 32
        lane_output = [[ZERO] * len(row.values[0]) for _ in range(32)]
        for block in range(blocks):
            factor, lane = power(most[block] - top), block % 32
            part = output[block]
            if self.round_partials:
                part = [to_dtype(item, row.dtype) for item in part]
            if self.chained:
                sums[lane] = fma(factor, total[block], sums[lane])
                lane_output[lane] = [fma(factor, p, o) for p, o in zip(part, lane_output[lane], strict=True)]
            else:
                sums[lane], lane_output[lane] = factor * total[block], [factor * p for p in part]
        add = tree if self.halving else lambda numbers: Number(np.add.accumulate(np.array(numbers))[-1])
        whole, joined = add(sums), [add(column) for column in columns(lane_output)]
        if self.divide == "reciprocal":
            inverse = ZERO if whole == 0 else ONE / whole
            joined = [item * inverse for item in joined]
        elif self.divide == "quotient" or whole != 0:
            joined = [item / whole for item in joined]
        return [to_dtype(item, row.dtype) for item in joined]

    def _blocks(
        self,
        most: list[Number],
        total: list[Number],
        output: list[list[Number]],
        power: Callable[[Number], Number],
    ) -> tuple[list[Number], list[Number], list[list[Number]]]:
        tops, sums, outputs = [], [], []
        for start in range(0, len(most), self.in_block):
            inside = slice(start, start + self.in_block)
            top = largest([*most[inside], Number(-1e9)])
            factors = [power(item - top) for item in most[inside]]
            tops.append(top)
            sums.append(tree([item * factor for item, factor in zip(total[inside], factors, strict=True)]))
            rows = [[item * f for item in o] for o, f in zip(output[inside], factors, strict=True)]
            joined = rows[0]
            for other in rows[1:]:
                joined = [a + b for a, b in zip(joined, other, strict=True)]
            outputs.append(joined)
        return tops, sums, outputs


def two_pass_blocks(n: int, keys: int) -> int:
    if keys <= 1024 or n <= 4:
        return 64
    return 128 if keys <= 8192 else 256 if keys <= 32768 else 512 if keys <= 65536 else 1024


@dataclass(frozen=True)
class Dealt:
    block: int = 32
    workgroups: int = 32
    halving: bool = True
    half_query: bool = True

    def row(self, row: Row) -> list[Number]:
        teams = 1 if len(row.q) % 128 == 0 else 2 if len(row.q) % 64 == 0 else 4
        groups = 1 if row.positions <= 2048 else 2 if row.positions <= 4096 else 4

        def held(numbers: list[Number]) -> list[Number]:
            return [to_dtype(item, "float16") for item in numbers] if row.dtype == "bfloat16" else numbers

        q = [to_dtype(item, "float16") for item in row.q] if self.half_query else row.q
        slots = self.workgroups * groups
        most, total = [LOWEST / 2] * slots, [ZERO] * slots
        output = [[ZERO] * len(row.values[0]) for _ in range(slots)]
        for number in range(-(-row.positions // self.block)):
            here = [key for key in row.used if (key + row.offset) // self.block == number]
            if not here:
                continue
            scores = {
                key: fma(self._dot(q, held(row.keys[key]), 32 // teams), row.scale, row.added(key))
                for key in here
            }
            i = number % slots
            before, most[i] = most[i], largest([most[i], *scores.values()])
            weights = [ZERO] * self.block
            for key, score in scores.items():
                weights[(key + row.offset) % self.block] = exp_fast(score - most[i])
            factor = exp_fast(before - most[i])
            total[i] = fma(total[i], factor, tree(weights))
            team = [[ZERO] * len(row.values[0]) for _ in range(teams)]
            for key in here:
                place = (key + row.offset) % self.block
                team[place % teams] = [
                    fma(v, weights[place], o)
                    for v, o in zip(held(row.values[key]), team[place % teams], strict=True)
                ]
            step = [tree(column) for column in columns(team)]
            output[i] = [o * factor + s for o, s in zip(output[i], step, strict=True)]
        if row.sink is not None:
            before, most[0] = most[0], largest([most[0], row.sink])
            factor = exp_fast(before - most[0])
            total[0] = fma(total[0], factor, exp_fast(row.sink - most[0]))
            output[0] = [item * factor for item in output[0]]
        states = [
            self._pair_up([(most[i], total[i], output[i]) for i in range(w * groups, (w + 1) * groups)])
            for w in range(self.workgroups)
        ]
        top = largest([state[0] for state in states])
        factors = [exp_fast(state[0] - top) for state in states]
        add = tree if self.halving else lambda numbers: Number(np.add.accumulate(np.array(numbers))[-1])
        whole = add([state[1] * factor for state, factor in zip(states, factors, strict=True)])
        rows = [[item * f for item in state[2]] for state, f in zip(states, factors, strict=True)]
        inverse = ZERO if whole == 0 else ONE / whole
        return [to_dtype(add(column) * inverse, row.dtype) for column in columns(rows)]

    @staticmethod
    def _dot(q: list[Number], key: list[Number], lanes: int) -> Number:
        parts = [ZERO] * lanes
        for i in range(0, len(q), 4):
            dot = fma(
                q[i + 3], key[i + 3], fma(q[i + 2], key[i + 2], fma(q[i + 1], key[i + 1], q[i] * key[i]))
            )
            parts[i // 4 % lanes] = parts[i // 4 % lanes] + dot
        return tree(parts)

    @staticmethod
    def _pair_up(
        states: list[tuple[Number, Number, list[Number]]],
    ) -> tuple[Number, Number, list[Number]]:
        while len(states) > 1:
            half = len(states) // 2
            joined = []
            for (m0, s0, o0), (m1, s1, o1) in zip(states[:half], states[half:], strict=True):
                m = largest([m0, m1])
                f0, f1 = exp_fast(m0 - m), exp_fast(m1 - m)
                o = [fma(a, f0, b * f1) for a, b in zip(o0, o1, strict=True)]
                joined.append((m, fma(s0, f0, s1 * f1), o))
            states = joined
        return states[0]


@dataclass(frozen=True)
class Unfused:
    threads: int = 1024
    round_scores: bool = True
    round_weights: bool = True

    def row(self, row: Row) -> list[Number]:
        scale = to_dtype(row.scale, row.dtype)
        q = [to_dtype(scale * item, row.dtype) for item in row.q]
        front = 0 if row.sink is None else 1
        scores: dict[int, Number] = {} if row.sink is None else {0: row.sink}
        for key in row.used:
            score = chain(q, row.keys[key])
            if self.round_scores:
                score = to_dtype(to_dtype(score, row.dtype) + row.added(key), row.dtype)
            scores[front + row.offset + key] = score
        several = front + row.positions > 4 * self.threads
        top = largest([LOWEST, *scores.values()])
        inverse = ONE / (self._rounds(scores, top) if several else self._round(scores, top))
        output = [ZERO] * len(row.values[0])
        for key in row.used:
            weight = exp_fast(scores[front + row.offset + key] - top) * inverse
            weight = to_dtype(weight, row.dtype) if self.round_weights else weight
            output = [fma(weight, v, o) for v, o in zip(row.values[key], output, strict=True)]
        return [to_dtype(item, row.dtype) for item in output]

    def _round(self, scores: dict[int, Number], top: Number) -> Number:
        sums = [ZERO] * self.threads
        for position, score in scores.items():
            sums[position // 4] = sums[position // 4] + exp_fast(score - top)
        return tree([tree(sums[i : i + 32]) for i in range(0, self.threads, 32)])

    def _rounds(self, scores: dict[int, Number], top: Number) -> Number:
        sums, most = [ZERO] * self.threads, [LOWEST] * self.threads
        for quad in sorted({position // 4 for position in scores}):
            mine = [scores[position] for position in range(4 * quad, 4 * quad + 4) if position in scores]
            thread = quad % self.threads
            before, most[thread] = most[thread], largest([most[thread], *mine])
            sums[thread] = sums[thread] * exp_fast(before - most[thread])
            for score in mine:
                sums[thread] = sums[thread] + exp_fast(score - most[thread])
        groups = []
        for i in range(0, self.threads, 32):
            larger = largest(most[i : i + 32])
            lanes = [
                s * exp_fast(m - larger) for s, m in zip(sums[i : i + 32], most[i : i + 32], strict=True)
            ]
            groups.append(tree(lanes) * exp_fast(larger - top))
        return tree(groups)


STEEL = Tiles(lambda d: 32 if d < 128 else 16, "score", "eights", reciprocal=False)
FLASH = Tiles(
    lambda d: 256 if d <= 64 else 128 if d <= 128 else 64,
    "exponent",
    "quads",
    descending=True,
    round_weights=True,
    floor=Number(-np.inf),
    splits=flash_splits,
)


def _steel_query() -> Tiles:
    return replace(STEEL, scale="query")


def _fixed(tile: int) -> Tiles:
    return replace(FLASH, tile=lambda d: tile, descending=False, splits=lambda row, size: 1)


STATEMENTS: dict[str, Statement] = {
    "mlx-metal/sdpa_vector": Streams(),
    "mlx-metal/sdpa_vector_2pass": Streams(blocks=None, round_partials=True, chained=True),
    "mlx-metal/sdpa_vector_2pass-0.30.3": Streams(in_block=8),
    "mlx-metal/sdpa_steel": STEEL,
    "mlx-metal/sdpa_steel-0.30.6": _steel_query(),
    "mlx-metal/sdpa_unfused": Unfused(),
    "mlx-cuda/sdpa_vector": Streams(two=True, double=True, divide="reciprocal"),
    "mlx-cuda/sdpa_vector_2pass": Streams(in_block=8, two=True, divide="reciprocal"),
    "mlx-cuda/sdpa_unfused": Unfused(),
    "mlx-cuda/sdpa_cudnn": _fixed(128),
    "candle-metal/sdpa_vector": Streams(floor=Number(-np.inf), divide="quotient"),
    "candle-metal/sdpa_vector_2pass": Streams(in_block=8, floor=Number(-1e9), divide="quotient"),
    "candle-metal/sdpa_full": _steel_query(),
    "ggml-metal/flash_attn_vec": Dealt(),
    "ggml-metal/flash_attn": Tiles(
        lambda d: 64,
        "fused",
        "pairs",
        two=False,
        query_half=lambda dtype: dtype != "bfloat16",
        half_output=True,
        floor=LOWEST / 2,
        sink="last",
    ),
    "flash-split-kv/attention": FLASH,
    "batch-invariant/attention": _fixed(256),
}


@dataclass(frozen=True)
class Call:
    """Operands of a call, and how it is made."""

    q: Float32
    k: Float32
    v: Float32
    scale: float
    mask: str | NDArray[np.bool_] | Float32 | None = None
    dtype: str = "float32"
    offset: int = 0
    sinks: Float32 | None = None


def stated(order: Statement, call: Call) -> Float32:
    """What the order makes of a call, row by row."""
    batch, heads, rows, _ = call.q.shape
    out = np.zeros((batch, heads, rows, call.v.shape[3]), np.float32)
    with np.errstate(all="ignore"):
        for b, h, r in np.ndindex(batch, heads, rows):
            row = _row(call, b, h, r)
            if row.used:
                out[b, h, r] = order.row(row)
    return out


def _row(call: Call, b: int, h: int, r: int) -> Row:
    batch, heads, rows, _ = call.q.shape
    kv_heads, keys = call.k.shape[1:3]
    bias: Bias = [ZERO] * keys
    if isinstance(call.mask, str):
        bias = [ZERO if key <= keys - rows + r else None for key in range(keys)]
    elif call.mask is not None:
        lowest = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}.get(call.dtype, float(LOWEST))
        full = np.broadcast_to(call.mask, (batch, heads, rows, keys))[b, h, r]
        if full.dtype == np.bool_:
            bias = [ZERO if item else None for item in full]
        else:
            rounded = [to_dtype(Number(item), call.dtype) for item in full]
            bias = [item if item >= lowest else None for item in rounded]
    kv = h // (heads // kv_heads)
    return Row(
        q=list(call.q[b, h, r]),
        keys=[list(key) for key in call.k[b, kv]],
        values=[list(value) for value in call.v[b, kv]],
        bias=bias,
        sink=None if call.sinks is None else call.sinks[h],
        scale=Number(call.scale),
        dtype=call.dtype,
        offset=call.offset,
        heads=heads,
        kv_heads=kv_heads,
        rows=rows,
        batch=batch,
        masked=not (call.mask is None or isinstance(call.mask, str)),
    )
