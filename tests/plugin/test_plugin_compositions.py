"""Schedules as they are written, and the runs that they become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inner_runs import Run

from detdiff.check.settings import LATEST, CheckedSchedule, compositions, listed
from detdiff.errors import CheckError, NothingToCheck, ScenarioError, ScheduleInvalid
from detdiff.scenario import Scenario


def base(count: int, layout: str = "padded") -> Scenario:
    requests = [{"id": f"r{n}", "tokens": [n + 1]} for n in range(count)]
    return Scenario.from_dict({"model": "builtin", "layout": layout, "max_tokens": 4, "request": requests})


def ids(scenario: Scenario) -> list[str]:
    return [request.id for request in scenario.requests]


COUNTS = st.integers(2, 9)
SEEDS = st.integers(0, 50)


@given(COUNTS, st.integers(1, 9), SEEDS)
def test_static_batches_are_of_the_size_asked_for_and_hold_every_request(
    count: int, size: int, seed: int
) -> None:
    asked = CheckedSchedule.of(f"static:{size}", "packed")
    if size > count:
        with pytest.raises(NothingToCheck):
            asked.draw(base(count), seed)
        return
    drawn = asked.draw(base(count), seed)
    assert all(len(ids(each)) == len(set(ids(each))) == size for each in drawn)
    assert {id for each in drawn for id in ids(each)} == {f"r{n}" for n in range(count)}
    assert {(each.schedule.kind, each.schedule.layout, each.schedule.active) for each in drawn} == {
        ("static", "packed", None)
    }


@given(COUNTS, SEEDS)
def test_continuous_requests_arrive_one_after_the_other(count: int, seed: int) -> None:
    (drawn,) = CheckedSchedule.of("continuous:2", "padded").draw(base(count), seed)
    arrivals = [request.arrival for request in drawn.requests]
    steps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    assert arrivals[0] == 0 and all(0 <= step <= LATEST for step in steps)
    assert sorted(ids(drawn)) == [f"r{n}" for n in range(count)]
    assert drawn.schedule.active == 2
    if not seed:
        assert ids(drawn) == [f"r{n}" for n in range(count)] and set(steps) == {1}
    assert CheckedSchedule.of("continuous:2", "padded").draw(base(count), seed) == [drawn]


def test_seeds_draw_other_neighbours_and_arrivals() -> None:
    static, continuous = CheckedSchedule.of("static:2", "padded"), CheckedSchedule.of("continuous", "padded")
    assert len({str([ids(each) for each in static.draw(base(6), seed)]) for seed in range(6)}) > 3
    assert len({str(continuous.draw(base(6), seed)) for seed in range(6)}) == 6


def test_scenario_keys_follow_a_schedule() -> None:
    (drawn,) = CheckedSchedule.of("continuous:2 prefill_chunk=4 arrivals=0,7", "packed").draw(base(2), 0)
    assert drawn.schedule.prefill_chunk == 4 and [r.arrival for r in drawn.requests] == [0, 7]
    assert drawn.schedule.active == 2


def test_serial_is_the_run_alone() -> None:
    assert CheckedSchedule.of("serial", "padded").draw(base(3), 5) == [base(3)]


def test_every_schedule_comes_in_every_layout() -> None:
    assert [
        each.name for each in compositions("static:2, continuous:2 arrivals=0,1,serial", ("padded", "packed"))
    ] == [
        f"{schedule}-{layout}"
        for schedule in ("static:2", "continuous:2 arrivals=0,1", "serial")
        for layout in ("padded", "packed")
    ]
    assert [each.name for each in compositions(["static"], None)] == ["static"]
    assert listed("padded,packed", "layouts") == ["padded", "packed"]


@pytest.mark.parametrize(
    "written", ["", "static:", "static:0", "static:-1", "static:2:3", "serial:2", "dynamic", "static2"]
)
def test_what_is_no_schedule_is_refused(written: str) -> None:
    with pytest.raises(ScheduleInvalid, match="is no schedule"):
        CheckedSchedule.of(written, "padded")


@given(st.text(max_size=30))
def test_any_text_is_a_schedule_or_refused(text: str) -> None:
    try:
        found = CheckedSchedule.of(text, "padded")
    except (CheckError, ScenarioError):
        return
    assert found.written == text.strip() and found.kind in text


def test_schedules_by_default_fit_the_number_of_prompts_and_named_ones_are_refused(run: Run) -> None:
    text = """
import pytest

def test_default(batch_invariance):
    found = batch_invariance.check("builtin", prompts=[[1, 2, 3], [4, 5]], max_tokens=3)
    assert found.compositions == ("static:2-padded", "static:2-packed", "continuous:2-padded", "continuous:2-packed")

def test_named(batch_invariance):
    with pytest.raises(BaseException, match="continuous:4-padded needs 4 requests and there are 2"):
        batch_invariance.check("builtin", prompts=[[1, 2, 3], [4, 5]], schedules="continuous:4", layouts="padded")
"""
    run(text).assert_outcomes(passed=2)
