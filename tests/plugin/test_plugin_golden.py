"""The life of golden traces: written by a run that fails, passed, changed, rewritten by a run that fails, passed."""

from __future__ import annotations

from pathlib import Path

import pytest
from inner_runs import Run, text_of

from detdiff.check.failure import place
from detdiff.trace import Trace

TEXT = """
import pytest
from injected_faults import INJECTED_FAULTS
from tiny import tiny

MODEL = tiny("llama")
PLANTED = {injected!r}

@pytest.mark.batch_invariant(
    model=MODEL, schedules="static:2", layouts="padded", prompts=[[1, 2, 3], [4]], max_tokens=3, level="golden"
)
def test_it(): pass

@pytest.fixture(autouse=True, scope="module")
def injected():
    if not PLANTED:
        yield
        return
    with INJECTED_FAULTS[PLANTED]():
        yield
"""
PLACE = "test_it/test_it/static-2-padded"


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


def test_its_whole_life(pytester: pytest.Pytester, run: Run, again: Run) -> None:
    sound, changed = TEXT.format(injected=""), TEXT.format(injected="kernel_switch")
    golden = pytester.path / PLACE

    first = run(sound)
    first.assert_outcomes(failed=1)
    assert f"why: there was no golden trace, and {PLACE} was written" in text_of(first)
    assert "commit it, and run the test again" in text_of(first)
    written = Trace.open(golden, checked=True)
    assert written.complete and written.scenario["model"] == "tiny-llama-f32-0"
    assert size(golden) < 100_000

    again().assert_outcomes(passed=1)

    failed = run(changed)
    failed.assert_outcomes(failed=1)
    said = text_of(failed)
    assert f"why: the run is not the golden trace {PLACE}" in said
    assert "a: the golden trace b: static:2, layout padded" in said
    assert "origin: layers.0.mlp.gate_proj (linear, layer 0)" in said
    assert f"run with --detdiff-update and commit {PLACE}" in said
    assert "kept: a, b, report.html in .detdiff/test_it.py/test_it/static-2-padded" in said
    assert Trace.open(golden).header == written.header

    updated = again("--detdiff-update")
    updated.assert_outcomes(failed=1)
    assert f"{PLACE} was rewritten; commit it, and run the test again without --detdiff-update" in text_of(
        updated
    )
    again().assert_outcomes(passed=1)
    # What did not change is not written again.
    again("--detdiff-update").assert_outcomes(passed=1)

    run(sound).assert_outcomes(failed=1)
    assert [path.name for path in golden.parent.iterdir()] == [golden.name]


def test_a_damaged_golden_trace_is_a_failure_until_it_is_rewritten(
    pytester: pytest.Pytester, run: Run, again: Run
) -> None:
    run(TEXT.format(injected="")).assert_outcomes(failed=1)
    shard = pytester.path / PLACE / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    failed = again()
    failed.assert_outcomes(failed=1)
    assert "the golden trace cannot be read: " in text_of(failed)
    again("--detdiff-update").assert_outcomes(failed=1)
    again().assert_outcomes(passed=1)


def test_another_model_is_not_the_golden_trace(pytester: pytest.Pytester, run: Run) -> None:
    text = (
        "def test_it(batch_invariance):\n"
        "    batch_invariance.check({model!r}, [[5, 6]], schedules='serial', layouts='padded', max_tokens=2, level='golden')\n"
    )
    run(text.format(model="builtin")).assert_outcomes(failed=1)
    failed = run(text.format(model="builtin-draft"))
    failed.assert_outcomes(failed=1)
    assert "traces are of different models" in text_of(failed)


def test_a_file_where_it_belongs_is_said_and_replaced(
    pytester: pytest.Pytester, run: Run, again: Run
) -> None:
    folder = pytester.path / "test_it"
    folder.write_text("")
    result = run(TEXT.format(injected=""))
    result.assert_outcomes(failed=1)
    assert "NOT CHECKED: The golden trace could not be written (" in text_of(result)
    folder.unlink()
    (folder / "test_it").mkdir(parents=True)
    (pytester.path / PLACE).write_text("")
    result = again("--detdiff-update")
    result.assert_outcomes(failed=1)
    assert "was rewritten; commit it" in text_of(result)
    again().assert_outcomes(passed=1)


def test_names_that_differ_have_golden_traces_of_their_own() -> None:
    file = Path("test_it.py")
    names = ["test_it[a/b]", "test_it[a-b]", "test_it[a*b]"]
    assert len({place(file, name, "static:2-packed") for name in names}) == 3
    assert place(file, "TestIt::test_it", "static:2-packed, batch 0") == Path(
        "test_it/TestIt-test_it/static-2-packed-batch-0"
    )
