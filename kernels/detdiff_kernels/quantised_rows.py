"""Rows quantised to 8 bits in blocks of 32, as ggml's CUDA and CPU code do it before a product of whole numbers.

q8_1             d = max / 127, codes x / d to nearest, halves away from zero; half(d) and half(sum of x), which
                 is summed by halving 16, 8, 4, 2, 1. CUDA ``quantize_q8_1``.
q8_1_tile        codes x * (127 / max), d = 1 / (127 / max); fours are summed in order, then by halving. CUDA
                 ``quantize_mmq_q8_1``; q8_1_tile_float keeps d in float32.
q8_0             d = max / 127, codes x * (127 / max) to nearest even; half(d), and half(d * sum of codes) as
                 Q8_1 blocks have it. x86 ``quantize_row_q8_0`` and ``ggml_quantize_mat_q8_0_4x8``, which agree.

From https://github.com/ggml-org/llama.cpp, ggml/src/ggml-cuda/quantize.cu at 000f462, ggml/src/ggml-cpu/arch/x86/quants.c
and repack.cpp at 0f2d806 (read). What conversion makes of numbers that do not fit is the processor's: CUDA saturates and
takes NaN for 0, x86 takes all of them for -128 (inferred). ggml compiles for CUDA with fast math, whose division can be
off by a bit; here it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import boolean, float32, intp, types, void

from .compiled import Loop, compiled
from .rounding import Float32, rounded

_IN = types.Array(float32, 1, "C", readonly=True)
_OUT = types.Array(float32, 1, "C")


@dataclass(frozen=True, eq=False)
class Quantised:
    """Codes float32 (m, k), and of each 32 the scale and the sum, float32 (m, k / 32)."""

    codes: Float32
    scale: Float32
    total: Float32


def quantised(x: Float32, how: str) -> Quantised:
    """Contiguous rows (m, k) in blocks; k is a multiple of 32."""
    m, k = x.shape
    found = Quantised(*(np.empty((m, size), np.float32) for size in (k, k // 32, k // 32)))
    flat = [array.reshape(-1) for array in (x, found.codes, found.scale, found.total)]
    if how == "q8_0":
        _cpu_loop()(*flat, m * (k // 32))
    else:
        _cuda_loop()(*flat, m * (k // 32), how != "q8_1")
    scale = found.scale if how == "q8_1_tile_float" else rounded(found.scale, "float16")
    return Quantised(found.codes, scale, rounded(found.total, "float16"))


@cache
def _cuda_loop() -> Loop:
    def quantise_cuda(x: Any, codes: Any, scale: Any, total: Any, blocks: int, tile: bool) -> None:
        zero, half, one, top = np.float32(0), np.float32(0.5), np.float32(1), np.float32(127)
        sums = np.empty(32, np.float32)
        for block in range(blocks):
            first = block * 32
            most = np.float32(np.nan)
            for i in range(first, first + 32):
                size = abs(x[i])
                # As fmaxf: a NaN loses against any number.
                if size > most or most != most:
                    most = size
            inverse = top / most if most != zero else np.float32(np.inf)
            if tile:
                d = one / inverse if inverse != zero else np.float32(np.inf)
            else:
                d = most / top
            scale[block] = d
            for i in range(first, first + 32):
                if tile:
                    value = x[i] * inverse
                elif most == zero:
                    value = zero
                else:
                    value = x[i] / d if d != zero else x[i] * np.float32(np.inf)
                size = np.floor(abs(value))
                if abs(value) - size >= half:
                    size += one
                signed = size if value > zero else -size
                codes[i] = zero if value != value else min(max(signed, -top - one), top)
                sums[i - first] = x[i]
            width = 16
            if tile:
                for i in range(8):
                    sums[i] = ((sums[4 * i] + sums[4 * i + 1]) + sums[4 * i + 2]) + sums[4 * i + 3]
                width = 4
            while width:
                for i in range(width):
                    sums[i] = sums[i] + sums[i + width]
                width //= 2
            total[block] = sums[0]

    return compiled(quantise_cuda, [void(_IN, _OUT, _OUT, _OUT, intp, boolean)])


@cache
def _cpu_loop() -> Loop:
    def quantise_cpu(x: Any, codes: Any, scale: Any, total: Any, blocks: int) -> None:
        zero, top, shift = np.float32(0), np.float32(127), np.float32(12582912)
        least, limit = np.float32(-128), np.float32(2147483648)
        largest = np.empty(8, np.float32)
        for block in range(blocks):
            first = block * 32
            for lane in range(8):
                largest[lane] = abs(x[first + lane])
                for i in range(first + lane + 8, first + 32, 8):
                    # As maxps: where one is a NaN, the second is taken.
                    if not largest[lane] > abs(x[i]):
                        largest[lane] = abs(x[i])
            for lane in range(4):
                if largest[lane + 4] > largest[lane]:
                    largest[lane] = largest[lane + 4]
            for lane in range(2):
                if not largest[lane] > largest[lane + 2]:
                    largest[lane] = largest[lane + 2]
            most = largest[0] if largest[0] > largest[1] else largest[1]
            d = most / top
            inverse = top / most if most != zero else zero
            scale[block] = d
            count = zero
            for i in range(first, first + 32):
                value = x[i] * inverse
                # Adding 1.5 * 2^23 leaves no room for a fraction.
                near = (value + shift) - shift
                # What int32 cannot hold becomes its least number; packing to 8 bits saturates. Only a NaN in the block
                # leaves a maximum that is too small.
                codes[i] = min(max(near, least), top) if abs(value) < limit else least
                count += codes[i]
            total[block] = d * count

    return compiled(quantise_cpu, [void(_IN, _OUT, _OUT, _OUT, intp)])
