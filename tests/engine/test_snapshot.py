"""A packed run goes on from a snapshot of any of its steps as it went on the first time, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from runs import bits, model, scenario
from test_speculation import drafting
from tiers import some_now

from detdiff.engines.mlx.packed import PackedEngine, Snapshot, StopRun
from detdiff.engines.mlx.requests import prepare
from detdiff.engines.mlx.serve import Models, Sessions, packed_engine
from detdiff.engines.mlx.taps.forward import Forward
from detdiff.engines.schedule import Work

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"prefill_chunk": 5}),
    "sampled": ("llama", {"temperature": 1.0, "seed": 3}),
    "speculation": ("llama", {"draft": "tiny", "drafts": 3, "row_budget": 9}),
    "a window that wraps": ("gemma3_text", {"draft": "tiny", "drafts": 3}),
    "pages": ("llama", {"draft": "tiny", "drafts": 3, "page_tokens": 4}),
    "pages that are shared": ("llama", {"page_tokens": 2, "share_prefix": True}),
}


class Tape:
    """The bits of every forward's logits, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, NDArray[Any]]] = []

    def __call__(self, forward: Forward, logits: Any) -> None:
        self.seen.append((forward.index, forward.model, bits(logits)))


@pytest.mark.parametrize("case", some_now(CASES, 5))
def test_every_step_can_be_gone_on_from(case: str) -> None:
    arch, keys = CASES[case]
    asked = scenario("continuous", "packed", arrivals=(0, 1, 3), max_tokens=9, **keys)
    models = Models.of(asked, model(arch), drafting(arch, "f32", 5))
    sessions = Sessions.of(asked, models)
    snapshots: list[tuple[int, Snapshot]] = []

    def keep(engine: PackedEngine, step: int) -> None:
        snapshots.append((step, engine.snapshot()))

    def run(**more: Any) -> tuple[list[Work], Tape, dict[str, dict[str, int]]]:
        work, tape = prepare(asked, models.target), Tape()
        with sessions.running(None, tape, packed=True):
            engine = packed_engine(asked, sessions)
            engine.run(work, asked.schedule, lambda *_: None, **more)
        return work, tape, engine.counts()

    whole, tape, counts = run(before_step=keep)
    assert [step for step, _ in snapshots] == list(range(len(snapshots))) and len(snapshots) > 5
    # In no particular order, and each twice: going on changes no snapshot.
    for _, snapshot in [*snapshots[::-1], *snapshots[::3]]:
        again, rest, counted = run(from_=snapshot)
        assert [item.generated for item in again] == [item.generated for item in whole]
        assert counted == counts
        expected = [one for one in tape.seen if one[0] >= snapshot.forwards]
        assert [one[:2] for one in rest.seen] == [one[:2] for one in expected]
        assert all(np.array_equal(a[2], b[2]) for a, b in zip(rest.seen, expected, strict=True))


def test_a_run_ends_where_it_is_told_to() -> None:
    asked = scenario("continuous", "packed", arrivals=(0, 1, 3), max_tokens=9)
    sessions = Sessions.of(asked, Models.of(asked, model("llama")))

    def stop(engine: PackedEngine, step: int) -> None:
        if step == 4:
            raise StopRun

    for ends in ({"until": 4}, {"before_step": stop}):
        work = prepare(asked, model("llama"))
        with sessions.running(None, None, packed=True):
            engine = packed_engine(asked, sessions)
            engine.run(work, asked.schedule, lambda *_: None, **ends)
        assert engine.clock.steps == 4 and [len(item.generated) for item in work] == [4, 3, 1]
