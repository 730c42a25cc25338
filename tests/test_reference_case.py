"""The reference case on the built-in models: batching changes an answer, through the cache, by the kernels' choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import THOROUGH

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.serve import Models
from detdiff.report import divergence_text
from detdiff.scenario import Scenario
from detdiff.trace import Trace

FOLDER = Path(__file__).parents[1] / "traces" / "reference-case"
NAMES = ("serial", "continuous", "held-serial", "held-continuous")
NOW = NAMES if THOROUGH else NAMES[:2]


def asked(name: str) -> Scenario:
    return Scenario.from_toml(FOLDER / f"{name}.toml")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    models = Models.of(asked("serial"))
    folder = tmp_path_factory.mktemp("reference-case")
    return {
        name: record(
            asked(name),
            folder / name,
            loaded=models.target,
            draft=models.draft,
            options=RecordOptions(observe=2),
        )
        for name in NOW
    }


@pytest.fixture(scope="module")
def found(traces: dict[str, Trace]) -> Divergence:
    return compare(traces["serial"], traces["continuous"])


def test_the_four_scenarios_differ_in_schedule_and_threshold_alone() -> None:
    serial = asked("serial")
    assert asked("continuous") == serial.with_changes(schedule="continuous", active=2)
    assert asked("held-serial") == serial.with_changes(split_rows=1024)
    assert asked("held-continuous") == asked("continuous").with_changes(split_rows=1024)


def test_the_prompts_have_their_lengths_and_every_run_was_observed(traces: dict[str, Trace]) -> None:
    for trace in traces.values():
        assert [len(request["tokens"]) for request in trace.requests] == [128, 121]
        assert trace.header["observer"] == {"forwards": 10, "equal": True}


def test_one_request_flips_and_the_other_does_not(found: Divergence) -> None:
    anchor, follower = found.request("anchor"), found.request("follower")
    assert anchor.flip is not None and follower.flip is None and follower.stage == "bits"
    assert anchor.swapped and anchor.flip.index > 40
    verification = anchor.verification
    assert verification is not None and verification.flip_a is not None and verification.flip_b is not None
    assert verification.proposals_equal
    assert verification.flip_a.block.proposals == verification.flip_b.block.proposals
    assert verification.first_other_choice == anchor.flip.index


def test_nothing_arises_in_the_flips_own_forward(found: Divergence) -> None:
    anchor = found.request("anchor")
    forward = anchor.flip_forward
    assert anchor.inherited and forward is not None and forward.origins == 0 and forward.paths_equal
    for composition in (forward.composition_a, forward.composition_b):
        assert composition is not None
        assert [(m.request, m.phase, m.rows) for m in composition.members] == [("anchor", "verify", 4)]


def test_the_origin_is_the_first_shared_forward(found: Divergence) -> None:
    anchor = found.request("anchor")
    origin = anchor.origin
    assert origin is not None and origin.composition_a is not None and origin.composition_b is not None
    assert [(m.request, m.phase, m.rows) for m in origin.composition_a.members] == [("anchor", "verify", 4)]
    assert [(m.request, m.phase, m.rows) for m in origin.composition_b.members] == [
        ("anchor", "verify", 4),
        ("follower", "prefill", 121),
    ]
    assert (origin.path_a, origin.path_b) == ("reference/candle-metal/mv", "reference/candle-metal/mm")
    assert anchor.cache_entry is not None and anchor.differing_entries is not None
    assert anchor.differing_entries.count > 0 and anchor.differing_entries.alive_at == anchor.flip.position  # type: ignore[union-attr]


def test_acceptance_differs_as_the_engine_counts_it(found: Divergence) -> None:
    verification = found.request("anchor").verification
    assert verification is not None and verification.a is not None and verification.b is not None
    assert verification.a.agrees and verification.b.agrees
    assert verification.a.proposed != verification.b.proposed
    text = " ".join(divergence_text(found).split())
    assert f"acceptance: {verification.a.accepted} of {verification.a.proposed} in" in text


@pytest.mark.thorough
def test_one_kernel_for_every_size_gives_the_same_answers_and_acceptance(traces: dict[str, Trace]) -> None:
    held = compare(traces["held-serial"], traces["held-continuous"])
    assert held.identical and not held.bookkeeping
    for request in held.requests:
        assert request.verification is not None and request.verification.a == request.verification.b
