"""explain from two scenarios to a verdict: the built-in model's path change, injected faults, and what ends the re-runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import CASES
from tiers import some_now

from detdiff import Scenario
from detdiff.compare import Divergence
from detdiff.demo import ANCHORS, BASE, CONTINUOUS, FOLLOWER, SERIAL
from detdiff.engines.mlx.model import load
from detdiff.errors import CommandError, ModelRunError, ReplayError
from detdiff.explain import DECIDING, ORDER, Verdict, explain, investigate
from detdiff.explain.case import Case
from detdiff.explain.control import Budget, Outcome
from detdiff.explain.controls.oracle import AT_MOST, sample
from detdiff.explain.origins import OriginRow, origins, significant


def demo(max_tokens: int = 8) -> tuple[Scenario, Scenario]:
    prompts = (ANCHORS[0][0], FOLLOWER)
    flags = f"{BASE} max_tokens={max_tokens}"
    a, b = (
        Scenario.from_flags("builtin", prompts, f"{flags} {schedule}") for schedule in (SERIAL, CONTINUOUS)
    )
    return a, b


def injected(number: int, seed: int = 0, **options: Any) -> Verdict:
    trial = CASES[number].trial(seed)
    with trial.around:
        return explain(trial.scenario_a, trial.scenario_b, loaded=trial.loaded, draft=trial.draft, **options)


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    yield Case.of(*demo(), loaded=load("builtin"))


@pytest.fixture(scope="module")
def rounding() -> Verdict:
    return explain(*demo(), controls=DECIDING, loaded=load("builtin"))


@pytest.mark.thorough
def test_the_demonstration_is_numerics_that_names_threshold_and_cost(rounding: Verdict) -> None:
    assert (rounding.kind, rounding.rule) == ("numerics", "path")
    results = {control.name: control.result for control in rounding.controls}
    assert {name: result for name, result in results.items() if result != "not_run" and name != "finite"} == {
        "repeat": "equal",
        "oracle": "inside",
        "pin_kernels": "removed",
        "place": "rows",
        "neighbour_content": "equal",
    }
    assert "candle-metal" in rounding.sentence and "split_rows" in rounding.sentence
    assert "ms a forward" in rounding.advice
    assert isinstance(rounding.divergence, Divergence) and rounding.divergence.a.trace == "a (not kept)"


@pytest.mark.thorough
def test_every_origin_is_listed_once_and_as_compare_counts_them(case: Case) -> None:
    found = origins(case.a, case.b)
    counted = sum(count.count for request in case.divergence.requests for count in request.origins)
    assert len(found) == counted > 0
    assert len({(each.site.name, each.request, each.position) for each in found}) == len(found)
    first = case.divergence.request(case.divergence.first or "").origin
    assert first is not None
    assert (found[0].site.name, found[0].position, found[0].how) == (first.site, first.position, first.how)
    assert [each.forward_a for each in found] == sorted(each.forward_a for each in found)


def test_a_sample_has_the_first_of_each_kind_and_path_pair(case: Case) -> None:
    found = origins(case.a, case.b)
    chosen = sample(found, 5)
    assert len(chosen) <= 5 < len(found) and found[0] in chosen
    assert sample(found, len(found)) == found
    firsts: dict[Any, OriginRow] = {}
    for each in found:
        firsts.setdefault(each.group, each)
    assert set(map(id, firsts.values())) <= set(map(id, sample(found, max(AT_MOST, len(firsts)))))


@pytest.mark.thorough
def test_the_oracle_counts_what_it_judged_and_spends_the_budget(case: Case) -> None:
    before = case.budget.reruns_spent
    control = investigate.run_control(case, "oracle")
    assert control.result == "inside" and case.budget.reruns_spent == before + 2
    detail = control.detail
    assert detail["origins"] == len(origins(case.a, case.b)) and not detail["skipped"]
    assert detail["judged"] == detail["origins"] <= AT_MOST
    assert detail["inside_a"] == detail["inside_b"] == detail["judged"]
    assert detail["outside_a"] == detail["outside_b"] == 0 and detail["outside_where"] == []
    assert all(0 < pair["worst_a"] <= 1 and 0 < pair["worst_b"] <= 1 for pair in detail["pairs"])
    assert f"all {detail['judged']} origins recomputed in float64" in control.sentence


@pytest.mark.parametrize(
    ("number", "places"),
    some_now(
        [
            (9, {"heads": [0, 1, 2, 3], "kind": "rope"}),
            (10, {"columns": [128, 149], "kind": "linear"}),
            (11, {"kind": "attention"}),
        ],
        1,
    ),
)
def test_a_injected_fault_is_outside_and_named_with_its_place(number: int, places: dict[str, Any]) -> None:
    verdict = injected(number, controls=("repeat", "oracle"))
    assert (verdict.kind, verdict.rule) == ("bug", "outside")
    detail = verdict.control("oracle").detail  # type: ignore[union-attr]
    first, expected = detail["outside_where"][0], CASES[number].trial(0).expected
    assert first["run"] == "b" and first["site"] == expected.site and first["worst"] > 100
    assert first.items() >= places.items()
    assert expected.head is None or first["heads"] == [expected.head]
    assert detail["outside_a"] == 0 < detail["outside_b"] and detail["nearer"] == "a"
    assert detail["pattern"].startswith("only ") and detail["pattern"] in verdict.sentence


@pytest.mark.thorough
def test_operands_of_lower_precision_are_named_as_such() -> None:
    verdict = injected(5, controls=("repeat", "oracle", "pin_kernels"))
    assert (verdict.kind, verdict.rule) == ("numerics", "precision")
    precision = verdict.control("oracle").detail["precision"]  # type: ignore[union-attr]
    assert (precision["run"], precision["bits"], precision["name"]) == ("b", 11, "float16 or tf32")


@pytest.mark.parametrize("seed", some_now([0, 1], 0))
def test_the_first_value_that_is_not_finite_is_found_with_its_row(seed: int) -> None:
    verdict = injected(7, seed)
    assert (verdict.kind, verdict.rule) == ("bug", "not-finite")
    first = verdict.control("finite").detail["first"]  # type: ignore[union-attr]
    assert first["kind"] == "attention" and first["run"] == "b" and first["nan"]
    assert first["padding"] == (seed == 0) and bool(first["entry"]) == (seed == 1)


def test_a_race_ends_the_re_runs() -> None:
    verdict = injected(15)
    assert (verdict.kind, verdict.rule) == ("nondeterminism", "repeat")
    assert [control.name for control in verdict.controls if control.result != "not_run"] == ["repeat"]
    assert all("the rule repeat decides" in c.sentence for c in verdict.controls if c.result == "not_run")
    assert "batch" not in verdict.sentence.partition("Nothing about batching")[0]


def test_a_contradiction_ends_them_after_the_repeat() -> None:
    verdict = injected(14)
    assert (verdict.kind, verdict.rule) == ("bug", "bookkeeping")
    assert [control.name for control in verdict.controls if control.result != "not_run"] == ["repeat"]


@pytest.mark.thorough
def test_another_position_of_quantisation_is_a_configuration_that_was_tried() -> None:
    verdict = injected(13)
    assert (verdict.kind, verdict.rule) == ("configuration", "quantised")
    assert verdict.control("configuration").result == "removed"  # type: ignore[union-attr]


def test_two_equal_runs_need_no_control() -> None:
    verdict = injected(20)
    assert verdict.kind == "identical" and verdict.controls == ()


@pytest.mark.thorough
def test_without_budget_nothing_is_established() -> None:
    budget = Budget(reruns=2)
    verdict = explain(*demo(4), budget=budget, loaded=load("builtin"))
    assert verdict.kind == "undetermined" and budget.reruns_spent == 2
    assert any("the budget of 2 re-runs is spent" in each for each in verdict.missing)


def test_a_control_that_the_model_cannot_run_says_so_and_others_go_on(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: Exception) -> Any:
        def control(case: Case) -> Outcome:
            raise error

        return {"dtype": replace(investigate.CONTROLS["dtype"], run=control)}

    monkeypatch.setattr(investigate, "CONTROLS", failing(ModelRunError("It runs in bfloat16 only.")))
    found = investigate.run_control(case, "dtype")
    assert (found.name, found.result, found.sentence) == ("dtype", "not_run", "It runs in bfloat16 only.")
    monkeypatch.setattr(investigate, "CONTROLS", failing(ReplayError("Another machine.")))
    with pytest.raises(ReplayError, match="Another machine"):
        investigate.run_control(case, "dtype")


def test_controls_are_told_as_they_start_and_unknown_ones_refused() -> None:
    told: list[str] = []
    injected(9, 3, controls=("repeat", "oracle"), on_control=told.append)
    assert told == ["repeat", "oracle"] and set(told) <= set(ORDER)
    a, b = demo(4)
    with pytest.raises(CommandError, match="There is no control 'orcale'; expected one of .*repeat, "):
        explain(a, b, controls=("orcale",))


@pytest.mark.parametrize("bits", [8, 11, 24])
def test_significant_bits_are_those_of_the_formats(bits: int) -> None:
    draw = np.random.default_rng(bits).standard_normal(2000) * 10.0 ** np.arange(-20, 20).repeat(50)
    rounded, cut = significant(draw, bits), significant(draw, bits, nearest=False)
    for found in (rounded, cut):
        fraction, _ = np.frexp(found)
        assert np.array_equal(np.ldexp(fraction, bits), np.rint(np.ldexp(fraction, bits)))
    assert (np.abs(rounded - draw) <= np.abs(draw) * 2.0**-bits).all() and (np.abs(cut) <= np.abs(draw)).all()
    if bits == 24:
        assert np.array_equal(rounded, draw.astype(np.float32).astype(np.float64))
    assert not np.array_equal(rounded, cut)


def test_paths_of_traces_are_opened_and_need_no_model_where_they_are_equal(case: Case) -> None:
    verdict = explain(str(case.a.path), case.a.path)
    assert verdict.kind == "identical" and verdict.controls == ()
