"""Cases 17 and 19: the smallest differences there are, each found as itself and nowhere else."""

from __future__ import annotations

import pytest
from cases import CASES
from tiers import FULL, THOROUGH, some_now
from trials import SEEDS, Recorded, check_named, diverged
from value_cases import GROUNDS, VALUES

KINDS = tuple(VALUES)


@pytest.mark.parametrize("seed", some_now(range(3 * len(VALUES)), *range(len(VALUES))))
def test_other_bits_are_found_as_what_they_are(recorded: Recorded, seed: int) -> None:
    trial = CASES[17].trial(seed)
    kind = KINDS[seed % len(KINDS)]
    divergence = recorded.compare(trial, capture="full")
    if kind == "float16":
        # A site in another dtype is so for every request that the forward held.
        assert {r.origin.site for r in diverged(divergence) if r.origin} == {trial.expected.site}
        assert {r.stage for r in diverged(divergence)} == {"dtype"} and divergence.stage == "dtype"
        origin = diverged(divergence)[0].origin
        assert origin is not None and origin.magnitude is not None
        assert (origin.magnitude.dtype_a, origin.magnitude.dtype_b) == ("F32", "F16")
        return
    check_named(divergence, trial.expected)
    (request,) = diverged(divergence)
    assert request.origin is not None and sum(count.count for count in request.origins) == 1
    found = request.origin.magnitude
    assert found is not None and found.dtype_a == found.dtype_b == "F32"
    if kind == "negative zero":
        assert (found.differing, found.max_ulp, found.max_abs, found.nan_b) == (1, 0, 0.0, 0)
    elif kind == "NaN payload":
        assert (found.differing, found.nan_a, found.nan_b, found.non_finite) == (1, 1, 1, 1)
    else:
        assert found.differing > found.elements // 2 and 0 < (found.max_abs or 0) < 4e-3


# A fixture, a format and a layout each.
@pytest.mark.parametrize("seed", some_now(range(2 * len(GROUNDS)), 0, 1, 2, 4, 7))
def test_one_unit_is_found_in_its_row_and_nowhere_else(recorded: Recorded, seed: int) -> None:
    trial = CASES[19].trial(seed)
    divergence = recorded.compare(trial)
    check_named(divergence, trial.expected)
    (request,) = diverged(divergence)
    assert sum(count.count for count in request.origins) == 1


def test_every_fixture_and_format_has_its_trials() -> None:
    assert len(SEEDS) == (10 if FULL else 3 if THOROUGH else 1)
    assert {name for name, _, _ in GROUNDS} == {"T", "S", "G", "H"}
    assert {fmt for _, fmt, _ in GROUNDS} == {"f32", "f16", "bf16", "q4"}
