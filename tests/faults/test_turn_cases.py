"""Faults of a cache's life over turns are named at their place and are bugs; without them nothing differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_case import Expected, Trial
from tiers import FULL, THOROUGH
from trials import Recorded
from turn_cases import TURN_CASES, TurnTrial, turn_cases

from detdiff.compare import compare
from detdiff.explain import explain

SEEDS = range(10) if FULL else range(4) if THOROUGH else range(1)
"""DETDIFF_TEST_FULL=1 runs all ten."""
TWINS = [kind for kind in TURN_CASES if kind not in ("trim one too few", "offset not moved on load")]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def check(recorded: Recorded, trial: TurnTrial, controls: list[str]) -> None:
    recorded.record(Trial(trial.scenario_a, trial.scenario_b, trial.loaded, Expected(), trial.around))
    divergence = compare(recorded.a, recorded.b)
    with trial.around:
        verdict = explain(recorded.a, recorded.b, loaded=trial.loaded, controls=controls, repeats=1)
    named = [
        finding
        for finding in divergence.bookkeeping
        if finding.what == trial.what and finding.request == trial.request
    ]
    assert named, divergence.bookkeeping
    for words in trial.words:
        assert words in named[0].detail, named
    assert verdict.kind == "bug" and verdict.rule == "bookkeeping", verdict.sentence


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [*TURN_CASES, "adapter left on"])
def test_a_fault_of_a_turn_is_a_bug_at_its_place(
    recorded: Recorded, adapters: Path, kind: str, seed: int
) -> None:
    check(recorded, turn_cases(adapters)[kind](seed), ["repeat"] if seed == 0 else [])


@pytest.mark.parametrize("seed", SEEDS)
def test_without_its_fault_every_one_is_identical(recorded: Recorded, adapters: Path, seed: int) -> None:
    # In pages, saved, quantised, batched and as a chat; those that differ in the fault alone are one case.
    for kind in (*TWINS, "adapter left on"):
        trial = turn_cases(adapters)[kind](seed)
        recorded.record(Trial(trial.scenario_a, trial.scenario_b, trial.loaded, Expected()))
        divergence = compare(recorded.a, recorded.b)
        assert divergence.identical and not divergence.bookkeeping, (kind, divergence.bookkeeping)
        assert explain(recorded.a, recorded.b, loaded=trial.loaded).kind == "identical"
