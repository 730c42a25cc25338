"""Cases 15, 18 and 20: a run that does not repeat, nothing to compare, and no fault at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES
from command_line import paragraph, run
from fault_models import fixture
from other_cases import GROUNDS, NO_FAULT, sound, variants
from tiers import some_now
from trials import SEEDS, Recorded, check_named, diverged

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.errors import NothingComparable
from detdiff.trace import Trace, TraceWriter


@pytest.mark.parametrize("seed", SEEDS)
def test_a_race_is_an_origin_that_does_not_repeat(recorded: Recorded, tmp_path: Path, seed: int) -> None:
    trial = CASES[15].trial(seed)
    check_named(recorded.compare(trial), trial.expected)
    with trial.around:
        options = RecordOptions(observe=2)
        again = record(trial.scenario_a, tmp_path / "again", loaded=trial.loaded, options=options)
    repeated = compare(recorded.a, again)
    assert {r.origin.site for r in diverged(repeated) if r.origin} == {trial.expected.site}
    # The check that recording changes nothing runs the first forwards again: it cannot pass either.
    assert again.header["observer"]["equal"] is False


@pytest.mark.parametrize("seed", range(2))
def test_nothing_to_compare_is_said_and_why(recorded: Recorded, seed: int) -> None:
    trial = CASES[18].trial(seed)
    why = "only run a has it" if seed % 2 else "the prompts differ from token"
    assert trial.expected.error is NothingComparable
    with pytest.raises(NothingComparable, match=why):
        recorded.compare(trial)
    answer = run("compare", recorded.a.path, recorded.b.path)
    assert why in paragraph(answer, code=3)


def test_an_empty_trace_is_not_identical_to_itself(recorded: Recorded, tmp_path: Path) -> None:
    recorded.record(CASES[20].trial(0))
    header = {
        key: recorded.a.header[key] for key in ("scenario", "model", "environment", "requests", "sites")
    }
    with TraceWriter(tmp_path / "empty", header) as writer:
        writer.finish(complete=True, times={}, observer={})
    empty = Trace.open(tmp_path / "empty")
    for other in (empty, recorded.b):
        with pytest.raises(NothingComparable):
            compare(empty, other)


@pytest.mark.parametrize("seed", some_now(range(2 * len(GROUNDS)), 3, 5))
def test_no_fault_is_no_difference(tmp_path: Path, seed: int) -> None:
    name, fmt = GROUNDS[seed % len(GROUNDS)]
    of = fixture(name, fmt, seed)
    runs = [sound(seed, name, schedule, layout) for schedule, layout in variants(name)]
    traces = [
        record(asked, tmp_path / str(n), loaded=of, options=RecordOptions(observe=0))
        for n, asked in enumerate((*runs, runs[0]))
    ]
    for other in traces[1:]:
        divergence = compare(traces[0], other)
        assert divergence.identical and divergence.stage is None and divergence.bookkeeping == ()
        assert divergence.compared.differing == 0 and divergence.compared.digests > 3000
        assert all(request.origins == () for request in divergence.requests)


def test_the_trials_without_a_fault_are_all_pairs() -> None:
    pairs = {(name, fmt, a, b) for name, fmt, a, b in NO_FAULT}
    assert len(pairs) == len(NO_FAULT) == 4 * 10 + 2 * 3
    assert {CASES[20].trial(seed).loaded.identity["model_type"] for seed in range(len(NO_FAULT))} == {
        "llama", "qwen3_next", "gemma3_text",
    }  # fmt: skip
