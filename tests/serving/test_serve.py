"""detdiff serve: answers in the API's shapes, alone and together, and a trace that gives the same run again."""

from __future__ import annotations

import filecmp
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clients import PROMPTS, Served, Streamed, compared, served
from command_line import run

from detdiff import Scenario, Trace, compare, record
from detdiff.commands import serve as serving
from detdiff.engines.mlx.live import PackedLive
from detdiff.errors import TraceExists
from detdiff.invariance.invariant import pinned_scenario
from detdiff.serving.server import RunningServer


def same_run_again(engine: Any, trace: Trace, again: Path) -> None:
    """Recording a served trace's scenario gives its very bytes."""
    found = compare(trace, record(Scenario.from_dict(trace.scenario), again, engine=engine))
    assert found.identical and found.compared.digests > 1000
    for path in trace.path.iterdir():
        if path.name != "trace.json":
            assert filecmp.cmp(path, again / path.name, shallow=False), path.name


def test_alone_and_together_are_identical_with_kernels_that_see_one_row_at_a_time(native: Served) -> None:
    code, answer = compared(native.address)
    assert code == 0 and answer["compared"]["tokens"] == 48
    assert native.metric("request_success_total") == 8
    assert native.metric("generation_tokens_total") == 96


def test_kernels_that_see_the_batch_change_answers_and_the_trace_gives_the_same_run_again(
    engine: Any, tmp_path: Path
) -> None:
    with served(engine, "kernels=candle-metal prefill_chunk=4", tmp_path / "served") as found:
        code, answer = compared(found.address)
    assert code == 1
    differing = {each["id"] for each in answer["requests"] if not each["identical"]}
    assert differing
    trace = Trace.open(tmp_path / "served", checked=True)
    assert trace.complete and trace.header["observer"] == {"forwards": 4, "equal": True}
    assert len(trace.requests) == 8
    together = max(len({row["request"] for row in forward["rows"]}) for forward in trace.forwards())
    assert together >= 2
    same_run_again(engine, trace, tmp_path / "again")


def alone_and_together(found: Served) -> tuple[list[Any], list[Any]]:
    """Texts and log-probabilities of two requests, one after the other and at once."""
    keys = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3}
    bodies = [{"prompt": prompt, **keys} for prompt in PROMPTS[:2]]
    alone = [found.complete(**body)["choices"] for body in bodies]
    return alone, [each["choices"] for each in found.together(bodies)]


def test_pinned_kernels_answer_alone_as_beside_another_and_others_do_not(engine: Any, tmp_path: Path) -> None:
    for invariant in (True, False):
        path = tmp_path / f"served-{invariant}"
        with served(engine, "kernels=candle-metal", path, invariant=invariant) as found:
            alone, together = alone_and_together(found)
        assert (alone == together) == invariant
        trace = Trace.open(path)
        assert trace.complete and len(trace.requests) == 4
        assert 2 in {len({row["request"] for row in forward["rows"]}) for forward in trace.forwards()}
        assert bool(Scenario.from_dict(trace.scenario).kernels.rules) == invariant


@pytest.mark.thorough
def test_the_command_serves_what_it_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(RunningServer, "serve_all", lambda self: seen.append(self))
    monkeypatch.setattr(serving, "DECODE", (2,))
    monkeypatch.setattr(serving, "pinned_scenario", partial(pinned_scenario, compositions=2))
    for words in (["--invariant"], []):
        found = run("serve", "--port", "0", *words)
        assert found.exit_code == 0, found.output
        assert (
            "2 random compositions" in found.stdout and "price of a decode step at batch 2" in found.stdout
        ) == bool(words)
    assert len(seen) == 2


def test_a_scheduler_that_gives_one_request_the_tokens_of_another_is_found(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PackedLive.step

    def swapped(self: PackedLive) -> Any:
        tokens = step(self)
        if len(tokens) > 1:
            (a, b), rest = tokens[:2], tokens[2:]
            tokens = [
                replace(a, token=b.token, scores=b.scores),
                replace(b, token=a.token, scores=a.scores),
                *rest,
            ]
        return tokens

    monkeypatch.setattr(PackedLive, "step", swapped)
    with served(engine) as found:
        code, answer = compared(found.address)
    assert code == 1
    assert any(each["flip"] for each in answer["requests"])


def test_a_streamed_answer_is_the_whole_one_in_pieces(native: Served) -> None:
    keys: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 9, "logprobs": 3, "return_token_ids": True}
    whole = native.complete(**keys)
    events = native.events("/v1/completions", **keys, stream_options={"include_usage": True})
    choice = whole["choices"][0]
    pieces = [each["choices"][0] for each in events if each["choices"]]
    assert "".join(each["text"] for each in pieces) == choice["text"]
    assert [id for each in pieces for id in each.get("token_ids", ())] == choice["token_ids"]
    assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for each in pieces if each["logprobs"] for x in each["logprobs"][name]] == choice[
            "logprobs"
        ][name]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    for named, chosen, top in zip(
        *(choice["logprobs"][key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert len(top) == 3 and top[named] == chosen == max(top.values())
    assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert events[-1]["usage"] == whole["usage"] == {
        "prompt_tokens": len(choice["prompt_token_ids"]), "completion_tokens": 9,
        "total_tokens": len(choice["prompt_token_ids"]) + 9, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_token_ids_as_the_prompt_are_the_text_that_they_stand_for(native: Served) -> None:
    tokens = native.post("/tokenize", {"prompt": PROMPTS[1]}).json()["tokens"]
    by_text, by_ids = (native.complete(each, max_tokens=4)["choices"] for each in (PROMPTS[1], tokens))
    assert by_text == by_ids


def test_chat_has_the_shapes_of_chat(native: Served) -> None:
    keys: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Speak."}, {"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
        "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True,
    }  # fmt: skip
    answer = native.post("/v1/chat/completions", keys)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    choice = whole["choices"][0]
    assert whole["object"] == "chat.completion" and choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"] == 5
    assert all(len(each["top_logprobs"]) == 2 for each in choice["logprobs"]["content"])
    text = "system: Speak.\nuser: Who?\nassistant:"
    assert whole["prompt_token_ids"] == native.post("/tokenize", {"prompt": text}).json()["tokens"]
    events = native.events("/v1/chat/completions", **keys)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(each["choices"][0]["delta"].get("content", "") for each in events)
        == choice["message"]["content"]
    )
    by_text = native.complete(text, max_tokens=5)
    assert by_text["choices"][0]["text"] == choice["message"]["content"]


def test_a_stop_string_ends_the_text_before_it_and_the_run_with_it(engine: Any, tmp_path: Path) -> None:
    with served(engine, "", tmp_path / "served") as found:
        plain = found.complete(PROMPTS[0], max_tokens=12)["choices"][0]["text"]
        stop = plain[6:9]
        keys = {"stop": [stop, "never said"], "max_tokens": 12, "return_token_ids": True}
        whole = found.complete(PROMPTS[0], **keys)["choices"][0]
        pieces = found.events("/v1/completions", prompt=PROMPTS[0], **keys)
    assert whole["text"] == plain[: plain.index(stop)] and whole["finish_reason"] == "stop"
    assert "".join(each["choices"][0]["text"] for each in pieces) == whole["text"]
    trace = Trace.open(tmp_path / "served", checked=True)
    assert [each["max_tokens"] for each in trace.requests] == [12, *[len(whole["token_ids"])] * 2]
    assert trace.header["served"]["requests"][1] == {
        "id": "r1",
        "finished": "stop",
        "stop": stop,
        "max_tokens": 12,
    }
    same_run_again(engine, trace, tmp_path / "again")


def test_a_request_that_draws_gives_the_same_with_its_seed_whoever_is_there(native: Served) -> None:
    keys = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 12}
    bodies = [{"prompt": PROMPTS[0], "seed": seed, **keys} for seed in (7, 8, 7)]
    texts = [each["choices"][0]["text"] for each in native.together(bodies)]
    assert texts[0] == texts[2] != texts[1]
    assert native.complete(PROMPTS[0], **keys)["choices"] != native.complete(PROMPTS[0], **keys)["choices"]


def test_a_directory_that_is_taken_is_refused_before_anything_is_served(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("mine")
    with pytest.raises(TraceExists), served(engine, "", tmp_path):
        raise AssertionError("it was served")


def test_a_prompt_that_another_one_began_with_comes_from_the_cache(engine: Any, tmp_path: Path) -> None:
    with served(engine, "share_prefix=true page_tokens=2", tmp_path / "served") as found:
        alone = found.complete(PROMPTS[0], max_tokens=4)
        again = found.complete(PROMPTS[0], max_tokens=4)
        assert (
            found.metric("prefix_cache_hits_total")
            == again["usage"]["prompt_tokens_details"]["cached_tokens"]
            > 0
        )
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert alone["choices"] == again["choices"]
        fresh = found.post("/v1/completions", {"prompt": "x", "cache_prompt": False})
        assert fresh.status_code == 400 and "serve without share_prefix" in fresh.json()["error"]["message"]
    same_run_again(engine, Trace.open(tmp_path / "served", checked=True), tmp_path / "again")


def test_a_name_of_the_clients_own_is_the_requests_id(engine: Any, tmp_path: Path) -> None:
    with served(engine, "", tmp_path / "served") as found:
        body = {"prompt": PROMPTS[0], "max_tokens": 1}
        given = ("mine-1", "mine-1", "not a name!")
        named = [
            found.post("/v1/completions", body, headers={"X-Request-Id": each}).json()["id"] for each in given
        ]
    ids = [each["id"] for each in Trace.open(tmp_path / "served").requests]
    assert named == [f"cmpl-{id}" for id in ids] and ids[0] == "mine-1" and len(set(ids)) == 3


def test_a_server_without_a_trace_keeps_nothing_of_what_it_served(native: Served) -> None:
    named = {"X-Request-Id": "mine"}
    asked = {"prompt": PROMPTS[2], "max_tokens": 1}
    ids = {native.post("/v1/completions", asked, headers=named).json()["id"] for _ in range(3)}
    driver = native.server.model.driver
    assert len(ids) == 3 and "cmpl-mine" not in ids
    assert driver.counts.ended["length"] >= 3
    assert not driver._told and not driver._times and not native.server.model._ids


@pytest.mark.thorough
def test_what_a_client_saw_is_found_in_the_cache_entry(engine: Any, tmp_path: Path) -> None:
    with served(engine, "kernels=candle-metal prefill_chunk=4", tmp_path / "served") as found:
        one = Streamed(found, max_tokens=24)
        found.complete(PROMPTS[1], max_tokens=5, ignore_eos=True)
        list(one.lines)
    given = run("record", tmp_path / "served", "-o", tmp_path / "alone", "--set", "schedule=serial")
    assert given.exit_code == 0, given.output
    told = run("compare", tmp_path / "served", tmp_path / "alone", "--json")
    differing = [each for each in json.loads(told.stdout)["requests"] if not each["identical"]]
    assert told.exit_code == 1 and differing
    assert all(each["origin"]["path_a"] != each["origin"]["path_b"] for each in differing)
    assert any(each["cache_entry"] for each in differing)
