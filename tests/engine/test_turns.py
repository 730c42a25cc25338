"""Later turns: a kept cache, saved or not, against the whole conversation from scratch, bit for bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from runs import Runs, model, prompts
from tiers import some_now

from detdiff.compare import compare
from detdiff.errors import ContextExceeded, EngineRefuses, ScenarioConflict, ScenarioError
from detdiff.explain import explain
from detdiff.scenario import Scenario
from detdiff.trace import Trace

# Shorter than gemma's window, past which the keys of a ring lie in another order; mamba2 sums a chunk in another order.
EXACT = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "qwen3_next", "phi3")


def conversation(**keys: Any) -> Scenario:
    """A request of four turns that takes back, begins anew and goes on, and one that is cancelled and goes on."""
    first, second = prompts((5, 4))
    turns: list[dict[str, Any]] = [
        {"tokens": [5, 6]},
        {"tokens": [9], "rewind": 3},
        {"tokens": [1, 2, 3, 4], "anew": True},
    ]
    requests = [
        {"id": "r0", "tokens": first, "turn": turns},
        {"id": "r1", "tokens": second, "cancel": 2, "turn": [{"tokens": [3, 2]}]},
    ]
    return Scenario.from_dict({"model": "tiny", "max_tokens": 3, "request": requests, **keys})


def events(trace: Trace, kind: str) -> list[dict[str, Any]]:
    return [event for event in trace.events() if event["event"] == kind]


WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "reloaded": {"turns": "reloaded"},
    "static": {"schedule": "static"},
    "continuous": {"schedule": "continuous", "active": 1, "turns": "reloaded"},
    "packed": {"schedule": "static", "layout": "packed"},
    "pages": {"schedule": "static", "layout": "packed", "page_tokens": 4},
}


@pytest.mark.parametrize("arch", some_now(EXACT, 0))
def test_a_kept_cache_is_the_whole_conversation_from_scratch(runs: Runs, arch: str) -> None:
    whole = runs.record(model(arch), conversation(turns="fresh"))
    for way, keys in WAYS.items():
        if "layout" in keys and (arch == "qwen3_next" or (arch == "gemma3_text" and way == "pages")):
            continue
        trace = runs.record(model(arch), conversation(**keys))
        found = compare(whole, trace)
        assert found.identical, (way, found.stage, found.bookkeeping, found.not_compared)
        kept = {turn["request"]: turn["kept"] for turn in events(trace, "turn")}
        # Recurrent states cannot be taken back, so that nothing is kept where a token should be.
        assert (kept[2], kept[3]) == (0 if arch == "qwen3_next" else 10, 0)
        # The packed layout has not run the row of an answer's last token.
        assert (kept[1], kept[5]) == ((7, 5) if "layout" in keys else (8, 6))
        # What was kept is compared as rows of the turns before.
        every = {turn["request"]: turn["tokens"] for turn in events(trace, "turn")}
        assert found.compared.reused_b == 0 and found.compared.rows >= sum(every.values())


def test_a_turn_from_scratch_takes_over_a_prefix_and_is_no_fault(runs: Runs) -> None:
    whole = runs.record(model("llama"), conversation(turns="fresh"))
    trace = runs.record(
        model("llama"),
        conversation(turns="fresh", schedule="static", layout="packed", share_prefix=True),
    )
    taken = {event["request"]: event["tokens"] for event in events(trace, "prefix")}
    later = {turn["request"]: turn["kept"] for turn in events(trace, "turn")}
    assert later.keys() & taken.keys() and not any(later.values())
    found = compare(whole, trace)
    assert found.identical, (found.stage, found.bookkeeping)


def test_every_turn_is_a_request_and_an_event(runs: Runs) -> None:
    trace = runs.record(model("llama"), conversation(turns="reloaded"))
    assert [(r["id"], r.get("after")) for r in trace.requests] == [
        ("r0", None),
        ("r0/2", "r0"),
        ("r0/3", "r0/2"),
        ("r0/4", "r0/3"),
        ("r1", None),
        ("r1/2", "r1"),
    ]
    generated = trace.generated(lens=False)
    answers = [generated.token[generated.request == n].tolist() for n in range(6)]
    tokens = [request["tokens"] for request in trace.requests]
    assert tokens[1] == [*tokens[0], *answers[0], 5, 6]
    assert tokens[2] == [*tokens[1], 9] and tokens[3] == [1, 2, 3, 4]
    assert len(answers[4]) == 2 and tokens[5] == [*tokens[4], *answers[4], 3, 2]
    turns = events(trace, "turn")
    assert [(turn["from"], turn["told"], turn["tokens"], turn["kept"]) for turn in turns] == [
        (0, 8, 10, 8),
        (1, 10, 11, 10),
        (2, 0, 4, 0),
        (4, 6, 8, 6),
    ]
    assert [(trim["request"], trim["asked"], trim["done"]) for trim in events(trace, "trim")] == [
        (2, 3, 3),
        (3, 14, 14),
    ]
    assert [event["request"] for event in events(trace, "save")] == [0, 1, 2, 4]
    assert [event["request"] for event in events(trace, "load")] == [1, 2, 3, 5]
    assert [(event["request"], event["tokens"]) for event in events(trace, "cancel")] == [(4, 2)]


def test_a_turn_after_another_answer_is_not_compared_and_says_why(runs: Runs) -> None:
    a = runs.record(model("llama"), conversation())
    b = runs.record(model("llama"), conversation(temperature=5.0, seed=3))
    found = compare(a, b)
    first = found.request("r0").flip
    assert first is not None
    reasons = {each.id: each.reason for each in found.not_compared}
    assert reasons["r0/2"] == f"it goes on from r0, whose answers differ from token {first.index} on"
    assert reasons["r0/3"] == "it goes on from r0/2, which is not compared"
    assert "r0/4" not in reasons


def rounding(**keys: Any) -> Scenario:
    """A conversation under a plan in which a few rows take another path than many."""
    asked = {"tokens": prompts((6,))[0], "turn": [{"tokens": [5, 6]}]}
    given = {
        "model": "tiny",
        "max_tokens": 3,
        "layout": "packed",
        "kernels": "candle-metal",
        "split_rows": 4,
    }
    return Scenario.from_dict({**given, "request": [{"id": "r0", **asked}], **keys})


def test_a_difference_of_a_kept_row_arose_where_the_turn_before_computed_it(runs: Runs) -> None:
    fresh = runs.record(model("llama"), rounding(turns="fresh"))
    kept = runs.record(model("llama"), rounding())
    found = compare(fresh, kept)
    assert found.request("r0").identical
    request = found.request("r0/2")
    origin = request.origin
    assert origin is not None and (origin.kind, origin.layer, origin.position) == ("linear", 0, 6)
    assert origin.composition_b is not None and origin.composition_b.members[0].request == "r0"
    assert (origin.rows_a, origin.rows_b) == (11, 1) and origin.path_a != origin.path_b
    entry = request.cache_entry
    assert entry is not None and (entry.layer, entry.position, entry.written_b) == (0, 6, origin.forward_b)


@pytest.mark.thorough
def test_such_a_difference_is_rounding(runs: Runs) -> None:
    controls = ["repeat", "oracle", "pin_kernels"]
    verdict = explain(rounding(turns="fresh"), rounding(), loaded=model("llama"), controls=controls)
    assert (verdict.kind, verdict.rule) == ("numerics", "worse-path"), verdict.sentence


def test_what_no_bookkeeping_shows_differs_from_a_conversation_from_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = nn.RoPE.__call__

    def rope(self: nn.RoPE, x: mx.array, offset: int = 0) -> mx.array:
        # The first rows of a turn are turned as if they stood one further.
        return native(self, x, offset=offset + (x.shape[2] == 3 and offset > 0))

    request = {"id": "r0", "tokens": prompts((6,))[0], "turn": [{"tokens": [5, 6, 7, 8]}]}
    asked = Scenario.from_dict({"model": "tiny", "max_tokens": 3, "request": [request]})
    sound = explain(asked, asked.with_changes(turns="reloaded"), loaded=model("llama"), controls=["fresh"])
    control = sound.control("fresh")
    assert control is not None and control.result == "equal", control
    monkeypatch.setattr(nn.RoPE, "__call__", rope)
    verdict = explain(asked.with_changes(turns="fresh"), asked, loaded=model("llama"), repeats=1)
    assert (verdict.kind, verdict.rule) == ("bug", "kept"), verdict.sentence
    assert "layers.0.self_attn.rope" in verdict.sentence and "of r0/2" in verdict.sentence


def test_forced_tokens_make_later_turns_comparable(runs: Runs) -> None:
    a = runs.record(model("llama"), conversation(temperature=5.0, seed=3))
    b = runs.record(model("llama"), conversation(force_tokens=str(a.path)))
    assert [r["tokens"] for r in a.requests] == [r["tokens"] for r in b.requests]
    assert not compare(a, b).not_compared


def test_what_turns_cannot_be_combined_with_is_refused(runs: Runs) -> None:
    with pytest.raises(ScenarioConflict, match="r0/2.*mlx-lm's own speculation"):
        conversation(draft="tiny")
    with pytest.raises(ScenarioConflict, match="prompt cache files hold no pages"):
        conversation(schedule="static", layout="packed", page_tokens=4, turns="reloaded")
    with pytest.raises(ScenarioError, match="turn 2.*leaves no token to take back"):
        Scenario.from_dict(
            {
                "model": "tiny",
                "request": [{"tokens": [1], "turn": [{"tokens": [1], "anew": True, "rewind": 1}]}],
            }
        )
    with pytest.raises(ScenarioError, match="rewind is 40.*has 8 tokens"):
        asked = conversation().to_dict()
        asked["request"][0]["turn"][0]["rewind"] = 40
        runs.record(model("llama"), Scenario.from_dict(asked))
    with pytest.raises(ContextExceeded, match="comes after a conversation"):
        long = {"tokens": [1] * 500, "max_tokens": 1, "turn": [{"tokens": [2] * 20}]}
        runs.record(model("llama"), Scenario.from_dict({"model": "tiny", "request": [long]}))
    from detdiff.engines.function import FunctionEngine

    with pytest.raises(EngineRefuses, match="a turn cannot be told"):
        FunctionEngine(lambda requests: []).check(conversation())
