"""Events that say nothing against the rows make no finding, whatever free keys they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import Ask, Plan, serial, write_trace

from detdiff.compare import Divergence, compare
from detdiff.report import divergence_text, from_json, to_json
from detdiff.trace import Trace

ASKS = (Ask("r0", tuple(range(10, 20)), (30, 31, 32)), Ask("r1", (40, 41, 42), (50, 51)))

ODD: list[dict[str, Any]] = [
    {"event": "merge", "forward": 0, "requests": [0]},
    {"event": "extend", "forward": 0, "requests": [0], "by": 7},
    {"event": "filter", "forward": 0, "requests": [0, 1], "kept": "all"},
    {"event": "roll", "forward": 0, "requests": [0]},
    {"event": "wrap", "forward": 0, "request": 0, "start": "0"},
    {"event": "trim", "forward": 1, "request": 0, "asked": 2, "done": 2, "layers": "0"},
    {"event": "something new", "forward": 1},
    {"event": "page", "forward": 1, "request": 0, "index": 0, "page": 3},
]


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Divergence:
    a, b = (write_trace(tmp_path / name, Plan(ASKS, serial(ASKS, chunk=4))) for name in "ab")
    monkeypatch.setattr(Trace, "events", lambda self: tuple(ODD) if self.path == b.path else ())
    return compare(a, b)


def test_counts_and_listed_events(found: Divergence) -> None:
    assert found.identical and not found.bookkeeping
    assert {count.event: (count.a, count.b) for count in found.events.counts} == {
        event["event"]: (0, 1) for event in ODD
    }
    ((listed, run, request),) = [(f.what, f.run, f.request) for f in found.events.listed]
    assert (listed, run, request) == ("wrap", "b", "r0")


def test_they_survive_text_and_json(found: Divergence) -> None:
    assert from_json(to_json(found)) == found
    text = divergence_text(found, width=300)
    assert (
        "events (a / b): merge 0 / 1, extend 0 / 1, filter 0 / 1, roll 0 / 1, wrap 0 / 1, trim 0 / 1" in text
    )
    assert (
        "run b, forward 0, request r0: prefill chunk 0 (unknown positions) passes the end of the window"
        in text
    )
