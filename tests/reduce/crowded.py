"""Injected cases among neighbours that have nothing to do with them, and with prompts longer than they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import CASES
from fault_case import Trial
from fault_models import fixture, prompt

from detdiff.reduce import Reduction, reduce
from detdiff.scenario import Scenario

LENGTHS = (30, 22, 17)


def crowded(number: int, seed: int, lengths: Sequence[int] = LENGTHS, **keys: Any) -> Trial:
    """An injected case with more requests of these prompt lengths on both sides; ``keys`` are changed in all requests."""
    trial = CASES[number].trial(seed)
    if number == 1:
        # In two layers of float32 a changed sum soon reaches a cache.
        trial = replace(trial, loaded=fixture("T", "f32", seed))
    return replace(
        trial,
        scenario_a=_with_others(trial.scenario_a.with_changes(**keys), lengths),
        scenario_b=_with_others(trial.scenario_b.with_changes(**keys), lengths),
    )


def _with_others(scenario: Scenario, lengths: Sequence[int]) -> Scenario:
    first = scenario.requests[0]
    others = tuple(
        replace(first, id=f"other{n}", tokens=tuple(prompt(length, ("other", n))))
        for n, length in enumerate(lengths)
    )
    return replace(scenario, requests=(*scenario.requests, *others))


def reduced(trial: Trial, folder: Path, **options: Any) -> Reduction:
    """The reduction of a trial, with its injected faults in place in every run."""
    with trial.around:
        return reduce(
            trial.scenario_a,
            trial.scenario_b,
            folder=folder,
            loaded=trial.loaded,
            draft=trial.draft,
            **options,
        )
