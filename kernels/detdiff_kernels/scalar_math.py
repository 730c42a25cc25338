"""Scalar operations for compiled loops whose bits depend on no library: FMA, powers, a logarithm, roundings.

Only code compiled by numba may call them. Nothing here is flagged fastmath, so LLVM may run several side by side in
a vector, with the same bits, but may not regroup them. Powers and the logarithm are float64 polynomials of explicit
FMAs, rounded once to float32: within 0.500001 of a unit in the last place, and the same on every machine.
"""

from __future__ import annotations

from math import factorial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiled import inner

LOG2E = np.float32(1.4426950408889634)
LOWEST = np.float32(-3.4028234663852886e38)

_LN2 = 0.6931471805599453
_LOG2E_DOUBLE = 1.4426950408889634
# Adding it leaves an integer in the low bits of a float64 and rounds to nearest even on the way.
_SHIFT = 1.5 * 2.0**52
_SHIFT_BITS = 0x4338000000000000

# 2**r = sum of (r ln 2)**i / i!; 14 terms reach 4e-18 where |r| <= 1/2. Each is one rounded division of rounded
# numbers, so that the tests can say them again.
_EXP2 = tuple(_LN2**i / factorial(i) for i in range(14))
# log m = 2 s (1 + s**2 / 3 + s**4 / 5 + ...) with s = (m - 1) / (m + 1); |s| <= 0.172 for m within sqrt(2).
_LOG = tuple(1.0 / (2 * i + 1) for i in range(12))


def _operation(typing: Any) -> Any:
    return intrinsic(typing)


@_operation
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``fma(a, b, c)``: a times b plus c, rounded once; all float32 or all float64."""
    if a not in (types.float32, types.float64) or not a == b == c:
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = values[0].type
        name = "llvm.fma.f32" if a == types.float32 else "llvm.fma.f64"
        called = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(kind, [kind] * 3))
        return builder.call(called, values)

    return a(a, a, a), generate


@_operation
def divide(typing: Any, a: Any, b: Any) -> Any:
    """``divide(a, b)``: a over b for float32, also where b is zero, which numba's own operator refuses."""
    if a != types.float32 or b != types.float32:
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fdiv(*values)

    return a(a, b), generate


def _same_bits(source: Any, target: Any, kind: Any) -> Any:
    def typing(context: Any, value: Any) -> Any:
        if value != source:
            return None

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], kind)

        return target(source), generate

    return intrinsic(typing)


_bits_of_float = _same_bits(types.float32, types.uint32, ir.IntType(32))
_float_of_bits = _same_bits(types.uint32, types.float32, ir.FloatType())
_bits_of_double = _same_bits(types.float64, types.int64, ir.IntType(64))
_double_of_bits = _same_bits(types.int64, types.float64, ir.DoubleType())


@inner
def _power(x: Any) -> Any:
    """2**x for a float64 x, as a float64."""
    inside = x if x > -200.0 else -200.0
    inside = inside if inside < 200.0 else 200.0
    shifted = inside + _SHIFT
    r = inside - (shifted - _SHIFT)
    total = _EXP2[13]
    total = fma(total, r, _EXP2[12])
    total = fma(total, r, _EXP2[11])
    total = fma(total, r, _EXP2[10])
    total = fma(total, r, _EXP2[9])
    total = fma(total, r, _EXP2[8])
    total = fma(total, r, _EXP2[7])
    total = fma(total, r, _EXP2[6])
    total = fma(total, r, _EXP2[5])
    total = fma(total, r, _EXP2[4])
    total = fma(total, r, _EXP2[3])
    total = fma(total, r, _EXP2[2])
    total = fma(total, r, _EXP2[1])
    total = fma(total, r, _EXP2[0])
    whole = _bits_of_double(shifted) - np.int64(_SHIFT_BITS)
    scaled = total * _double_of_bits((whole + np.int64(1023)) << np.int64(52))
    return scaled if x == x else x


@inner
def exp2(x: Any) -> Any:
    """2**x of a float32, to nearest even; subnormals are kept."""
    return np.float32(_power(np.float64(x)))


@inner
def exp_fast(x: Any) -> Any:
    """e**x as GPUs compute it in haste: 2**x of x times log2 e, the product rounded to float32 first."""
    return np.float32(_power(np.float64(x * LOG2E)))


@inner
def exp(x: Any) -> Any:
    """e**x of a float32, to nearest even."""
    return np.float32(_power(np.float64(x) * _LOG2E_DOUBLE))


@inner
def log(x: Any) -> Any:
    """The natural logarithm of a float32, to nearest even; NaN below zero."""
    if not x > np.float32(0.0):
        return np.float32(-np.inf) if x == np.float32(0.0) else np.float32(np.nan)
    if x == np.float32(np.inf):
        return x
    bits = _bits_of_double(np.float64(x))
    power = (bits >> np.int64(52)) - np.int64(1023)
    m = _double_of_bits((bits & np.int64(0xFFFFFFFFFFFFF)) | np.int64(0x3FF0000000000000))
    if m > 1.4142135623730951:
        m = m * 0.5
        power += np.int64(1)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    total = _LOG[11]
    for i in range(10, -1, -1):
        total = fma(total, square, _LOG[i])
    return np.float32(fma(np.float64(power), _LN2, 2.0 * s * total))


@inner
def maximum(a: Any, b: Any) -> Any:
    """The larger of two float32 values; a NaN counts as missing."""
    larger = a if a > b else b
    return larger if b == b else a


@inner
def rounded(x: Any, dtype: Any) -> Any:
    """A float32 rounded to nearest even to the dtype of that number in ``rounding.DTYPES``, as a float32."""
    if dtype == 0:
        return x
    bits = _bits_of_float(x)
    sign = bits & np.uint32(0x80000000)
    size = bits & np.uint32(0x7FFFFFFF)
    if dtype == 1:
        near = (size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
        # From 65520 on, half way to the number behind the largest one, the result is infinite.
        near = near if size < np.uint32(0x477FF000) else np.uint32(0x7F800000)
        # Below 2**-14 all float16 numbers are 2**-24 apart, as the float32 numbers from 1/2 to 1 are nearly.
        small = _bits_of_float((_float_of_bits(np.uint32(size)) + np.float32(0.5)) - np.float32(0.5))
        near = near if size >= np.uint32(0x38800000) else small
    else:
        near = (size + np.uint32(0x7FFF) + ((size >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return _float_of_bits(np.uint32(sign | near)) if x == x else x
