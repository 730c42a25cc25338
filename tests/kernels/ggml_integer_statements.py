"""ggml's kernels over inputs of 8 bits, said one scalar operation at a time: CUDA's MMVQ and MMQ, and repacked CPU weights.

Sums of codes are Python integers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from ggml_statements import Block, Row, half, q4_k_scales, q6_k_codes
from harness import add, f16, f32, fma, mul, tree

Rounding = Callable[[float], float]


class Inputs:
    """A block of 32 inputs: codes, scale and sum."""

    def __init__(self, codes: list[int], d: float, s: float) -> None:
        self.codes, self.d, self.s = codes, d, s


def away(value: float) -> float:
    """roundf."""
    if not math.isfinite(value):
        return value
    return math.copysign(math.floor(abs(value) + 0.5), value)


def even(value: float) -> float:
    return float(round(value)) if math.isfinite(value) else value


def divided(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a)
    return f32(a / b)


def saturated(value: float) -> int:
    """What CUDA makes of a float that it converts to 8 bits."""
    return 0 if value != value else int(min(max(value, -128.0), 127.0))


def largest(x: Row) -> float:
    """fmaxf of all sizes: a NaN only where there is nothing else."""
    sizes = [abs(one) for one in x if one == one]
    return max(sizes) if sizes else math.nan


def cuda_inputs(x: Row, *, rounding: Rounding = away) -> list[Inputs]:
    """quantize_q8_1."""
    found = []
    for at in range(0, len(x), 32):
        block = x[at : at + 32]
        amax = largest(block)
        d = f32(amax / 127)
        codes = [0 if amax == 0 else saturated(rounding(divided(one, d))) for one in block]
        found.append(Inputs(codes, f16(d), f16(tree(block))))
    return found


def cuda_tile_inputs(x: Row, *, float_scale: bool, rounding: Rounding = away) -> list[Inputs]:
    """quantize_mmq_q8_1 with the layouts DS4 and D4."""
    found = []
    for at in range(0, len(x), 32):
        block = x[at : at + 32]
        inverse = divided(127.0, largest(block))
        codes = [saturated(rounding(mul(one, inverse))) for one in block]
        fours = [add(add(add(*block[i : i + 2]), block[i + 2]), block[i + 3]) for i in range(0, 32, 4)]
        d = divided(1.0, inverse)
        found.append(Inputs(codes, d if float_scale else f16(d), f16(tree(fours))))
    return found


def maxps(a: float, b: float) -> float:
    return a if a > b else b


def cpu_inputs(x: Row, *, rounding: Rounding = even) -> list[Inputs]:
    """quantize_row_q8_0 and ggml_quantize_mat_q8_0_4x8 with AVX2; the sum is that of quantize_row_q8_1."""
    found = []
    for at in range(0, len(x), 32):
        block = x[at : at + 32]
        lanes = [abs(one) for one in block[:8]]
        for far in (8, 16, 24):
            lanes = [maxps(lane, abs(one)) for lane, one in zip(lanes, block[far : far + 8], strict=True)]
        four = [maxps(high, low) for low, high in zip(lanes[:4], lanes[4:], strict=True)]
        two = [maxps(four[0], four[2]), maxps(four[1], four[3])]
        top = maxps(two[0], two[1])
        d = f32(top / 127)
        inverse = 0.0 if top == 0 else divided(127.0, top)
        codes = []
        for one in block:
            value = rounding(mul(one, inverse))
            # A number that int32 cannot hold becomes its least, and the least of 8 bits when packed.
            codes.append(min(max(int(value), -128), 127) if abs(value) < 2**31 else -128)
        found.append(Inputs(codes, f16(d), f16(mul(d, float(sum(codes))))))
    return found


def product(a: list[int], b: list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def warps_for(m: int) -> int:
    return 4 if m <= 4 else 2 if m <= 8 else 1


def thread_sums(count: int, threads: int, steps: int, one: Callable[[int, int, float], float]) -> Row:
    """What every thread has in the end: ``one(block, place, total)`` for its blocks; ``threads`` a block."""
    sums = []
    for tid in range(count):
        total = 0.0
        for block in range(tid // threads, steps, count // threads):
            total = one(block, tid % threads, total)
        sums.append(total)
    return sums


def warp_sum(sums: Row) -> float:
    lanes = sums[:32]
    for first in range(32, len(sums), 32):
        lanes = [add(lane, other) for lane, other in zip(lanes, sums[first : first + 32], strict=True)]
    return tree(lanes)


def small_mmvq(kind: str, x: list[Inputs], blocks: list[Block], *, warps: int) -> float:
    """vec_dot_q4_0, q4_1 and q8_0 with q8_1; "wide" is q8_1 with q8_1."""

    def nibbles(at: int, place: int, total: float) -> float:
        low = slice(8 * place, 8 * place + 8)
        high = slice(16 + 8 * place, 24 + 8 * place)
        w, y = blocks[at], x[at]
        sumi = product(w.codes[low], y.codes[low]) + product(w.codes[high], y.codes[high])
        if kind == "Q4_0":
            return fma(w.d, fma(sumi, y.d, -mul(4.0, y.s)), total)
        return add(total, fma(sumi, f16(mul(w.d, y.d)), f16(mul(w.m, y.s)) / 2))

    def bytes_of(at: int, place: int, total: float) -> float:
        part = slice(8 * place, 8 * place + 8)
        w, y = blocks[at], x[at]
        sumi = product(w.codes[part], y.codes[part])
        if kind == "Q8_0":
            return fma(mul(w.d, y.d), sumi, total)
        return add(total, fma(sumi, f16(mul(w.d, y.d)), f16(mul(w.m, y.s)) / 4))

    threads, one = (2, nibbles) if kind in ("Q4_0", "Q4_1") else (4, bytes_of)
    return warp_sum(thread_sums(32 * warps, threads, len(blocks), one))


def q4_k_mmvq(x: list[Inputs], row: bytes, *, warps: int) -> float:
    def one(at: int, place: int, total: float) -> float:
        block = row[144 * at : 144 * at + 144]
        scales, minima = q4_k_scales(block)
        offset = 2 * (place // 4)
        u = v = 0.0
        for i in range(2):
            y = x[8 * at + offset + i]
            first = 4 * (place % 4)
            dot = codes = 0
            for start in (first, first + 16):
                for item in range(start, start + 4):
                    byte = block[16 + 16 * offset + item]
                    dot += (byte >> 4 * i & 15) * y.codes[item]
                    codes += y.codes[item]
            u = fma(y.d, dot * scales[offset + i], u)
            v = fma(y.d, codes * minima[offset + i], v)
        return add(total, fma(half(block, 0), u, -mul(half(block, 2), v)))

    return warp_sum(thread_sums(32 * warps, 16, len(row) // 144, one))


def q6_k_mmvq(x: list[Inputs], row: bytes, *, warps: int) -> float:
    def one(at: int, place: int, total: float) -> float:
        block = row[210 * at : 210 * at + 210]
        offset = 4 * (place // 16) + place % 16 // 8
        scale_at = 8 * (place // 16) + place % 16 // 4
        shift = 2 * (place % 16 // 8)
        u = 0.0
        for i in range(2):
            y, dot = x[8 * at + offset + 2 * i], 0
            for byte in range(4):
                low = block[4 * place + byte] >> 4 * i & 15
                high = block[128 + 4 * (8 * (place // 16) + place % 8) + byte] >> shift >> 4 * i & 3
                dot += ((high << 4 | low) - 32) * y.codes[4 * (place % 8) + byte]
            (scale,) = struct.unpack_from("b", block, 192 + scale_at + 4 * i)
            u = fma(y.d, dot * scale, u)
        return fma(half(block, 208), u, total)

    return warp_sum(thread_sums(32 * warps, 32, len(row) // 210, one))


def small_mmq(kind: str, x: list[Inputs], blocks: list[Block]) -> float:
    """vec_dot_q8_0_q8_1_mma for Q4_0 and Q8_0, vec_dot_q8_1_q8_1_mma for codes with a minimum."""
    total = 0.0
    for y, w in zip(x, blocks, strict=True):
        if kind in ("Q4_0", "Q8_0"):
            codes = [code - 8 for code in w.codes] if kind == "Q4_0" else w.codes
            total = fma(mul(product(codes, y.codes), w.d), y.d, total)
        else:
            total = fma(mul(w.d, y.d), product(w.codes, y.codes), total)
            total = fma(w.m, y.s, total)
    return total


def q4_k_mmq(x: list[Inputs], row: bytes) -> float:
    total = 0.0
    for nth, y in enumerate(x):
        block = row[nth // 8 * 144 :][:144]
        sub = nth % 8
        scales, minima = q4_k_scales(block)
        d, m = f16(mul(half(block, 0), scales[sub])), f16(mul(-half(block, 2), minima[sub]))
        codes = [byte >> 4 * (sub % 2) & 15 for byte in block[16 + sub // 2 * 32 :][:32]]
        total = fma(mul(d, y.d), product(codes, y.codes), total)
        total = fma(m, y.s, total)
    return total


def q6_k_mmq(x: list[Inputs], row: bytes) -> float:
    total = 0.0
    for tile in range(len(x) // 4):
        block = row[tile // 2 * 210 :][:210]
        codes, scales = q6_k_codes(block), struct.unpack_from("16b", block, 192)
        u = 0.0
        for nth in range(4):
            y, sub = x[4 * tile + nth], tile % 2 * 4 + nth
            at = 32 * sub
            first = product(codes[at : at + 16], y.codes[:16]) * scales[2 * sub]
            second = product(codes[at + 16 : at + 32], y.codes[16:]) * scales[2 * sub + 1]
            u = fma(first + second, y.d, u)
        total = fma(u, half(block, 208), total)
    return total


def repacked(kind: str, x: list[Inputs], blocks: list[Block]) -> float:
    """gemv_q4_b32_8x8_q8_0_lut_avx and its gemm; with a minimum as for Q8_1 inputs."""
    total = 0.0
    for y, w in zip(x, blocks, strict=True):
        codes = [code - 8 for code in w.codes] if kind == "Q4_0" else w.codes
        total = fma(product(codes, y.codes), mul(w.d, y.d), total)
        if kind not in ("Q4_0", "Q8_0"):
            total = fma(w.m, y.s, total)
    return total
