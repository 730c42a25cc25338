"""The scalar arithmetic of the truth tests, against exact fractions, and the packer against MLX."""

from __future__ import annotations

import struct
from fractions import Fraction

import harness
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Distance of neighbours at the bottom, digits, and the largest number plus half a step.
FORMATS = {
    "float32": (Fraction(1, 2**149), 24, Fraction(2**128 - 2**103)),
    "float16": (Fraction(1, 2**24), 11, Fraction(2**16 - 2**4)),
    "bfloat16": (Fraction(1, 2**133), 8, Fraction(2**128 - 2**119)),
}


def nearest(exact: Fraction, dtype: str) -> float:
    """``exact`` rounded to nearest, ties to even, by the definition of the format."""
    least, digits, limit = FORMATS[dtype]
    if abs(exact) >= limit:
        return float("inf") if exact > 0 else float("-inf")
    step = least
    while abs(exact) >= step * 2**digits:
        step *= 2
    return float(round(exact / step) * step)


def same(got: float, expected: float) -> bool:
    return struct.pack("d", got + 0.0) == struct.pack("d", expected + 0.0)


@given(FINITE, FINITE, FINITE)
def test_the_scalar_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert same(harness.fma(a, b, c), nearest(exact, "float32"))


@given(FINITE, FINITE)
def test_scalar_sums_and_products_round_once(a: float, b: float) -> None:
    assert same(harness.add(a, b), nearest(Fraction(a) + Fraction(b), "float32"))
    assert same(harness.mul(a, b), nearest(Fraction(a) * Fraction(b), "float32"))


@pytest.mark.parametrize("dtype", harness.DTYPES)
@given(st.one_of(FINITE, st.floats(-70000, 70000, width=32), st.floats(-(2.0**-13), 2.0**-13, width=32)))
def test_scalar_rounding_is_to_nearest_even(dtype: str, value: float) -> None:
    assert same(harness.ROUND[dtype](value), nearest(Fraction(value), dtype))


@pytest.mark.parametrize("dtype", harness.DTYPES)
@given(FINITE, FINITE, FINITE)
def test_a_product_and_a_sum_in_a_dtype_round_once(dtype: str, a: float, b: float, c: float) -> None:
    a, b, c = (harness.ROUND[dtype](value) for value in (a, b, c))
    if np.isfinite([a, b, c]).all():
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        assert same(harness.fma_in(a, b, c, dtype), nearest(exact, dtype))


@pytest.mark.parametrize("dtype", harness.DTYPES)
@given(st.integers(1, 120), st.sampled_from([-1, 1]))
def test_the_smallest_sum_breaks_a_tie(dtype: str, power: int, sign: int) -> None:
    a, b = 1.5, 1 + 2.0 ** (1 - FORMATS[dtype][1])
    c = harness.ROUND[dtype](sign * 2.0**-power)
    assert same(harness.fma_in(a, b, c, dtype), nearest(Fraction(a) * Fraction(b) + Fraction(c), dtype))


@pytest.mark.parametrize("bits", harness.BITS)
def test_codes_are_packed_as_mlx_unpacks_them(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 128))
    ones, zeros = np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)
    weight = harness.affine(codes, ones, zeros, bits)
    found = mx.dequantize(mx.array(weight.packed), mx.array(ones), mx.array(zeros), 64, bits)
    assert (np.array(found) == codes).all()
