from __future__ import annotations

from pathlib import Path

import pytest
from runs import Runs, model, scenario
from tiers import some_now
from tiny import tiny

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.path_changes import AllowedChanges, MinimalChangeTrials, PathChange, baseline
from detdiff.engines.mlx.reruns import RerunChanges, Reruns, rerun
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.explain.case import Case
from detdiff.explain.control import Budget
from detdiff.explain.investigate import run_control

CANDLE = {"kernels": "candle-metal", "lengths": (12, 9, 21), "arrivals": (0, 5, 9)}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def _case(
    runs: Runs, fmt: str = "f32", layout: str = "packed", budget: Budget | None = None, **keys: object
) -> Case:
    loaded = model("llama", fmt)
    keys = {**CANDLE, "max_tokens": 16, **keys}
    a = runs.record(loaded, scenario("serial", layout, **keys))
    b = runs.record(loaded, scenario("continuous", layout, active=3, **keys))
    return Case.of(a, b, compare(a, b), loaded=loaded, budget=budget)


@pytest.mark.thorough
def test_the_set_alone_parts_and_nothing_can_be_left_out_of_it(runs: Runs) -> None:
    case = _case(runs)
    allowed = run_control(case, "minimal_change")
    assert allowed.result == "smallest"
    found = [PathChange(each["forward"], each["site"]) for each in allowed.detail["smallest"]]
    tried = MinimalChangeTrials(Reruns.of(case))
    assert tried.happens(found)
    assert not any(tried.happens([one for one in found if one != left]) for left in found)


def test_a_trial_that_starts_late_answers_as_one_from_the_prompt(runs: Runs) -> None:
    case = _case(runs)
    base, tried = baseline(Reruns.of(case)), MinimalChangeTrials(Reruns.of(case))
    assert tried is not None
    changes = sorted(base.effective)
    for some in (changes[:1], changes[len(changes) // 2 :], changes[-3:], changes):
        whole = rerun(
            Reruns.of(case),
            "b",
            RerunChanges(
                override=AllowedChanges(base.changes, some),
                decided=lambda run: base.target.happened(run) is not None,
                wanted=base.wanted,
            ),
        )
        assert tried.happens(some) == base.target.happened(whole)


@pytest.mark.thorough
def test_without_snapshots_the_padded_layout_finds_it_from_the_prompt(runs: Runs) -> None:
    case = _case(runs, "f32", "padded", kernels="mlx-metal")
    allowed = run_control(case, "minimal_change")
    assert allowed.result == "smallest"
    assert all(each["path_a"] != each["path_b"] for each in allowed.detail["smallest"])


def test_a_difference_that_is_no_path_change_remains(runs: Runs) -> None:
    loaded = model("llama", "f32")
    keys = {**CANDLE, "max_tokens": 12}
    injected_fault = InjectedFault("layers.0.self_attn.v_proj", 0, 2, 5)
    a = runs.record(loaded, scenario("serial", "packed", **keys))
    asked = scenario("continuous", "packed", active=3, **keys)
    b = runs.record(loaded, asked, RecordOptions(observe=0, faults=(injected_fault,)))
    case = Case.of(a, b, loaded=loaded, injected_faults=((), (injected_fault,)))
    assert run_control(case, "minimal_change").result == "remains"


def test_one_schedule_has_no_path_change(runs: Runs) -> None:
    loaded = model("llama", "f32")
    injected_fault = InjectedFault("layers.0.self_attn.v_proj", 0, 2, 5)
    asked = scenario("continuous", "packed", active=3, **CANDLE)
    a = runs.record(loaded, asked)
    b = runs.record(loaded, asked, RecordOptions(observe=0, faults=(injected_fault,)))
    allowed = run_control(
        Case.of(a, b, loaded=loaded, injected_faults=((), (injected_fault,))), "minimal_change"
    )
    assert (allowed.result, allowed.detail["candidates"]) == ("none", 0)


@pytest.mark.parametrize("budget", some_now([Budget(reruns=1), Budget(forwards=9), Budget(reruns=0)], 2))
def test_a_spent_budget_is_said(runs: Runs, budget: Budget) -> None:
    allowed = run_control(_case(runs, budget=budget), "minimal_change")
    assert allowed.result == "not_run" and "budget" in allowed.sentence
    assert allowed.forwards == budget.forwards_spent <= (budget.forwards or 1000)


@pytest.mark.thorough
def test_what_is_spent_is_what_was_run(runs: Runs) -> None:
    case = _case(runs)
    controls = [run_control(case, name) for name in ("minimal_change", "patch_in", "repeat")]
    assert sum(control.forwards for control in controls) == case.budget.forwards_spent > 0


@pytest.mark.parametrize(
    ("layout", "kernels"), some_now([("packed", "candle-metal"), ("padded", "mlx-metal")])
)
def test_verification_in_one_block_against_one_by_one(tmp_path: Path, layout: str, kernels: str) -> None:
    loaded, draft = model("llama"), tiny("llama", "f32", seed=5)
    keys = {"kernels": kernels, "max_tokens": 20, "lengths": (12, 5)}
    asked = [
        scenario("serial", layout, **keys),
        scenario("serial", layout, draft="tiny-draft", drafts=4, **keys),
    ]
    case = Case.of(*asked, loaded=loaded, draft=draft)
    assert any(line.get("model") == "draft" for line in case.b.forwards())
    assert case.focus.stage is not None
    held = run_control(case, "pin_kernels")
    assert (held.result, held.detail["bits_equal"]) == ("removed", True), held.sentence
    allowed = run_control(case, "minimal_change")
    assert allowed.result == "smallest", allowed.sentence
    assert all(not each["site"].startswith("draft.") for each in allowed.detail["smallest"])
