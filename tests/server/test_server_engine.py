"""The server engine: requests under each schedule, answers as traces, evidence that they ran together."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_servers import SmallModel, send_events, send_json, serving
from reported import Answer, Asked, Kind

from detdiff import Scenario, compare, record
from detdiff.engines.registry import open_engine
from detdiff.engines.server.together import evidence, poisson
from detdiff.errors import EngineRefuses, ServerRefused
from detdiff.trace import Trace

PROMPTS = ["the first prompt", "another one", "a third, which is longer", "and the last"]


def scenario(address: str, flags: str = "", prompts: list[str] = PROMPTS) -> Scenario:
    return Scenario.from_flags(f"{address}/v1", prompts, f"max_tokens=6 {flags}")


def together(alone: Scenario, **more: Any) -> Scenario:
    """The same requests in one batch, for which the small model waits."""
    size = {"size": len(alone.requests), **alone.engine_settings.get("body", {})}
    return alone.with_changes(**{"schedule": "static", "engine.body": size, **more})


def both(address: str, folder: Path, flags: str = "", **more: Any) -> tuple[Trace, Trace]:
    alone = scenario(address, flags)
    return record(alone, folder / "a"), record(together(alone, **more), folder / "b")


def test_an_address_as_the_model_is_enough_and_the_trace_is_like_any_other(tmp_path: Path) -> None:
    with SmallModel().at() as address:
        alone = scenario(address)
        assert alone.engine == "server" and Scenario.from_toml(_written(alone, tmp_path)) == alone
        a, b = both(address, tmp_path)
    assert compare(a, b).identical
    assert a.header["model"] == {"name": "small", "server": "llama.cpp", "version": "b1"}
    generated = a.generated(lens=False)
    assert len(generated.token) == 24 and generated.top_ids.shape == (24, 8) and generated.token.max() < 16
    texts = a.texts()
    assert all(texts[int(token)] == chr(97 + token) for token in generated.token)
    assert b.header["times"]["together"] == {
        "met": True,
        "most": 4,
        "interleaved": 6,
        "by": "times of tokens",
    }
    assert b.header["server"] == {
        "cached_tokens": dict.fromkeys(("r0", "r1", "r2", "r3"), 0),
        "again": {},
        "prompt_ids": ["r0", "r1", "r2", "r3"],
        "prompt_tokens": {},
        "miscounted": [],
        "token_ids": True,
        "met": True,
    }
    assert "logits" not in a.lacks and "tokens" not in a.lacks and "forwards" in a.lacks
    a.verify()


def _written(alone: Scenario, folder: Path) -> Path:
    (folder / "scenario.toml").write_text(alone.to_toml())
    return folder / "scenario.toml"


def test_a_difference_in_batches_is_found_and_compared_as_float32(tmp_path: Path) -> None:
    with SmallModel("rounding").at() as address:
        a, b = both(address, tmp_path)
    found = compare(a, b)
    assert (
        not found.identical and not found.inconclusive and all(each.flip is None for each in found.requests)
    )
    scores = found.requests[0].scores
    assert scores is not None and scores.dtype == "F32" and 0 < scores.max_abs < 1e-3


def test_requests_that_never_ran_together_are_no_comparison(tmp_path: Path) -> None:
    with SmallModel(alone=True).at() as address:
        a, b = both(address, tmp_path)
    found = compare(a, b)
    assert found.inconclusive and not found.identical
    assert any("did not all run together" in note for note in found.notes)


def test_batches_of_a_size_follow_each_other(tmp_path: Path) -> None:
    with SmallModel().at() as address:
        alone = scenario(address)
        b = record(
            alone.with_changes(**{"schedule": "static", "active": 2, "engine.body": {"size": 2}}),
            tmp_path / "b",
        )
        assert compare(record(alone, tmp_path / "a"), b).identical
    assert b.header["times"]["together"]["most"] == 2
    assert {len(line["rows"]) for line in b.forwards()} == {2}


def test_arrivals_are_seconds_a_rate_or_ticks(tmp_path: Path) -> None:
    with SmallModel(pace=0.02).at() as address:
        alone = scenario(address).with_changes(schedule="continuous")
        for name, changes in (
            ("seconds", {"engine.arrivals": [0, 0.01, 0.02, 0.03]}),
            ("rate", {"engine.rate": 100}),
            ("ticks", {"arrivals": [0, 1, 2, 3], "engine.tick": 0.01}),
        ):
            trace = record(alone.with_changes(**changes, **{"engine.body": {"size": 4}}), tmp_path / name)
            first = [times[0] for times in trace.header["times"]["requests"].values()]
            assert min(first) > (0.03 if name != "rate" else poisson(4, 100, 0)[-1])
            assert trace.header["server"]["met"]
        with pytest.raises(EngineRefuses, match=r"engine.arrivals has 2 numbers and there are 4 requests"):
            record(alone.with_changes(**{"engine.arrivals": [0, 1]}), tmp_path / "wrong")
    assert poisson(4, 10, 3) == poisson(4, 10, 3) != poisson(4, 10, 4)


def test_chat_and_messages(tmp_path: Path) -> None:
    messages = json.dumps([{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}])
    with SmallModel().at() as address:
        chat = scenario(address, "chat", ["cd", messages])
        trace = record(chat, tmp_path / "chat")
        plain = record(scenario(address, "", ["cd", "abcd"]), tmp_path / "plain")
    assert np.array_equal(trace.generated(lens=False).token, plain.generated(lens=False).token)
    assert any("sent" not in note and "as text" in note for note in trace.header["notes"])


@pytest.mark.parametrize("flags", ["", "engine.stream=false"])
def test_tokens_by_text_alone_are_numbers_of_their_bytes(tmp_path: Path, flags: str) -> None:
    with SmallModel(owner="other").at() as address:
        trace = record(scenario(address, flags), tmp_path / "a")
        assert trace.header["model"]["server"] == "openai"
        with pytest.raises(EngineRefuses, match="gives no token ids of a text"):
            open_engine(scenario(address)).encode("text", False)
    assert any("numbers of their bytes" in note for note in trace.header["notes"])
    assert any("cannot be switched off" in note for note in trace.header["notes"])
    assert {text for text in trace.texts().values()} <= set("abcdefghijklmnop")


def test_texts_of_a_server_are_compared_by_their_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B17: no token ids, no log-probabilities."""

    def reply(end: str) -> Callable[[Any, dict[str, Any]], None]:
        def said(handler: Any, body: dict[str, Any]) -> None:
            texts = ("Hello", " there", end if body["together"] else ".")
            events = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
            send_events(handler, [*events, {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}])

        return said

    def told(found: Answer) -> bool:
        (request,) = found["requests"]
        unseen = any("logits are not recorded" in note for note in found["notes"])
        return (
            request["text"] == {"index": 11, "a": ".", "b": "!"} and request["stage"] == "tokens" and unseen
        )

    listed = {"data": [{"id": "m", "owned_by": "me"}]}
    with ExitStack() as servers:

        def ask(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
            answers = {
                "/v1/models": lambda handler, _: send_json(handler, listed),
                "/v1/completions": reply("!" if ill else "."),
            }
            address = servers.enter_context(serving(answers))
            bodies = [f"'engine.body={{\"together\":{n}}}'" for n in range(2)]
            (folder / "hello.toml").write_text(f'model = "{address}"\n[[request]]\nprompt = "Say hello"\n')
            flags = "engine.kind=transformers max_tokens=3"
            return Asked(flags, *bodies, files=(folder / "hello.toml",))

        Kind("B17 texts", ask, told).check(tmp_path, monkeypatch)


def test_a_server_that_is_another_one_later_is_said(tmp_path: Path) -> None:
    listed = {"data": [{"id": "m", "owned_by": "me"}]}
    with serving({"/v1/models": lambda h, _: send_json(h, listed)}) as address:
        engine = open_engine(scenario(address))
        listed["data"][0]["id"] = "another"
        with pytest.raises(ServerRefused, match="it was started again as another one"):
            record(scenario(address), tmp_path / "a", engine=engine)


def test_evidence_is_what_tokens_show() -> None:
    ran = evidence([[[0, 2, 4], [1, 3, 5]]], "t", every=True)
    queued = evidence([[[0, 1, 2], [3, 4, 5]]], "t", every=True)
    one_of_three = evidence([[[0, 2, 4], [1, 3, 5], [9, 10]]], "t", every=True)
    assert (ran.met, ran.most, ran.interleaved) == (True, 2, 1)
    assert (queued.met, queued.most, queued.interleaved) == (False, 1, 0)
    assert one_of_three.met is False
    assert evidence([[[0, 2, 4], [1, 3, 5], [9, 10]]], "t", every=False).met
    assert evidence([[[0.0], [0.0]]], "t", every=True).met is False
