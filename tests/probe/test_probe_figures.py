"""Errors, times, and how both are drawn, from injected values."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from injected import K, exact, injected, probed

from detdiff.probe import Function, Probe, probe
from detdiff.probe.chart import chart, duration, letter
from detdiff.probe.measures import CallTime, crossing, ulp
from detdiff.probe.operation import Weights

SPACES = [("F32", np.float32), ("F16", np.float16), ("F64", np.float64)]


@given(st.floats(allow_nan=False, allow_infinity=False, width=16))
def test_an_ulp_is_the_distance_to_the_next_number_away_from_zero(number: float) -> None:
    for name, dtype in SPACES:
        # float16's largest number has no next one of its own.
        if abs(number) < 65504:
            assert ulp(np.array([number]), name)[0] == np.spacing(abs(dtype(number)))


@pytest.mark.parametrize(
    ("number", "size"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (0.0, 2.0**-133), (2.0**-130, 2.0**-133)]
)
def test_an_ulp_of_bfloat16(number: float, size: float) -> None:
    assert ulp(np.array([number, -number]), "BF16").tolist() == [size, size]


def test_a_injected_error_is_measured_by_class() -> None:
    operation = injected(lambda x, y: y.__iadd__(np.where(len(x) >= 3, 2.0, 0.0) * ulp(y, "F32")))
    operation.reference = exact  # type: ignore[attr-defined]
    found = probed(operation, "1..4")
    assert found.classes == ((1, 2), (3, 4)) and found.errors is not None
    sound, off = found.errors
    assert (sound.max_ulp, sound.mean_ulp, sound.non_finite) == (0.0, 0.0, 0)
    assert (off.max_ulp, off.mean_ulp, off.max_relative) == (2.0, 2.0, None)
    assert (off.rows, off.outputs) == ((3, 4), 3 * 5)


def test_what_is_not_finite_is_counted_apart() -> None:
    def fault(x: np.ndarray, y: np.ndarray) -> None:  # type: ignore[type-arg]
        y[:, 0] = np.nan
        y[:, 1] = np.inf

    operation = injected(fault)
    operation.reference = exact  # type: ignore[attr-defined]
    (error,) = probed(operation, "1..2").errors or ()
    assert (error.non_finite, error.outputs, error.max_ulp) == (6, 15, 0.0)
    operation = injected(lambda x, y: y.__imul__(np.nan))
    operation.reference = exact  # type: ignore[attr-defined]
    found = probed(operation, "1..2")
    assert found.errors is not None and found.errors[0].non_finite == 15
    json.dumps(found.to_json(), allow_nan=False)


def test_without_a_reference_no_error_is_given_and_the_answer_says_so() -> None:
    found = probed(injected(lambda x, y: None), "1..2")
    assert found.errors is None and "reference" in found.notes[-1]


def test_a_linear_error_is_the_sum_in_exact_arithmetic() -> None:
    random = np.random.default_rng(3)
    w, x = random.standard_normal((6, 9)), random.standard_normal((1, 9))
    bias = random.standard_normal(6)
    found = Weights(6, lambda first, last: w[first:last], bias).exact(x)
    assert found.magnitude is not None
    for n in range(6):
        terms = [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x[0], w[n], strict=True)]
        terms.append(Fraction(float(bias[n])))
        assert abs(float(sum(terms)) - found.outputs[0, n]) < 1e-14
        assert abs(float(sum(map(abs, terms))) - found.magnitude[0, n]) < 1e-13


def test_the_cancelling_row_leaves_nothing_of_the_outputs_that_cancel() -> None:
    random = np.random.default_rng(4)
    w = random.standard_normal((7, 40))
    weights = Weights(7, lambda first, last: w[first:last])
    row = weights.cancelling(random.standard_normal(40), 5)
    assert np.abs(w @ row).max() < 1e-13 and np.abs(row).max() > 0.1


def test_a_difference_that_plain_rows_hide_in_bfloat16_shows_in_the_cancelling_row() -> None:
    found = probe("linear:416,192,bfloat16", on="candle-metal", rows="1..2", seeds=3, timed=False)
    assert found.classes == ((1,), (2,))


def times(*ratios: float) -> list[CallTime]:
    return [CallTime(m, 1e-3 * m * r, r, r, r, 9) for m, r in enumerate(ratios, 1)]


@pytest.mark.parametrize(
    ("ratios", "at"),
    [
        ((1.0, 1.9, 1.3, 1.0, 0.8, 0.7), 5),  # the matrix kernel pays from five rows on
        ((1.0, 0.5, 1.4, 0.9, 0.8), 4),  # one that pays and then does not is no crossing
        ((1.0, 0.5, 0.4), 2),
        ((1.0, 0.99, 0.97), None),  # within what a clock can tell
        ((1.0, 0.5, 1.2), None),
    ],
)
def test_time_crosses_where_one_call_stays_cheaper_than_row_by_row(
    ratios: Sequence[float], at: int | None
) -> None:
    assert crossing(times(*ratios)) == at


def test_every_m_is_timed_in_every_round() -> None:
    seen: list[int] = []

    def operation(x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        seen.append(len(x))
        return x

    found = probe(Function(operation, "operation", 4), rows="1..3", seeds=2)
    assert found.times is not None and [time.rows for time in found.times] == [1, 2, 3]
    rounds = found.times[0].rounds
    assert rounds >= 5 and all(time.rounds == rounds and time.per_row > 0 for time in found.times)
    # The first seed's calls and one warm call of each M come first, the second seed's calls last.
    timed = "".join(map(str, seen))
    turns = [timed[i : i + 3] for i in range(len(timed) - 2)]
    assert {"123", "132", "213", "231", "312", "321"} <= {turn for turn in turns if len(set(turn)) == 3}


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (1.5e-4, "150 µs"), (2e-8, "0.02 µs")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_letters() -> None:
    assert [letter(n) for n in (0, 1, 25, 26, 27, 701, 702)] == ["A", "B", "Z", "AA", "AB", "ZZ", "AAA"]


def drawn(found: Probe) -> list[str]:
    """The words in the chart, which must be XML."""
    tree = ElementTree.fromstring(chart([found]))
    return [element.text or "" for element in tree.iter() if element.text and element.text.strip()]


def test_the_chart_shows_classes_times_and_both_thresholds_as_words() -> None:
    def fault(x: np.ndarray, y: np.ndarray) -> None:  # type: ignore[type-arg]
        y += len(x) >= 3

    found = dataclasses.replace(probed(injected(fault), "1..5"), times=tuple(times(1, 1.5, 1.2, 0.8, 0.5)))
    words = drawn(found)
    assert [word for word in words if word in ("A", "B")] == ["A", "A", "B", "B", "B"]
    assert {"bits", "time", "rows M", "1.00 ms", "1.50 ms", "800 µs", "500 µs"} <= set(words)
    assert "bits change at M = 3; one call is cheaper than row by row from M = 4" in words
    svg = chart([found])
    # Colour is never alone: each class has its shape too.
    assert svg.count("<circle") == 2 + 5 and svg.count("<polygon") == 3
    assert "time per row" not in drawn(dataclasses.replace(found, times=None))


def test_the_chart_escapes_what_a_name_may_hold() -> None:
    found = dataclasses.replace(
        probed(injected(lambda x, y: None), "1..2"), target='<script>&"\x00\x1b[31m\ud800', on="]]>"
    )
    svg = chart([found, found])
    assert "<script>" not in svg and "\x00" not in svg
    assert any("<script>&" in word for word in drawn(found))
    svg.encode("utf-8")


def test_an_answer_has_no_truth_value_and_is_plain_json() -> None:
    found = probe(Function(injected(lambda x, y: None), "sound", K), rows="1..3", seeds=2)
    with pytest.raises(TypeError, match="invariant"):
        bool(found)
    answer = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert answer["schema"] == "detdiff.probe/1" and answer["classes"] == [[1, 2, 3]]
    wanted = {"against_one", "position", "neighbours", "repeat", "seeds", "errors", "times", "thresholds"}
    assert wanted <= set(answer)
    assert answer["thresholds"]["bits"] == []
