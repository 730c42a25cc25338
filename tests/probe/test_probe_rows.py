"""Numbers of rows as they are asked for, and which rows are kept while others are replaced."""

from __future__ import annotations

from itertools import permutations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff.errors import ProbeRowsInvalid
from detdiff.probe import probe
from detdiff.probe.sweep import kept_rows, row_counts


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("1..4", (1, 2, 3, 4)),
        ("4", (1, 4)),
        ("3..4, 16", (1, 3, 4, 16)),
        ("8,2,2", (1, 2, 8)),
        ([2, 5], (1, 2, 5)),
        (range(1, 4), (1, 2, 3)),
    ],
)
def test_rows_are_ascending_and_start_with_one(asked: str | list[int], found: tuple[int, ...]) -> None:
    assert row_counts(asked) == found


@pytest.mark.parametrize(
    "asked",
    ["", "0..4", "4..2", "1..", "..4", "a", "1", "1..9000", "1..300", "-3", "²", [0], [True, 2], [1.5]],
)
def test_rows_that_are_none_are_refused(asked: str | list[int]) -> None:
    with pytest.raises(ProbeRowsInvalid, match=r"1\.\.8,16,32"):
        row_counts(asked)


@pytest.mark.parametrize("seeds", [-1, 0, 1, 1001])
def test_one_seed_certifies_nothing(seeds: int) -> None:
    with pytest.raises(ProbeRowsInvalid, match="2 to 1000"):
        probe("linear:4,4,float32", on="numpy", seeds=seeds)


@given(st.integers(2, 40))
def test_any_row_is_once_kept_while_any_other_is_replaced(rows: int) -> None:
    masks = kept_rows(rows)
    for kept, replaced in permutations(range(rows), 2):
        assert any(mask[kept] and not mask[replaced] for mask in masks)
    # As few trials as can be (Sperner): one fewer has too few subsets of which none holds another.
    assert len(masks) == 2 or comb(len(masks) - 1, (len(masks) - 1) // 2) < rows


def test_one_row_has_no_neighbours() -> None:
    assert kept_rows(1) == []
    assert [mask.tolist() for mask in kept_rows(2)] == [[True, False], [False, True]]
    assert np.array(kept_rows(64)).shape == (8, 64)
