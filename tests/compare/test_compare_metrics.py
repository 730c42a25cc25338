"""ULPs, KL and the rest against plain statements of the same thing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff.compare import Values, kl_divergence, measure, ulp_distance

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def f32(*numbers: float | np.float32) -> Values:
    return Values(np.array(numbers, np.float32), "F32")


def bf16(*words: int) -> Values:
    return Values(np.array(words, np.uint16), "BF16")


@given(FINITE, st.integers(0, 200))
def test_ulps_count_steps_to_the_next_number(start: float, steps: int) -> None:
    here = there = np.float32(start)
    with np.errstate(over="ignore"):  # the step from the largest number to infinity
        for _ in range(steps):
            there = np.nextafter(there, np.float32(math.inf), dtype=np.float32)
    if np.isfinite(there):
        # -0.0 and 0.0 are one number with two patterns.
        assert int(ulp_distance(f32(here), f32(there))[0]) == steps


@given(FINITE, FINITE)
def test_ulps_are_symmetric_and_zero_only_for_equal_numbers(a: float, b: float) -> None:
    there, back = ulp_distance(f32(a), f32(b)), ulp_distance(f32(b), f32(a))
    assert there[0] == back[0] and (there[0] == 0) == (a == b)


def test_ulps_by_dtype() -> None:
    one, next_one = 0x3F80, 0x3F81
    assert ulp_distance(bf16(one), bf16(next_one)).tolist() == [1]
    assert ulp_distance(bf16(0x8001), bf16(0x0001)).tolist() == [2]
    halves = [Values(np.array([x], np.float16), "F16") for x in (1.0, 1.0009765625)]
    assert ulp_distance(*halves).tolist() == [1]
    doubles = [Values(np.array([x]), "F64") for x in (-math.inf, math.inf)]
    assert ulp_distance(*doubles).tolist() == [2 * 0x7FF0000000000000]


@pytest.mark.parametrize(
    "pair", [(f32(1), bf16(1)), (f32(1), f32(1, 2)), (Values(np.array([1], np.uint32), "U32"),) * 2]
)
def test_ulps_need_one_float_dtype_and_size(pair: tuple[Values, Values]) -> None:
    with pytest.raises(ValueError, match="ULPs need"):
        ulp_distance(*pair)


def test_the_histogram_holds_every_differing_element_once() -> None:
    a = np.ones(9, np.float32)
    b = a.copy()
    b.view(np.uint32)[:8] += np.array([0, 1, 1, 2, 3, 4, 5, 1000], np.uint32)
    found = measure(f32(*a), f32(*b))
    buckets = [(u.first, u.last, u.count) for u in found.ulp_histogram]
    assert buckets == [(1, 1, 2), (2, 2, 1), (3, 4, 2), (5, 8, 1), (513, 1024, 1)]
    assert found.differing == 7 and (found.max_ulp, found.worst) == (1000, 7)


def test_what_is_not_finite_is_counted_apart() -> None:
    found = measure(f32(math.nan, math.inf, -math.inf, 1), f32(math.nan, 1, -math.inf, 1))
    assert (found.nan_a, found.nan_b, found.inf_a, found.inf_b, found.non_finite) == (1, 1, 2, 1, 3)
    assert (found.differing, found.max_ulp, found.max_abs) == (1, 0, 0.0)
    nothing = measure(f32(math.nan), f32(1))
    assert (nothing.max_ulp, nothing.max_abs, nothing.cosine, nothing.differing) == (None, None, None, 1)


def test_relative_and_cosine() -> None:
    found = measure(f32(1, 2, 0), f32(1, 4, 0))
    assert (found.max_abs, found.max_rel, found.worst) == (2.0, 0.5, 1)
    assert found.cosine == pytest.approx(9 / math.sqrt(5 * 17), abs=1e-15)
    assert measure(f32(0), f32(0)).cosine is None


def test_kl_against_the_definition() -> None:
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.25, 0.25, 0.5])
    expected = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    # Softmax forgets a constant, so shifted logits give the same.
    assert kl_divergence(np.log(p) + 7, np.log(q) - 3) == pytest.approx(expected, abs=1e-15)
    assert kl_divergence(np.array([1e4, 0.0]), np.array([1e4, 0.0])) == 0.0
    assert measure(f32(1, 2), f32(1, 2)).kl is None
    assert measure(f32(1, 2), f32(1, 2), logits=True).kl == 0.0
