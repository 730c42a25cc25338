"""Rounding arrays to half precision, against scalars and at every place where the result could change."""

from __future__ import annotations

import harness
import numpy as np
import pytest
from harness import Float32, differing
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from detdiff_kernels.rounding import narrow, rounded, widen

HALVES = ["float16", "bfloat16"]
BITS = np.arange(1 << 16, dtype=np.uint16)


def from_bits(bits: NDArray[np.uint16], dtype: str) -> Float32:
    """The values of bit patterns, by way of NumPy's float16 or of the upper half of a float32."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return np.ascontiguousarray(np.stack([np.zeros_like(bits), bits], axis=1)).view(np.float32)[:, 0]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_survives(dtype: str) -> None:
    values = from_bits(BITS, dtype)
    assert differing(rounded(values, dtype), values) == 0
    bits = narrow(values, dtype).view(np.uint16)
    number = ~np.isnan(values)
    assert (bits[number] == BITS[number]).all()
    assert differing(widen(narrow(values, dtype), dtype), values) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_between_neighbours_the_nearest_is_taken_and_ties_go_to_even(dtype: str) -> None:
    """The middle of every two neighbours, what lies next to it, and what lies next to every value."""
    values = from_bits(BITS, dtype)
    values = np.sort(values[np.isfinite(values)])
    middles = (values[:-1].astype(np.float64) + values[1:]) / 2
    places = np.concatenate([values, middles.astype(np.float32)])
    with np.errstate(over="ignore", under="ignore"):
        beyond = [np.nextafter(places, np.float32(to)) for to in (-np.inf, np.inf)]
    for found in (places, *beyond):
        expected = [harness.ROUND[dtype](value) for value in found.tolist()]
        assert differing(rounded(found, dtype), np.array(expected, np.float32)) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_too_large_becomes_infinite_and_nan_stays(dtype: str) -> None:
    largest = np.float32(3.4028235e38)
    values = np.array([largest, -largest, np.inf, -np.inf, np.nan, -0.0], np.float32)
    expected = np.array([np.inf, -np.inf, np.inf, -np.inf, np.nan, -0.0], np.float32)
    assert differing(rounded(values, dtype), expected) == 0


def test_nans_whose_payload_is_low_stay_nans() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    found = rounded(bits.view(np.float32), "bfloat16")
    assert np.isnan(found).all()
    assert (np.signbit(found) == [False, True, False, True]).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_any_values(values: list[float]) -> None:
    array = np.array(values, np.float32)
    for dtype in harness.DTYPES:
        assert differing(rounded(array, dtype), harness.rounded(array, dtype)) == 0
