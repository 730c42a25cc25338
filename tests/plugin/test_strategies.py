"""Strategies draw every sort of batch, and shrink what fails to the smallest one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from runs import model, patched
from tiers import FULL, examples, only_in_full
from toy_engine import Faulty, Packed

from detdiff.check.checked_engines import against_alone
from detdiff.check.invariance import check_scenario
from detdiff.engines.function import EngineRequest
from detdiff.engines.mlx.packed import PackedEngine
from detdiff.engines.mlx.requests import prepare
from detdiff.engines.mlx.serve import Models, Sessions, serve
from detdiff.engines.schedule import Work
from detdiff.errors import ScenarioRangeError
from detdiff.scenario import Request, Scenario, Schedule
from detdiff.strategies import arrivals, compositions, prompts, row_counts, schedules

PACKED = schedules(kinds=("continuous",), layouts=("packed",), most_rows=8)
LONG_FIRST = Schedule("continuous", "packed", None, 1)


# To explain an example takes longer than to find and to shrink it.
FIND = (Phase.generate, Phase.shrink)
QUIET = settings(max_examples=2000, database=None, deadline=None, derandomize=False, phases=FIND)


def smallest(strategy: Any, fails: Callable[[Any], bool], seed: int = 0, how: settings = QUIET) -> Any:
    return find(strategy, fails, settings=how, random=Random(seed))


def size(scenario: Scenario) -> tuple[int, ...]:
    requests = scenario.requests
    budget = scenario.schedule.row_budget
    return (
        len(requests),
        sum(len(each.tokens or ()) for each in requests),
        sum(each.max_tokens for each in requests),
        budget if budget is not None else 1 << 30,
    )


@settings(max_examples=examples(150))
@given(compositions())
def test_every_composition_is_a_scenario_that_reads_back(scenario: Scenario) -> None:
    assert Scenario.from_dict(scenario.to_dict()) == scenario
    assert 1 <= len(scenario.requests) <= 4
    at = [request.arrival for request in scenario.requests]
    assert at == sorted(at) and at[0] == 0
    alone = scenario.with_changes(schedule="serial", arrivals=None)
    assert [each.tokens for each in alone.requests] == [each.tokens for each in scenario.requests]


@pytest.mark.parametrize(
    "wanted",
    [
        lambda s: s.schedule.kind == "static" and s.schedule.layout == "padded" and len(s.requests) == 4,
        lambda s: s.schedule.kind == "continuous" and s.schedule.layout == "padded",
        pytest.param(
            lambda s: s.schedule.row_budget == 3 and s.schedule.active == 2, marks=pytest.mark.thorough
        ),
        lambda s: s.schedule.layout == "packed" and s.schedule.row_budget is None,
        lambda s: s.schedule.prefill_chunk == 2 and max(len(r.tokens) for r in s.requests) == 8,
        lambda s: s.requests[-1].arrival > 8,
    ],
    ids=["static", "padded", "limits", "no-budget", "chunk", "late"],
)
def test_each_sort_of_composition_is_drawn(wanted: Callable[[Scenario], bool]) -> None:
    unshrunk = settings(QUIET, max_examples=20_000, phases=[Phase.generate])
    assert wanted(smallest(compositions(), wanted, how=unshrunk))


def test_what_shrinks_to_what() -> None:
    assert smallest(row_counts(16), lambda m: m > 4) == 5
    assert smallest(row_counts(16, least=2), lambda m: True) == 2
    assert smallest(prompts(50, longest=9), lambda p: len(p) >= 3) == (0, 0, 0)
    assert smallest(prompts(50), lambda p: 7 in p) == (7,)
    assert smallest(arrivals(4), lambda a: True) == (0, 0, 0, 0)
    assert smallest(arrivals(3, latest=5), lambda a: a[2] >= 2) in ((0, 0, 2), (0, 1, 2), (0, 2, 2))
    assert smallest(schedules(), lambda s: True) == Schedule("static", "padded")
    assert smallest(PACKED, lambda s: True) == LONG_FIRST
    assert smallest(PACKED, lambda s: s.prefill_chunk <= 4 and s.active is not None).active == 1
    few = smallest(compositions(model="m"), lambda s: True)
    assert (len(few.requests), few.requests[0].tokens, few.model, few.schedule) == (
        1,
        (0,),
        "m",
        Schedule("static"),
    )


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(compositions(), marks=only_in_full("from more compositions than packed ones"), id="all"),
        pytest.param(compositions(schedule=PACKED), marks=pytest.mark.thorough, id="packed"),
    ],
)
def test_a_fault_of_three_requests_one_of_them_arriving_mid_prefill_is_shrunk_to_exactly_that(
    strategy: Any,
) -> None:
    engine = Faulty()
    found = [
        smallest(strategy, lambda s: not check_scenario(engine, s).identical, seed)
        for seed in range(3 if FULL else 1)
    ]
    least = min(found, key=size)
    assert least.schedule == LONG_FIRST
    # The first prompt is half done, with one row a forward, when the third request comes.
    assert [(each.tokens, each.max_tokens, each.arrival) for each in least.requests] == [
        ((0, 0), 1, 0),
        ((0,), 1, 0),
        ((0,), 1, 1),
    ]
    # Whatever it began with, no request is left that the fault does not need.
    assert {len(each.requests) for each in found} == {3}
    finding = check_scenario(engine, least)
    assert [each.id for each in finding.diverged] == ["r0"]
    flip = finding.diverged[0].flip
    assert flip is not None and (flip.index, flip.a.token, flip.b.token) == (0, 0, 1)
    assert "continuous of packed: " in finding.text()


@settings(max_examples=examples(100))
@given(compositions())
def test_an_engine_without_the_fault_passes_every_composition(scenario: Scenario) -> None:
    finding = check_scenario(Packed(), scenario)
    assert finding.identical, finding.text()


class Served:
    """A tiny model on detdiff's own engine, unrecorded."""

    name = "served"

    def __init__(self) -> None:
        self.loaded = model("llama")
        self._sessions: Sessions | None = None

    def generate(self, requests: Sequence[EngineRequest], schedule: Schedule) -> dict[str, list[int]]:
        asked = tuple(
            Request(
                each.id,
                tokens=each.tokens,
                max_tokens=each.max_tokens,
                arrival=each.arrival,
                ignore_stop=True,
            )
            for each in requests
        )
        scenario = Scenario("tiny", asked, replace(schedule, layout="packed"))
        self._sessions = self._sessions or Sessions.of(scenario, Models(self.loaded))
        found: dict[str, list[int]] = {each.id: [] for each in requests}
        with self._sessions.running(None, None, packed=True):
            work = prepare(scenario, self.loaded)
            serve(scenario, self._sessions, work, lambda n, _, token: found[requests[n].id].append(token))
        return found


def slip(
    engine: PackedEngine, schedule: Schedule, real: Callable[..., list[Work]] = PackedEngine._admit
) -> list[Work]:
    """Admits as it should; whoever comes as the third then changes what is left to read of a prompt that is half done."""
    before = list(engine._queue.active)
    due = real(engine, schedule)
    if len(engine._queue.active) >= 3 and len(engine._queue.active) > len(before):
        for work in before:
            if 0 < work.done < len(work.prompt):
                work.prompt = (*work.prompt[:-1], work.prompt[-1] ^ 1)
    return due


@pytest.mark.thorough
def test_a_fault_in_a_real_models_scheduler_is_shrunk_to_the_same_batch() -> None:
    engine = Served()
    few = compositions(
        "tiny", max_requests=4, prompt=prompts(96, longest=4), max_tokens=2, latest=2, schedule=PACKED
    )
    undo = patched(PackedEngine, "_admit", slip)
    try:
        least = smallest(few, lambda s: not check_scenario(engine, s).identical)
        divergence = against_alone(least, engine.loaded)
    finally:
        undo()
    assert [(len(each.tokens or ()), each.max_tokens, each.arrival) for each in least.requests] == [
        (2, 1, 0),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert least.schedule == LONG_FIRST
    assert [each.id for each in divergence.requests if each.stage is not None] == ["r0"]
    clean = against_alone(least, engine.loaded)
    assert clean.identical and clean.compared.rows == 4


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: row_counts(0), "numbers of rows from 1 to 0"),
        (lambda: prompts(0), "a vocabulary of 0"),
        (lambda: prompts(longest=0), "prompts of 1 to 0 tokens"),
        (lambda: arrivals(0), "0 requests"),
        (lambda: arrivals(2, latest=-1), "arrivals up to -1"),
        (lambda: schedules(kinds=()), "no kind"),
        (lambda: compositions(max_requests=0), "no request"),
    ],
)
def test_numbers_that_no_batch_has_are_refused(asked: Callable[[], Any], says: str) -> None:
    with pytest.raises(ScenarioRangeError, match=f"A strategy was asked for {says}"):
        asked()


def test_without_hypothesis_one_paragraph_says_what_to_install() -> None:
    program = "import sys; sys.modules['hypothesis'] = None\nimport detdiff.strategies"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("detdiff.errors.HypothesisMissing: detdiff.strategies needs hypothesis")
    assert last.endswith("Install it: pip install hypothesis.")


def test_strategies_load_no_model_library() -> None:
    program = "import sys, detdiff.strategies; print({'mlx', 'numba', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()"


@given(schedules(kinds="continuous", layouts="packed"))
def test_one_kind_and_one_layout_may_be_a_text(schedule: Schedule) -> None:
    assert (schedule.kind, schedule.layout) == ("continuous", "packed")
