"""Each fault that is injected in a model is named by the failure, at its place."""

from __future__ import annotations

import pytest
from injected_faults import INJECTED_FAULTS, NAMED
from inner_runs import Run, text_of
from tiers import some_now

TEXT = """
import pytest
from injected_faults import INJECTED_FAULTS
from tiny import tiny

@pytest.mark.batch_invariant(model=tiny("llama"), schedules="static:2", max_tokens=4, level={level!r})
def test_it():
    pass

@pytest.fixture(autouse=True)
def injected():
    with INJECTED_FAULTS[{name!r}]():
        yield
"""


@pytest.mark.parametrize("name", some_now(INJECTED_FAULTS, 0, 1))
def test_the_failure_names_the_injected_place(run: Run, name: str) -> None:
    result = run(TEXT.format(name=name, level="exact"))
    said = text_of(result)
    assert NAMED[name] in said
    # Only the kernel knows nothing of a batch: the others are faults of the padded layout's own classes.
    failed = 2 if name == "kernel_switch" else 1
    result.assert_outcomes(failed=failed, passed=2 - failed)
    if name == "wrong_offset":
        assert "bookkeeping: in run b: " in said and "offset" in said
    if name == "leak":
        assert (
            "a cache entry was read otherwise than it was written" in said and "changed entry: in b" in said
        )


@pytest.mark.parametrize("name", some_now([name for name in INJECTED_FAULTS if name != "kernel_switch"], 0))
def test_a_fault_is_beyond_rounding(run: Run, name: str) -> None:
    result = run(TEXT.format(name=name, level="bounded"))
    result.assert_outcomes(failed=1, passed=1)
    why = {
        "leak": "the runs diverge in bookkeeping, which no rounding does",
        "wrong_offset": "the runs diverge in bookkeeping, which no rounding does",
        "lost_rows": "layers.0.self_attn.rope.q (rope",
    }
    assert why[name] in text_of(result)


def test_another_order_of_adding_is_rounding(run: Run) -> None:
    run(TEXT.format(name="kernel_switch", level="bounded")).assert_outcomes(passed=2)
