"""Forwards in time: the reference case as it was recorded, and events and thresholds that it does not have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_traces import Ask, Plan, serial, together, write_trace

from detdiff.compare import Divergence, ForwardPoint, Member, Series, Threshold, compare, series
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.serve import Models
from detdiff.scenario import Scenario
from detdiff.trace import Trace

REFERENCE = Path(__file__).parents[2] / "traces" / "reference-case"
MV, MM = "reference/candle-metal/mv", "reference/candle-metal/mm"


@dataclass(frozen=True)
class Case:
    a: Trace
    b: Trace
    found: Divergence
    series: Series


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    asked = [Scenario.from_toml(REFERENCE / f"{name}.toml") for name in ("serial", "continuous")]
    models, folder = Models.of(asked[0]), tmp_path_factory.mktemp("reference-case")
    a, b = (
        record(
            each.with_changes(lens=True),
            folder / str(n),
            loaded=models.target,
            draft=models.draft,
            options=RecordOptions(observe=0),
        )
        for n, each in enumerate(asked)
    )
    found = compare(a, b)
    return Case(a, b, found, series(a, b, found))


def test_every_forward_is_there_with_its_rows(case: Case) -> None:
    for trace, points in ((case.a, case.series.a), (case.b, case.series.b)):
        assert [point.forward for point in points] == list(range(len(trace.forwards())))
        rows = np.bincount(trace.row_index().forward)
        assert [point.writes for point in points] == rows.tolist()
        # Packed forwards have no padding.
        assert [point.rows for point in points] == rows.tolist()
        assert {point.model for point in points} == {"target", "draft"}
        for point in points:
            assert {member.phase == "draft" for member in point.members} == {point.model == "draft"}


def test_the_first_shared_forward_takes_the_other_path(case: Case) -> None:
    anchor = case.series.requests[0]
    assert anchor.origin_forwards is not None
    a, b = case.series.a[anchor.origin_forwards[0]], case.series.b[anchor.origin_forwards[1]]
    assert a.members == (Member("anchor", "verify", 128, 4),)
    assert b.members == (Member("anchor", "verify", 128, 4), Member("follower", "prefill", 0, 121))
    assert (a.rows, b.rows, a.linear_path, b.linear_path) == (4, 125, MV, MM)
    assert {use.path for use in b.paths} > {MM, "native"}
    flip = case.found.request("anchor").flip
    assert flip is not None and anchor.flip_forwards == (flip.forward_a, flip.forward_b)


def test_thresholds_lie_where_the_paths_were_seen_to_change(case: Case) -> None:
    for run, points in (("a", case.series.a), ("b", case.series.b)):
        (found,) = [threshold for threshold in case.series.thresholds if threshold.run == run]
        rows = {point.rows for point in points if point.model == "target"}
        assert found == Threshold(run, max(m for m in rows if m <= 4), min(m for m in rows if m > 4), MV, MM)


def test_trims_and_verifications_are_told_at_their_forward(case: Case) -> None:
    for trace, points in ((case.a, case.series.a), (case.b, case.series.b)):
        ids = [request["id"] for request in trace.requests]
        for kind in ("trim", "verify"):
            told = [(p.forward, said) for p in points for said in p.events if said.startswith(f"{kind} ")]
            happened = [event for event in trace.events() if event["event"] == kind]
            assert len(told) == len(happened) > 0
            for (forward, said), event in zip(told, happened, strict=True):
                assert forward == event["forward"] and ids[event["request"]] in said
    first = case.series.b[case.series.requests[0].origin_forwards[1]]  # type: ignore[index]
    assert first.events[-3:] == (
        "verify of anchor, 4 proposed, 0 accepted",
        "trim of anchor, 3 asked, 3 done",
        "trim of anchor in the draft, 3 asked, 3 done",
    )
    assert "physical pages 9-16 of follower given as pages 0-7" in first.events


def test_the_draft_has_rows_of_its_own(case: Case) -> None:
    anchor = case.series.requests[0]
    of_draft = [n for n, row in enumerate(anchor.layers.rows) if row.startswith("draft: ")]
    assert [anchor.layers.rows[n] for n in of_draft] == [
        f"draft: {part}" for part in ("before the layers", "layer 0", "layer 1", "after the layers")
    ]
    draft = case.found.request("anchor").draft
    assert draft is not None
    compared = (anchor.layers.state[of_draft] > 0).any(axis=0)
    assert int(compared.sum()) == draft.rows
    assert {name for n in of_draft for name in anchor.sites[n].rows} == {
        site.name for site in case.a.sites if site.name.startswith("draft.")
    }
    target = sum(int((g.state == 3).sum()) for g in anchor.sites if not g.name.startswith("draft: "))
    assert target == sum(count.count for count in case.found.request("anchor").origins)


def test_margins_and_the_lens_agree_with_the_flip(case: Case) -> None:
    anchor = case.series.requests[0]
    flip = case.found.request("anchor").flip
    assert flip is not None and anchor.flip_index == flip.index
    token_a, token_b = anchor.tokens_a[flip.index], anchor.tokens_b[flip.index]
    assert (token_a.token, token_b.token) == (flip.a.token, flip.b.token)
    assert (token_a.margin, token_b.margin) == (flip.a.margin, flip.b.margin)
    assert token_a.delta is not None and flip.a.margin is not None
    assert flip.a.margin + token_a.delta <= 0
    assert all(token.delta is None for token in anchor.tokens_a[flip.index + 1 :])
    layers = sum(site.kind == "block" and not site.name.startswith("draft.") for site in case.a.sites)
    assert [point.layer for point in anchor.lens] == list(range(layers))
    last = anchor.lens[-1]
    # Each run prefers its own token in the end.
    assert last.a is not None and last.b is not None and last.a >= 0 >= last.b
    assert last.a == pytest.approx(flip.a.margin) and last.b == pytest.approx(-(flip.b.margin or 0))


ASKS = (Ask("r0", tuple(range(10, 20)), (30, 31, 32)), Ask("r1", (40, 41, 42), (50, 51)))
SAID: list[tuple[dict[str, Any], str]] = [
    ({"event": "prefix", "request": 1, "from": 0, "tokens": 3}, "prefix of r1, 3 positions from r0"),
    ({"event": "prefix", "request": 0, "from": 0, "tokens": 2}, "prefix of r0, 2 positions run beforehand"),
    ({"event": "page", "request": 0, "index": 0, "page": 3}, "physical page 3 of r0 given as page 0"),
    (
        {"event": "page", "request": 0, "index": 0, "page": 3, "freed": True},
        "physical page 3 of r0 freed",
    ),
    (
        {"event": "quantise", "request": 0, "position": 8, "layers": "0-1"},
        "quantise of r0, from position 8 on, layers 0-1",
    ),
    ({"event": "filter", "requests": [0, 1], "kept": [1]}, "filter (kept r1 of r0, r1)"),
    (
        {"event": "trim", "request": 1, "model": "draft", "asked": 2, "done": 1, "layers": "0"},
        "trim of r1 in the draft, 2 asked, 1 done",
    ),
    ({"event": "something new"}, "something new"),
]


@pytest.mark.parametrize(
    ("event", "said"), SAID, ids=[f"{n}-{event['event']}" for n, (event, _) in enumerate(SAID)]
)
@pytest.mark.parametrize("forward", [-1, 0, 3])
def test_an_event_is_a_short_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: dict[str, Any], said: str, forward: int
) -> None:
    a, b = (write_trace(tmp_path / name, Plan(ASKS, serial(ASKS, chunk=4))) for name in "ab")
    happened = ({**event, "forward": forward},)
    monkeypatch.setattr(Trace, "events", lambda self: happened if self.path == b.path else ())
    made = series(a, b, compare(a, b))
    assert {point.forward: point.events for point in made.b if point.events} == {max(0, forward): (said,)}
    assert not any(point.events for point in made.a)


def test_what_the_recorder_noticed_is_told_in_its_forward(tmp_path: Path) -> None:
    noticed = {"kind": "cache_changed", "request": 0, "layer": 0, "entry": "V", "head": 1, "position": 4}
    plan = Plan(ASKS, serial(ASKS, chunk=4))
    a, b = (
        write_trace(tmp_path / "a", plan),
        write_trace(tmp_path / "b", replace(plan, events={3: [noticed]})),
    )
    made = series(a, b, compare(a, b))
    assert {point.forward: point.events for point in made.b if point.events} == {
        3: ("r0: the cache entry V of layer 0, head 1, position 4 is not what was written",)
    }


def points(plan: Plan, folder: Path) -> tuple[tuple[ForwardPoint, ...], tuple[Threshold, ...]]:
    a, b = write_trace(folder / "a", plan), write_trace(folder / "b", plan)
    made = series(a, b, compare(a, b))
    assert made.a == made.b and len(made.thresholds) % 2 == 0
    return made.a, tuple(threshold for threshold in made.thresholds if threshold.run == "a")


def test_each_change_of_paths_is_a_threshold(tmp_path: Path) -> None:
    def path(rows: int) -> str:
        return "reference/one" if rows == 1 else "reference/few" if rows < 12 else "reference/many"

    found, changes = points(Plan(ASKS, together(ASKS), path=path), tmp_path)
    assert [point.rows for point in found] == [13, 2, 1]
    assert [point.linear_path for point in found] == ["reference/many", "reference/few", "reference/one"]
    assert changes == (
        Threshold("a", 1, 2, "reference/one", "reference/few"),
        Threshold("a", 2, 13, "reference/few", "reference/many"),
    )


def test_calls_of_several_paths_are_named_together(tmp_path: Path) -> None:
    found, changes = points(Plan(ASKS, together(ASKS), whole=4), tmp_path)
    both = "reference/gemm, reference/gemv"
    assert changes == (Threshold("a", 2, 13, "reference/gemv", both),)
    assert {use.path for use in found[0].paths} == {"reference/gemm", "reference/gemv", "native"}


def test_one_path_has_no_threshold(tmp_path: Path) -> None:
    found, changes = points(Plan(ASKS, together(ASKS)), tmp_path)
    assert changes == () and {point.linear_path for point in found} == {"native"}
