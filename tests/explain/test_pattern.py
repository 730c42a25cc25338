"""Which rows an operation gets wrong: every pattern with a twin in which one row does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detdiff.explain.origins import RowPlace, pattern_of

PLAIN = RowPlace(row=0, tokens=12, rows=36, padded=False, chunk=1, phase="prefill")
DECODE = RowPlace(row=0, tokens=1, rows=3, padded=False, chunk=0, phase="decode")


@pytest.mark.parametrize(
    ("hit", "free", "words"),
    [
        ([replace(PLAIN, row=1)], [PLAIN], "only rows from 1 on (every such row)"),
        (
            [DECODE],
            [replace(DECODE, tokens=12)],
            "only where a forward has one token a row (T = 1) (every such row)",
        ),
        ([replace(PLAIN, padded=True)], [PLAIN], "only padded rows (every such row)"),
        ([replace(PLAIN, chunk=2)], [PLAIN], "only from the second prefill chunk on (every such row)"),
        ([replace(PLAIN, rows=2), replace(PLAIN, rows=7)], [PLAIN], "only M from 2 to 7 (every such row)"),
        ([replace(PLAIN, rows=2)], [PLAIN], "only M = 2 (every such row)"),
    ],
)
def test_a_pattern_is_named_and_is_none_where_a_spared_row_fits_it(
    hit: list[RowPlace], free: list[RowPlace], words: str
) -> None:
    assert pattern_of(hit, free) == words
    twin = pattern_of(hit, [*free, *hit])
    assert "every" not in twin and f"{len(hit)} of {2 * len(hit)} such rows" in twin


def test_rows_from_1_on_of_one_token_are_both() -> None:
    hit = [replace(DECODE, row=row) for row in (1, 2)]
    found = pattern_of(hit, [DECODE, PLAIN, replace(PLAIN, row=1)])
    assert found.startswith("only rows from 1 on, only where a forward has one token a row (T = 1)")
    assert found.endswith("(every such row)")


def test_without_a_pattern_the_rows_are_counted() -> None:
    assert (
        pattern_of([PLAIN], [PLAIN, PLAIN])
        == "1 of 3 rows with equal inputs, in no pattern of rows, lengths or chunks"
    )


def test_a_hit_that_does_not_fit_ends_a_pattern() -> None:
    hit = [replace(PLAIN, row=1), PLAIN]
    assert "rows from 1 on" not in pattern_of(hit, [PLAIN])


def test_no_row_is_no_pattern() -> None:
    assert pattern_of([], [PLAIN]) == ""
