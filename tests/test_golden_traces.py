"""Traces that an earlier version wrote still open, and give the answer that they gave then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detdiff.compare import compare
from detdiff.report import to_json
from detdiff.trace import Trace

FOLDER = Path(__file__).parents[1] / "traces"


@pytest.fixture(scope="module")
def pair() -> tuple[Trace, Trace]:
    return Trace.open(FOLDER / "serial"), Trace.open(FOLDER / "continuous")


def test_the_stored_pair_gives_the_stored_answer(pair: tuple[Trace, Trace]) -> None:
    answer = json.loads(json.dumps(to_json(compare(*pair))))
    for side, name in (("a", "serial"), ("b", "continuous")):
        answer[side]["trace"] = name
    assert answer == json.loads((FOLDER / "answer.json").read_text())
    flips = {request["id"]: request["flip"] for request in answer["requests"]}
    assert flips["anchor"] is None and flips["follower"]["index"] == 16


def test_the_stored_traces_are_whole(pair: tuple[Trace, Trace]) -> None:
    for trace in pair:
        trace.verify()
        assert trace.complete and trace.header["observer"] == {"forwards": 4, "equal": True}


def test_a_stored_trace_compared_with_itself_is_identical(pair: tuple[Trace, Trace]) -> None:
    found = compare(pair[0], pair[0])
    assert found.identical and found.compared.differing == 0
