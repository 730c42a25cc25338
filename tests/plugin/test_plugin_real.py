"""On a real model's weights: native passes, a profile whose kernel depends on the rows fails, and is no more than rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from inner_runs import Run, text_of
from tiers import only_in_full

pytestmark = pytest.mark.thorough
HALF_AN_HOUR = only_in_full("the same on the weights in another dtype")
A_PROFILE = only_in_full("what the tests of the plugin show of tiny models, on SmolLM2")

NATIVE = """
def test_native(batch_invariance):
    found = batch_invariance.check({model!r}, ["Hi", "The sky is"], schedules=("static:2", "continuous:2"), max_tokens=2)
    assert found.compositions == ("static:2-padded", "static:2-packed", "continuous:2-padded", "continuous:2-packed")
    assert found.sites > 400 and found.tokens == 16
"""
PROFILE = """
import pytest

PROFILE = dict(schedules="static:2", layouts="packed", kernels="candle-metal", chat=True)
SKY = ["Name three rivers.", "Why is the sky blue?"]

@pytest.mark.parametrize("level", ["exact", "bounded"])
def test_profile(batch_invariance, level):
    batch_invariance.check({model!r}, SKY, level=level, max_tokens=2, **PROFILE)

def test_profile_before_the_flip(batch_invariance):
    batch_invariance.check({model!r}, SKY, level="tokens", max_tokens=1, **PROFILE)
"""


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Path:
    """Laid out before `pytester` gives the test a home of its own."""
    find: Callable[[str], Path] = request.getfixturevalue
    return find(request.param)


# MLX needs half a second a row for 4-bit weights with bfloat16 activations on a CPU; the profile's kernels do not.
@pytest.mark.parametrize(
    "model", ["smollm2_packed_f32", pytest.param("smollm2_bf16", marks=HALF_AN_HOUR)], indirect=True
)
@pytest.mark.real_model
def test_native_passes(model: Path, run: Run) -> None:
    run(NATIVE.format(model=str(model))).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=A_PROFILE) for name in ("smollm2_bf16", "smollm2_packed_bf16")],
    indirect=True,
)
@pytest.mark.real_model
def test_a_profile_fails_by_rounding_alone(model: Path, run: Run) -> None:
    result = run(PROFILE.format(model=str(model)))
    result.assert_outcomes(passed=2, failed=1)
    assert {line.split(" - ")[0] for line in result.outlines if line.startswith("FAILED")} == {
        "FAILED test_it.py::test_profile[exact]"
    }
    said = text_of(result)
    assert f"static:2-packed of {model.name} not invariant at level exact" in said
    assert 'flip: generated token 1 is 6376 " sky" in a and 2988 " answer" in b' in said
    assert "top two swapped margin 0.125000 in a, 0.000000 in b" in said
    assert "rule: candle-metal: second-to-last dimension 1 -> mv" in said
    assert "rule: candle-metal: second-to-last dimension 2.. -> mm" in said
