from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from detdiff.explain.control import by_groups, smallest


@given(st.integers(1, 500), st.data())
def test_one_item_that_does_it_alone_is_found_in_two_trials_a_halving(n: int, data: st.DataObject) -> None:
    culprit = data.draw(st.integers(0, n - 1))
    trials = 0

    def works(some: Sequence[int]) -> bool:
        nonlocal trials
        trials += 1
        return culprit in some

    assert smallest(range(n), works) == [culprit]
    assert trials <= 2 * ceil(log2(n)) if n > 1 else trials == 0


@given(st.integers(2, 60), st.data())
def test_items_that_are_needed_together_are_all_kept(n: int, data: st.DataObject) -> None:
    needed = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=4))
    assert smallest(range(n), lambda some: needed <= set(some)) == sorted(needed)


@given(st.lists(st.sets(st.integers(0, 19), min_size=1, max_size=3), min_size=1, max_size=4))
def test_no_item_of_what_is_left_can_be_left_out(ways: list[set[int]]) -> None:
    def works(some: Sequence[int]) -> bool:
        return any(way <= set(some) for way in ways)

    found = smallest(range(20), works)
    assert works(found)
    assert not any(works([item for item in found if item != left]) for left in found)


def test_an_effect_that_more_items_undo_is_still_found() -> None:
    # Either 3 or 7 alone flips, both together do not: rounding is no friend of monotony.
    def works(some: Sequence[int]) -> bool:
        return len(some) == 10 or (3 in some) != (7 in some)

    assert smallest(range(10), works) in ([3], [7])


@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_groups_are_searched_before_their_items(forwards: int, sites: int, data: st.DataObject) -> None:
    items = [(f, s) for f in range(forwards) for s in range(sites)]
    culprit = data.draw(st.sampled_from(items))
    trials = 0

    def works(some: Sequence[tuple[int, int]]) -> bool:
        nonlocal trials
        trials += 1
        return culprit in some

    assert by_groups(items, (lambda item: item[0],), works) == [culprit]
    assert trials <= 2 * (ceil(log2(forwards)) + ceil(log2(sites)) if forwards * sites > 1 else 0) + 2
