"""The least number that works, and by how few trials it is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff.reduce.search import least_number


@given(st.integers(-3, 40), st.integers(0, 300), st.integers(0, 300))
def test_it_is_found_where_all_larger_numbers_work(low: int, size: int, at: int) -> None:
    high, threshold = low + size, low + min(at, size)
    asked: list[int] = []

    def works(n: int) -> bool:
        asked.append(n)
        return n >= threshold

    assert least_number(low, high, works) == threshold
    assert len(set(asked)) == len(asked) and all(low <= n < high for n in asked)
    assert len(asked) <= 2 * (size + 1).bit_length()


@given(st.sets(st.integers(0, 60)), st.integers(1, 60))
def test_what_it_gives_works_in_any_case(working: set[int], high: int) -> None:
    found = least_number(0, high, lambda n: n in working)
    assert found == high or found in working


@pytest.mark.parametrize("high", [1, 2, 200])
def test_the_first_trial_is_the_cheapest(high: int) -> None:
    asked: list[int] = []
    assert least_number(0, high, lambda n: not asked.append(n)) == 0  # type: ignore[func-returns-value]
    assert asked == [0]
