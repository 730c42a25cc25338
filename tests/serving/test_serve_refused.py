"""What a server of ours refuses, each in a paragraph, and what it does about clients that go away."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from clients import PROMPTS, Served, Streamed, served, wait_for
from test_serve import same_run_again

from detdiff import Trace

WRONG: list[tuple[Any, int, str]] = [
    ([1], 400, "expected a JSON object"),
    ({}, 400, "prompt is None; expected some text, or a list of token ids"),
    ({"prompt": ""}, 400, "expected some text"),
    ({"prompt": ["a", "b"]}, 400, "2 prompts; expected one"),
    ({"prompt": [1 << 20]}, 400, "vocabulary has 1280 ids"),
    ({"prompt": "\ud800"}, 400, "is not valid Unicode text"),
    ({"prompt": "x", "max_tokens": 5000}, 400, "context is 1024"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0; expected a whole number from 1"),
    ({"prompt": "x", "model": "other"}, 404, "There is no model 'other' here; expected 'builtin'"),
    ({"prompt": "x", "n": 2}, 400, "n is 2, and is not done here"),
    ({"prompt": "x", "best_of": 3}, 400, "best_of is 3, and is not done here"),
    (
        {"prompt": "x", "temperature": 1, "sampler": "mlx-lm"},
        400,
        "expected detdiff, whose draws depend on seed and index",
    ),
    ({"prompt": "x", "temperature": 1, "top_k": 1280}, 400, "expected fewer than the 1280 ids"),
    ({"prompt": "x", "echo": True}, 400, "echo is True"),
    ({"prompt": "x", "typo": 1}, 400, "typo is 1, and is no key that is known here"),
    ({"prompt": "x", "temperature": -1}, 400, "Temperature is -1.0"),
    ({"prompt": "x", "temperature": "hot"}, 400, "Temperature takes a number"),
    ({"prompt": "x", "seed": -1}, 400, "Seed is -1"),
    ({"prompt": "x", "stop": [""]}, 400, "expected a string that is not empty"),
    ({"prompt": "x", "logprobs": 21}, 400, "expected a whole number from 0 to 20"),
    ({"prompt": "x", "stream": "yes"}, 400, "expected true or false"),
]


def test_what_cannot_be_done_is_refused_in_a_paragraph_and_never_left_out(native: Served) -> None:
    forwards = native.metric("forwards_total")
    for body, status, words in WRONG:
        raw = json.dumps(body).encode()
        answer = native.http.post(f"{native.address}/v1/completions", content=raw)
        error = answer.json()["error"]
        assert answer.status_code == status, (body, answer.text)
        assert words in error["message"] and "\n" not in error["message"], error
    chat = native.post("/v1/chat/completions", {"messages": [{"role": "user"}]})
    assert "messages[0].content is None; expected text" in chat.json()["error"]["message"]
    for raw, words in (
        (b"{nan", "is no JSON"),
        (b'{"prompt": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "is no JSON"),
    ):
        answer = native.http.post(f"{native.address}/v1/completions", content=raw)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert native.http.get(f"{native.address}/v1/nothing").status_code == 404
    assert native.http.get(f"{native.address}/v1/completions").status_code == 405
    assert native.metric("forwards_total") == forwards
    # What changes nothing is no reason to refuse.
    native.complete(
        "x", max_tokens=1, n=1, presence_penalty=0, logit_bias=None, user="me", echo=False, top_k=-1
    )


def test_a_body_that_is_too_large_is_refused_while_it_comes(engine: Any) -> None:
    with served(engine, body=1000) as found:
        answer = found.post("/v1/completions", {"prompt": "x" * 2000})
        assert answer.status_code == 413
        assert "more than 1,000 bytes" in answer.json()["error"]["message"]
        found.complete("x", max_tokens=1)


def test_more_than_the_queue_holds_are_asked_to_come_again(engine: Any) -> None:
    with served(engine, "active=1", queue=1) as found:
        running = Streamed(found, max_tokens=900)
        statuses: list[int] = []
        body = {"prompt": PROMPTS[1], "max_tokens": 1}
        waiting = threading.Thread(
            target=lambda: statuses.append(found.post("/v1/completions", body).status_code)
        )
        waiting.start()
        wait_for(lambda: found.metric("num_requests_waiting") == 1)
        refused = found.post("/v1/completions", body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "1 requests wait already" in refused.json()["error"]["message"]
        running.close()
        waiting.join()
        assert statuses == [200]
        found.complete(PROMPTS[1], max_tokens=1)


def test_a_client_that_goes_away_ends_its_request_and_the_trace_says_so(engine: Any, tmp_path: Path) -> None:
    with served(engine, "active=2 prefill_chunk=4", tmp_path / "served") as found:
        one = Streamed(found, max_tokens=900)
        with pytest.raises(httpx2.ReadTimeout):
            found.post(
                "/v1/completions", {"prompt": PROMPTS[1], "max_tokens": 900, "ignore_eos": True}, timeout=0.3
            )
        one.close()
        wait_for(lambda: found.metric("num_requests_running") == 0)
        after = found.complete(PROMPTS[2], max_tokens=3)
        assert after["usage"]["completion_tokens"] == 3
    trace = Trace.open(tmp_path / "served", checked=True)
    ended = {each["id"]: each["finished"] for each in trace.header["served"]["requests"]}
    assert ended == {"r0": "cancelled", "r1": "cancelled", "r2": "length"}
    kept = {event["request"]: event["tokens"] for event in trace.events() if event["event"] == "cancel"}
    assert kept == {number: trace.requests[number]["cancel"] for number in (0, 1)}
    assert sum("its client went away" in note for note in trace.header["notes"]) == 2
    same_run_again(engine, trace, tmp_path / "again")
