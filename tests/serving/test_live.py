"""A live run of any traffic, with requests that end early at any stage, is a scenario that gives the very same bytes."""

from __future__ import annotations

import filecmp
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers import some_now
from tiny import VOCAB, tiny

from detdiff import Scenario, Trace, record
from detdiff.engines.mlx.engine import MlxEngine
from detdiff.engines.mlx.live import PackedLive
from detdiff.errors import ContextExceeded
from detdiff.scenario import Request, Sampling

KINDS = (
    ("llama", "active=3 prefill_chunk=4"),
    ("llama", "active=4 row_budget=6 prefill_chunk=3 page_tokens=4"),
    ("llama", "active=3 prefill_chunk=8 share_prefix=true page_tokens=4"),
    ("llama", "active=3 share_prefix=true capture=full"),
    ("qwen3_moe", "active=3 prefill_chunk=4 split_rows=2"),
    ("gemma3_text", "active=2 prefill_chunk=4 lens"),
    ("qwen2", "schedule=serial prefill_chunk=4"),
)


class Traffic:
    """Requests that come and go at random; ``limit`` of them at a time."""

    def __init__(self, live: PackedLive, limit: int, seed: int) -> None:
        self.live, self.limit, self.draw = live, limit, random.Random(seed)
        self.waiting: list[Request] = []
        self.running: set[str] = set()
        self.told: dict[str, list[int]] = {}
        self.cancelled = 0
        self.count = 0

    def go(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.draw.choice((0, 0, 1, 2))):
                self.ask()
            if self.running and self.draw.random() < 0.15:
                name = self.draw.choice(sorted(self.running))
                self.live.end(name, cancelled=self.draw.random() < 0.5)
                self.running.remove(name)
                self.cancelled += 1
            while self.waiting and self.live.active < self.limit:
                request = self.waiting.pop(0)
                self.live.admit(request, self.draw.choice((None, 0, 3)))
                self.running.add(request.id)
            if self.live.active:
                self.step()
            else:
                self.live.idle()

    def ask(self) -> None:
        draw = self.draw
        begins = [7] * draw.choice((0, 6, 9))
        tokens = (*begins, *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 14))))
        sampling = Sampling(temperature=1.0, seed=self.count) if draw.random() < 0.3 else Sampling()
        if draw.random() < 0.2:
            sampling = Sampling(presence_penalty=1.0, logit_bias=((3, 2.0),))
        request = Request(
            f"r{self.count}",
            tokens=tokens,
            max_tokens=draw.randint(1, 9),
            arrival=self.live.steps,
            sampling=sampling,
        )
        self.count += 1
        self.live.check(request)
        self.waiting.append(request)

    def step(self) -> None:
        for token in self.live.step():
            got = self.told.setdefault(token.request, [])
            assert token.index == len(got)
            got.append(token.token)
            if token.finished is not None:
                self.running.remove(token.request)


@pytest.mark.parametrize(("name", "flags"), some_now(KINDS, 2))
@pytest.mark.parametrize("seed", some_now(range(2), 0, ci=()))
def test_any_traffic_can_be_had_again(name: str, flags: str, seed: int, tmp_path: Path) -> None:
    engine = MlxEngine(tiny(name))
    base = "layout=packed" if "schedule" in flags else "layout=packed schedule=continuous"
    scenario = Scenario.from_flags("tiny", ["x"], f"{base} {flags}")
    limit = 1 if scenario.schedule.kind == "serial" else scenario.schedule.active or 99
    with engine.live(scenario, tmp_path / "live") as live:
        traffic = Traffic(live, limit, seed)
        traffic.go(40)
        live.finish({})
    trace = Trace.open(tmp_path / "live", checked=True)
    assert trace.complete and trace.header["observer"] == {"forwards": 4, "equal": True}
    assert traffic.cancelled and len(trace.requests) > 4
    record(Scenario.from_dict(trace.scenario), tmp_path / "again", engine=engine)
    for path in trace.path.iterdir():
        if path.name != "trace.json":
            assert filecmp.cmp(path, tmp_path / "again" / path.name, shallow=False), path.name
    kept = trace.generated(lens=False)
    for number, request in enumerate(trace.requests):
        mine = kept.token[kept.request == number].tolist()
        told = traffic.told.get(request["id"], [])
        assert mine[: len(told)] == told


def test_a_run_that_lets_one_wait_too_long_is_not_had_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the trace says another forward than the one at which a request came."""
    engine = MlxEngine(tiny("llama"))
    scenario = Scenario.from_flags(
        "tiny", ["x"], "layout=packed schedule=continuous active=3 prefill_chunk=4"
    )
    admit = PackedLive.admit

    def late(self: PackedLive, request: Request, top: Any) -> int:
        return admit(self, replace(request, arrival=request.arrival + 1), top)

    monkeypatch.setattr(PackedLive, "admit", late)
    with engine.live(scenario, tmp_path / "live") as live:
        Traffic(live, 3, 0).go(20)
        live.finish({})
    trace = Trace.open(tmp_path / "live", checked=True)
    record(Scenario.from_dict(trace.scenario), tmp_path / "again", engine=engine)
    assert not filecmp.cmp(
        tmp_path / "live" / "forwards.jsonl", tmp_path / "again" / "forwards.jsonl", shallow=False
    )


def test_log_probabilities_are_those_of_the_logits_that_the_trace_has(tmp_path: Path) -> None:
    engine = MlxEngine(tiny("llama"))
    scenario = Scenario.from_flags("tiny", ["x"], "layout=packed schedule=continuous top=4")
    with engine.live(scenario, tmp_path / "live") as live:
        live.admit(Request("a", tokens=(1, 2, 3), max_tokens=3), 4)
        told = [token for _ in range(3) for token in live.step()]
        live.finish({})
    found = Trace.open(tmp_path / "live").generated(lens=False)
    for place, token in enumerate(told):
        assert token.scores is not None
        assert [id for id, _ in token.scores.top] == found.top_ids[place].tolist()
        differences = [score - token.scores.top[0][1] for _, score in token.scores.top]
        logits = found.top_logits[place]
        assert differences == pytest.approx((logits - logits[0]).tolist(), abs=1e-5)
        assert token.scores.chosen == token.scores.top[0][1] < 0
        assert token.scores.chosen == max(score for _, score in token.scores.top)


def test_a_request_that_does_not_fit_is_refused_before_it_is_taken() -> None:
    engine = MlxEngine(tiny("llama"))
    scenario = Scenario.from_flags("tiny", ["x"], "layout=packed schedule=continuous")
    with engine.live(scenario, None) as live, pytest.raises(ContextExceeded):
        live.check(Request("a", tokens=(1, 2, 3), max_tokens=5000))
