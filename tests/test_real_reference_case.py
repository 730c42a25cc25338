"""The reference case on real weights: a request's text flips because another one's prompt shared a forward with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import only_in_full

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.serve import Models
from detdiff.explain import Verdict, explain
from detdiff.report import verdict_text
from detdiff.scenario import Scenario

pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).parents[1] / "traces" / "reference-case"
SHORT = 6
"""Tokens of a request where the flip is not waited for."""


class Case:
    """The four scenarios on one pair of models, which are loaded once."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._paths = {"model": str(target), "draft": str(draft)}
        self._models = Models.of(self.scenario("serial"))

    def scenario(self, name: str, **changes: object) -> Scenario:
        asked = Scenario.from_toml(FOLDER / f"smollm2-{name}.toml")
        return asked.with_changes(**self._paths, **changes)

    def compare(self, folder: Path, *names: str, **changes: object) -> Divergence:
        traces = [
            record(
                self.scenario(name, **changes),
                folder / name,
                loaded=self._models.target,
                draft=self._models.draft,
                options=RecordOptions(observe=0),
            )
            for name in names
        ]
        return compare(*traces)

    def explain(self, *names: str) -> Verdict:
        a, b = (self.scenario(name) for name in names)
        return explain(a, b, loaded=self._models.target, draft=self._models.draft)


@pytest.fixture(scope="module")
def case(smollm2_packed_bf16: Path, smollm2_draft_3bit: Path) -> Case:
    return Case(smollm2_packed_bf16, smollm2_draft_3bit)


def test_the_first_difference_arises_in_the_shared_forward(case: Case, tmp_path: Path) -> None:
    found = case.compare(tmp_path, "serial", "continuous", max_tokens=SHORT)
    anchor = found.request("anchor")
    assert anchor.flip is None and anchor.stage == found.request("follower").stage == "bits"
    origin = anchor.origin
    assert origin is not None and origin.composition_b is not None
    members = [(member.request, member.phase, member.rows) for member in origin.composition_b.members]
    assert sorted(members) == [("anchor", "verify", 4), ("follower", "prefill", 121)]
    assert (origin.path_a, origin.path_b) == ("reference/candle-metal/mv", "reference/candle-metal/mm")
    for request in found.requests:
        assert request.verification is not None
        for run in (request.verification.a, request.verification.b):
            assert run is not None and run.agrees and 0 <= run.accepted < run.proposed


@only_in_full("the reference case of the built-in models shows it")
def test_with_the_path_held_nothing_differs(case: Case, tmp_path: Path) -> None:
    found = case.compare(tmp_path, "held-serial", "held-continuous", max_tokens=SHORT)
    assert found.identical
    for request in found.requests:
        assert request.verification is not None and request.verification.a == request.verification.b


@only_in_full("half an hour of a core")
def test_the_whole_investigation(case: Case) -> None:
    verdict = case.explain("serial", "continuous")
    assert verdict.kind == "numerics" and verdict.divergence is not None
    anchor, follower = (verdict.divergence.request(id) for id in ("anchor", "follower"))
    assert anchor.flip is None and follower.flip is not None and follower.swapped
    text = verdict_text(verdict)
    assert "request anchor: diverges in bits; no flip within its 96 generated tokens" in text
    for title in (
        "The flip",
        "Where it arose",
        "What carried it",
        "The controls",
        "Against float64",
        "The verdict",
    ):
        assert f"\n{title}\n---" in text
