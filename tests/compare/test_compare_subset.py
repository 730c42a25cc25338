"""Comparing some of the requests of two runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_traces import Ask, Fault, Plan, serial, together, write_trace

from detdiff.compare import compare
from detdiff.errors import NothingComparable
from detdiff.trace import Trace

ASKS = (Ask("r0", (1, 2, 3), (4, 5)), Ask("r1", (6, 7), (8, 9)), Ask("r2", (10,), (11, 12)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(tmp_path_factory.mktemp("whole") / "a", Plan(ASKS, serial(ASKS)))


def test_requests_that_are_not_asked_about_are_not_missed(whole: Trace, tmp_path: Path) -> None:
    two = write_trace(tmp_path / "b", Plan(ASKS[:2], together(ASKS[:2])))
    everything, asked = compare(whole, two), compare(whole, two, requests=["r0", "r1"])
    assert not everything.identical and [left.id for left in everything.not_compared] == ["r2"]
    assert asked.identical and asked.not_compared == () and asked.compared.requests == 2
    assert asked.compared.rows == everything.compared.rows


def test_a_difference_of_another_request_is_none(whole: Trace, tmp_path: Path) -> None:
    fault = Fault("layers.0.attn.k_proj", "out", 1, 0)
    other = write_trace(tmp_path / "b", replace(Plan(ASKS, together(ASKS)), faults=(fault,)))
    assert compare(whole, other, requests=["r0", "r2"]).identical
    found = compare(whole, other, requests=["r1"])
    assert found.first == "r1" and found.request("r1").origin is not None


def test_nothing_asked_about_is_nothing_comparable(whole: Trace) -> None:
    for requests in ([], ["r9"]):
        with pytest.raises(NothingComparable):
            compare(whole, whole, requests=requests)
