"""Each thing a probe looks for, injected: it must be named at exactly that M, position and seed, and nothing else."""

from __future__ import annotations

from itertools import count, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from injected import N, Rows, exact, injected, probed
from numpy.typing import NDArray

from detdiff.probe.sweep import ChangedRows

ALL = (0, 1, 2)
Outputs = NDArray[np.float64]


def test_a_sound_operation_is_one_class_and_nothing_is_found() -> None:
    found = probed(lambda x: exact(x).astype(np.float32))
    assert found.classes == (tuple(range(1, 10)),)
    assert found.invariant and found.bits_change_at == ()
    assert found.position == found.neighbours == found.repeat == ()
    assert all(one.equal and one.differing == 0 and one.max_ulp == 0 for one in found.against_one)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=7))
def test_the_classes_are_the_injected_ones_whatever_they_are(labels: list[int]) -> None:
    def fault(x: Rows, y: Outputs) -> None:
        y += labels[len(x) - 1]

    rows = range(1, len(labels) + 1)
    wanted = {frozenset(m for m in rows if labels[m - 1] == label) for label in labels}
    found = probed(injected(fault), f"1..{len(labels)}", seeds=2)
    assert set(map(frozenset, found.classes)) == wanted
    assert sorted(m for members in found.classes for m in members) == list(rows)
    assert found.bits_change_at == tuple(m for m in rows if m > 1 and labels[m - 1] != labels[m - 2])
    assert [one.rows for one in found.against_one if not one.equal] == [
        m for m in rows if labels[m - 1] != labels[0]
    ]
    assert found.position == found.neighbours == found.repeat == ()


def test_row_0_that_changes_from_3_rows_on_is_two_classes() -> None:
    def fault(x: Rows, y: Outputs) -> None:
        if len(x) >= 3:
            y[0, 1] = np.nextafter(np.float32(y[0, 1]), np.float32(np.inf))

    found = probed(injected(fault))
    assert found.classes == ((1, 2), (3, 4, 5, 6, 7, 8, 9)) and found.bits_change_at == (3,)
    assert not found.invariant
    three = found.against_one[1]
    assert (three.rows, three.differing, three.outputs, three.max_ulp, three.seeds) == (3, 3, 3 * N, 1, ALL)
    # Row 0 alone has the fault, so every other position differs from it.
    assert found.position[0] == ChangedRows(3, (1, 2), ALL)
    assert found.neighbours == found.repeat == ()


def test_a_last_row_that_is_wrong_at_some_m_is_named_by_its_position() -> None:
    def fault(x: Rows, y: Outputs) -> None:
        if len(x) % 4 == 1:
            y[-1] += 1

    found = probed(injected(fault))
    # Alone, row 0 is the last row.
    assert found.classes == ((1,), (2, 3, 4, 5, 6, 7, 8, 9))
    assert found.position == (ChangedRows(5, (4,), ALL), ChangedRows(9, (8,), ALL))
    assert found.neighbours == found.repeat == ()


@pytest.mark.parametrize(("reader", "read"), list(permutations(range(5), 2)))
def test_a_row_that_reads_one_other_row_is_named(reader: int, read: int) -> None:
    def fault(x: Rows, y: Outputs) -> None:
        if len(x) == 5:
            # Exact, and another number for every content.
            y[reader] += exact(x[read : read + 1])[0]

    found = probed(injected(fault), "1..6", seeds=2)
    assert [(one.rows, one.positions) for one in found.neighbours] == [(5, (reader,))]
    assert found.repeat == ()
    assert "neighbours" in found.notes[0]


def test_a_scale_taken_over_the_batch_reaches_every_row_and_no_position() -> None:
    def fault(x: Rows, y: Outputs) -> None:
        if len(x) == 4:
            y += np.abs(x).max()

    found = probed(injected(fault))
    assert found.neighbours == (ChangedRows(4, (0, 1, 2, 3), ALL),)
    assert found.position == found.repeat == ()


def test_a_row_that_differs_on_repeat_is_named() -> None:
    calls = count()

    def fault(x: Rows, y: Outputs) -> None:
        if len(x) == 6:
            y[2] += next(calls)

    found = probed(injected(fault))
    assert found.repeat == (ChangedRows(6, (2,), ALL),)
    assert "race" in found.notes[0] and not found.invariant


def test_the_sign_of_zero_and_the_dtype_are_bits() -> None:
    def negative_zero(x: Rows) -> NDArray[np.float32]:
        return np.full((len(x), 1), -0.0 if len(x) == 2 else 0.0, np.float32)

    def wider(x: Rows) -> NDArray[np.float64] | NDArray[np.float32]:
        return exact(x) if len(x) == 2 else exact(x).astype(np.float32)

    for operation in (negative_zero, wider):
        found = probed(operation, "1..3")
        assert found.classes == ((1, 3), (2,)) and found.bits_change_at == (2, 3)
    assert found.against_one[0].differing == 3 * N and found.against_one[0].max_ulp is None


def test_not_a_number_is_equal_to_itself_and_its_payload_is_bits() -> None:
    def payload(x: Rows) -> NDArray[np.float32]:
        return np.full((len(x), 1), 0x7FC00001 if len(x) == 2 else 0x7FC00000, np.uint32).view(np.float32)

    assert probed(payload, "1..3").classes == ((1, 3), (2,))


def test_a_repeat_of_another_dtype_is_other_bits() -> None:
    calls = count()

    def zeros(x: Rows) -> NDArray[np.float32] | NDArray[np.int32]:
        return np.zeros((len(x), 1), np.int32 if next(calls) >= 4 else np.float32)

    # Calls 0 and 1 are the first ones of M = 1 and 2; then all rows alike, and two with other neighbours.
    assert {one.rows for one in probed(zeros, "1..2", seeds=2).repeat} == {1, 2}


def _first_value(seed: int) -> float:
    """Row 0's first value with this seed, as an operation sees it."""
    seen: list[float] = []

    def look(x: Rows) -> NDArray[np.float32]:
        seen.append(float(x[0, 0]))
        return exact(x).astype(np.float32)

    probed(look, "1..2", seeds=max(2, seed + 1))
    calls = len(seen) // max(2, seed + 1)
    return seen[seed * calls]


def test_one_seed_that_differs_parts_the_classes_and_is_named() -> None:
    only = _first_value(2)

    def fault(x: Rows, y: Outputs) -> None:
        if len(x) >= 4 and x[0, 0] == np.float32(only):
            y[0] += 1

    found = probed(injected(fault), seeds=3)
    assert found.classes == ((1, 2, 3), (4, 5, 6, 7, 8, 9)) and found.seeds == 3
    assert [one.seeds for one in found.against_one] == [(), ()] + [(2,)] * 6
    # From too few seeds it cannot be seen: the answer says from how many it is.
    fewer = probed(injected(fault), seeds=2)
    assert len(fewer.classes) == 1 and fewer.seeds == 2
