"""Every injected case, explained: the verdict, and in its words what the case has to name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from cases import CASES
from fault_case import Trial
from tiers import FULL, some_now
from value_cases import VALUES

from detdiff.explain import DECIDING, Verdict, explain

SEEDS = range(10) if FULL else (3,)
"""A sample of what `python tools/verdict_matrix.py` runs: one of its ten seeds, without the longest texts.
DETDIFF_TEST_FULL=1 runs all."""


@cache
def explained(number: int, seed: int, controls: tuple[str, ...] = DECIDING) -> tuple[Trial, Verdict]:
    trial = CASES[number].trial(seed)
    if number == 1 and not FULL:
        # The path is seen long before a token flips.
        shorter = (each.with_changes(max_tokens=16) for each in (trial.scenario_a, trial.scenario_b))
        trial = replace(trial, **dict(zip(("scenario_a", "scenario_b"), shorter, strict=True)))
    with trial.around:
        verdict = explain(
            trial.scenario_a, trial.scenario_b, controls=controls, loaded=trial.loaded, draft=trial.draft
        )
    return trial, verdict


def detail(verdict: Verdict, control: str) -> dict[str, object]:
    found = verdict.control(control)
    assert found is not None and found.result != "not_run", found
    return dict(found.detail)


def check_switch(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "path"
    assert (
        "mlx-cuda/gemv" in verdict.sentence
        and "mlx-cuda/gemm" in verdict.sentence
        and "chain_from" in verdict.sentence
    )
    assert "Held" in verdict.sentence and verdict.advice


def check_reuse(trial: Trial, verdict: Verdict) -> None:
    first, second = (request.tokens or () for request in trial.scenario_a.requests)
    suffix = len(second) - 16
    assert first[:16] == second[:16] and str(trial.expected.site) in verdict.sentence
    assert re.search(rf"on {16 + suffix} rows? in a .* on {suffix} rows? in b", verdict.sentence)


def check_speculation(trial: Trial, verdict: Verdict) -> None:
    assert "phase verify" in verdict.sentence


def check_worse_side(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "worse-path" and "run a (reference/fixture/narrow)" in verdict.sentence
    assert detail(verdict, "oracle")["nearer"] == trial.expected.nearer


def check_precision(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "precision" and str(trial.expected.precision) in verdict.sentence
    assert detail(verdict, "oracle")["nearer"] == trial.expected.nearer


def check_leak(trial: Trial, verdict: Verdict) -> None:
    wanted = trial.expected
    assert (
        f"the cache entry {wanted.entry} of layer {wanted.layer}, head {wanted.head}, position"
        in verdict.sentence
    )
    assert f"position {wanted.entry_position} is not what was written" in verdict.sentence
    content = verdict.control("neighbour_content")
    assert content is not None and content.result == "differs"


def check_not_finite(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "not-finite"
    if len(trial.expected.requests) > 1:
        # The mask's own row, in the first layer, before any real row.
        assert "a row of padding" in verdict.sentence and "layers.0.self_attn.attention" in verdict.sentence
    else:
        assert f"position {trial.expected.position} of request number 0" in verdict.sentence
        assert (
            str(trial.expected.site) in verdict.sentence and "the cache held one before" in verdict.sentence
        )


def check_rewind(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "bookkeeping" and trial.scenario_b.speculation is not None
    assert f"took 0 of {trial.scenario_b.speculation.drafts} row" in verdict.sentence
    assert "layers 0-1,3-4" in verdict.sentence


def check_rope(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "outside" and f"{trial.expected.site} " in verdict.sentence
    assert "only rows from 1 on" in verdict.sentence and "T = 1" in verdict.sentence


def check_columns(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "outside" and trial.expected.columns is not None
    first, last = trial.expected.columns
    assert (
        f"{trial.expected.site} (linear, columns {first} to {last})" in verdict.sentence
        and "M = 3" in verdict.sentence
    )


def check_head(trial: Trial, verdict: Verdict) -> None:
    # The runs quantise their caches at other positions, so that each side's attention is judged by its own call.
    assert verdict.rule == "quantised-attention", verdict.sentence
    assert f"{trial.expected.site} (attention, head {trial.expected.head})" in verdict.sentence
    assert f"position {trial.expected.position}" in verdict.sentence


def check_chunk(trial: Trial, verdict: Verdict) -> None:
    wanted = trial.expected
    assert (
        verdict.rule == "reading" and f"{wanted.site}, position {wanted.position} of r0" in verdict.sentence
    )
    assert f"prefill chunk {wanted.chunk} of run b, positions {wanted.position} to" in verdict.sentence
    assert "every earlier chunk is exact" in verdict.sentence


def check_configuration(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "quantised" and "from position 39 in a" in verdict.sentence


def check_offset(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "bookkeeping" and "is at offset 11, the row at 2" in verdict.sentence


def check_nondeterminism(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "repeat" and str(trial.expected.site) in verdict.sentence


def check_sampling(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "choices" and "not the model" in verdict.sentence


def check_nothing(trial: Trial, verdict: Verdict) -> None:
    assert verdict.rule == "nothing" and "no request in common" in verdict.sentence


def check_identical(trial: Trial, verdict: Verdict) -> None:
    assert verdict.divergence is not None and verdict.divergence.compared.differing == 0


OUTSIDE = (6, 9, 10, 11, 14)
"""What no rounding explains: outside every bound of float64."""

CHECKS: dict[int, Callable[[Trial, Verdict], None]] = {
    1: check_switch,
    2: check_reuse,
    3: check_speculation,
    4: check_worse_side,
    5: check_precision,
    6: check_leak,
    7: check_not_finite,
    8: check_rewind,
    9: check_rope,
    10: check_columns,
    11: check_head,
    12: check_chunk,
    13: check_configuration,
    14: check_offset,
    15: check_nondeterminism,
    16: check_sampling,
    18: check_nothing,
    20: check_identical,
}


@pytest.mark.parametrize("seed", SEEDS)
# In the first tier a case a kind of verdict; `test_verdict_rules.py` has each rule, and the tests of the cases each fault.
@pytest.mark.parametrize(
    "number",
    some_now(CHECKS, *(n for n, number in enumerate(CHECKS) if number in (6, 13, 15, 18, 20))),
)
def test_verdict(number: int, seed: int) -> None:
    trial, verdict = explained(number, seed)
    assert verdict.kind == CASES[number].verdict, verdict.sentence
    assert any(each.decided for each in verdict.evidence) or verdict.kind == "undetermined"
    CHECKS[number](trial, verdict)
    if number in OUTSIDE and seed == 3:
        oracle = verdict.control("oracle")
        assert oracle is not None and oracle.result == "outside", oracle


@pytest.mark.parametrize("seed", some_now(range(len(VALUES)), 0))
def test_other_bits_are_no_rounding(seed: int) -> None:
    """Nothing is known of why a value has other bits, so a fault or nothing is said, and never that it is rounding."""
    _, verdict = explained(17, seed)
    payload = tuple(VALUES)[seed % len(VALUES)] == "NaN payload"
    assert verdict.kind == ("bug" if payload else "undetermined"), verdict.sentence


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_one_unit_is_no_path(seed: int) -> None:
    """A single unit in the last place, on a path that no other row shows to matter, has no known cause."""
    _, verdict = explained(19, seed)
    assert verdict.kind == "undetermined", verdict.sentence


def test_all_cases_are_here() -> None:
    assert set(CASES) == set(range(1, 21)) == set(CHECKS) | {17, 19}
    assert {number for number in CASES if CASES[number].verdict is None} == {17, 19}
