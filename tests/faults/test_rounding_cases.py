"""Cases 1, 4 and 5: what a change of kernels and of precision looks like to compare."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES
from fault_models import threshold
from tiers import FULL, THOROUGH, some_now
from trials import SEEDS, Recorded, check_named, diverged

from detdiff.compare import Divergence
from detdiff.scenario import Scenario


def check_paths(divergence: Divergence, one: str, more: str) -> None:
    """Every origin is where run A took one kernel and run B the other."""
    for request in diverged(divergence):
        assert request.origins
        for count in request.origins:
            assert (count.path_a, count.path_b) == (f"reference/{one}", f"reference/{more}"), count


SWITCHED = SEEDS if FULL else (0, 3, 4) if THOROUGH else (3,)
"""The first tier takes a seed of fewer tokens."""


@pytest.fixture(scope="module")
def switched(recorded: Recorded) -> list[Divergence]:
    return [recorded.compare(CASES[1].trial(seed)) for seed in SWITCHED]


def test_a_kernel_switch_parts_where_the_kernels_do(switched: list[Divergence]) -> None:
    for seed, divergence in zip(SWITCHED, switched, strict=True):
        expected = CASES[1].trial(seed).expected
        check_named(divergence, expected)
        check_paths(divergence, "mlx-cuda/gemv", "mlx-cuda/gemm")
        assert expected.rows is not None
        for request in diverged(divergence):
            origin = request.origin
            assert origin is not None and origin.rows_a is not None and origin.rows_b is not None
            assert origin.rows_a < expected.rows[0] <= origin.rows_b
            assert f"m < chain_from ({expected.rows[0]})" in str(origin.rule_a)


@pytest.mark.thorough
def test_its_flips_have_margins_and_differing_entries(switched: list[Divergence]) -> None:
    flipped = [request for divergence in switched for request in divergence.requests if request.flip]
    assert len(flipped) >= 2
    for request in flipped:
        flip, differing_entries = request.flip, request.differing_entries
        assert flip is not None and flip.kind == "token"
        assert flip.a.margin is not None and flip.b.margin is not None
        assert (
            request.cache_entry is not None and differing_entries is not None and differing_entries.count > 0
        )
        assert request.cache_entry.position <= flip.position == differing_entries.alive_at
    # Some diverged and kept their tokens.
    assert any(r.flip is None for divergence in switched for r in diverged(divergence))


@pytest.mark.parametrize("limit", some_now([0, 1024], 1))
def test_one_kernel_for_all_rows_gives_one_answer(recorded: Recorded, limit: int) -> None:
    for seed in (4, 5) if FULL else (4,):
        trial = CASES[1].trial(seed)
        tokens = 60 if THOROUGH else 20
        held = recorded.compare(trial, kernels=threshold(limit), max_tokens=tokens)
        assert held.identical and held.compared.rows > 100


def test_sums_in_less_precision_part_where_the_kernels_do(recorded: Recorded) -> None:
    for seed in SEEDS:
        trial = CASES[4].trial(seed)
        divergence = recorded.compare(trial)
        check_named(divergence, trial.expected)
        check_paths(divergence, "fixture/narrow", "mlx-cuda/gemm")
        for request, prompt in zip(divergence.requests, (12, 3, 40), strict=True):
            assert request.origin is not None and request.origin.position == prompt - 1


def test_narrow_inputs_part_at_the_first_layer_that_rounds(recorded: Recorded) -> None:
    for seed in SEEDS:
        trial = CASES[5].trial(seed)
        divergence = recorded.compare(trial, capture="full")
        check_named(divergence, trial.expected)
        for request, prompt in zip(divergence.requests, (12, 9, 40), strict=True):
            origin = request.origin
            # Prompts are more than one row in both runs, the row that chooses the first token is not.
            assert origin is not None and origin.position == prompt - 1
            # Hundreds of units, in nearly every element: no other order of a float32 sum does that.
            assert origin.magnitude is not None and origin.magnitude.differing > 60
            assert 2e-5 < (origin.magnitude.max_abs or 0) < 1e-2


def settings(asked: Scenario) -> dict[str, Any]:
    return {k: v for k, v in asked.to_dict().items() if k not in ("schedule", "layout", "request")}


@pytest.mark.parametrize("number", [1, 4, 5])
def test_both_runs_are_asked_for_the_same_numbers(number: int) -> None:
    for seed in SEEDS:
        trial = CASES[number].trial(seed)
        assert settings(trial.scenario_a) == settings(trial.scenario_b)
