"""What servers do wrong, and users write wrong: one paragraph each, partial runs readable, nothing invented."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from local_servers import SmallModel, models, send_events, send_json, serving

from detdiff import Scenario, Trace, record
from detdiff.engines.registry import open_engine
from detdiff.engines.server import client
from detdiff.errors import (
    DetdiffError,
    EngineAnswerInvalid,
    EngineRefuses,
    Failure,
    ServerAddressInvalid,
    ServerAnswerInvalid,
    ServerRefused,
    ServerUnreachable,
)

PROMPTS = ["one", "two", "three"]
Events = list[Any]


def scenario(address: str, flags: str = "") -> Scenario:
    return Scenario.from_flags(f"{address}/v1", PROMPTS, f"max_tokens=4 engine.retries=0 {flags}")


def event(token: Any = "a", score: Any = -0.5, **more: Any) -> dict[str, Any]:
    values = {"content": [{"id": 5, "token": token, "logprob": score, "top_logprobs": []}]}
    return {
        "id": "x",
        "choices": [{"index": 0, "text": "a", "logprobs": values, "finish_reason": None, **more}],
    }


END = {"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
GOOD = [event(), event(), END]


def streaming(events: Events, **how: Any) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    return lambda handler, _: send_events(handler, events, **how)


def refused(tmp_path: Path, reply: Any, flags: str = "", good: int = 1) -> tuple[DetdiffError, Path]:
    """The error of a run whose answers after the first ``good`` ones are ``reply``, checked to be one paragraph."""
    asked = []

    def some(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append(body)
        (streaming(GOOD) if len(asked) <= good else reply)(handler, body)

    with serving({"/v1/models": models("m"), "/v1/completions": some}) as address:
        with pytest.raises(DetdiffError) as found:
            record(scenario(address, flags), tmp_path / "run")
    paragraph(found.value)
    return found.value, tmp_path / "run"


def paragraph(error: DetdiffError) -> None:
    text = str(error)
    assert "\n" not in text and text.endswith(".") and len(text) < 900, text
    assert Failure.of(error).exit_code == 2


BAD: dict[str, tuple[Any, type[DetdiffError], str]] = {
    "an error in the middle": (
        streaming([event(), {"error": {"message": "out of memory", "code": 500}}]),
        ServerRefused,
        "ended a stream with an error .*out of memory",
    ),
    "no end": (streaming([event()], done=False), ServerAnswerInvalid, "closed a stream before it said"),
    "no reason": (streaming([event()]), ServerAnswerInvalid, "without a reason why it ended"),
    "no JSON": (streaming(["data: {broken\n\n"]), ServerAnswerInvalid, "the line .*broken"),
    "no event": (streaming(["data: [1]\n\n"]), ServerAnswerInvalid, "expected a JSON object"),
    "NaN": (streaming([event(score=float("nan")), END]), ServerAnswerInvalid, "the number NaN in an answer; expected a finite number"),
    "null": (streaming([event(), event(score=None), END]), ServerAnswerInvalid, "log-probability None for token 1"),
    "infinite": (streaming([event(score=float("-inf")), END]), ServerAnswerInvalid, "the number -Infinity"),
    "no text": (streaming([event(token=7), END]), ServerAnswerInvalid, r"Expected `str \| null`, got `int` - at .*\.token"),
    "an id that is none": (
        streaming([{**GOOD[0], "choices": [{**GOOD[0]["choices"][0], "token_ids": [-3]}]}, END]),
        ServerAnswerInvalid,
        r"Expected `int` >= 0 - at .*\.token_ids",
    ),
    "other lengths": (
        streaming([event(logprobs={"tokens": ["a", "b"], "token_logprobs": [-1.0], "top_logprobs": None}), END]),
        ServerAnswerInvalid,
        "log-probabilities for 1 entries and 2 entries",
    ),
    "ids and values of other lengths": (
        streaming([event(token_ids=[1, 2]), END]),
        ServerAnswerInvalid,
        "2 token ids and 1 log-probabilities",
    ),
    "out of order": (
        streaming([event(logprobs={"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "text_offset": [4, 0]}), END]),
        ServerAnswerInvalid,
        "tokens out of order",
    ),
    "two answers in one": (streaming([event(), {**event(), "id": "y"}, END]), ServerAnswerInvalid, "events of two answers"),
    "another choice": (streaming([event(index=1), END]), ServerAnswerInvalid, "a choice with the index 1"),
    "no choices": (streaming([{"id": "x", "choices": 3}, END]), ServerAnswerInvalid, r"Expected `array \| null`, got `int` - at .*\.choices"),
    "values refused": (streaming([{"id": "x", "choices": [{"text": "a", "index": 0}]}, END]), EngineAnswerInvalid, "text|log-prob"),
    "too many tokens": (streaming([event()] * 9 + [END]), EngineAnswerInvalid, "gave 9 tokens .* 4 at most"),
    "no stream": (lambda handler, _: send_json(handler, END), ServerAnswerInvalid, "where a stream was asked for"),
    "401": (lambda handler, _: send_json(handler, {"error": "who"}, 401), ServerRefused, "status 401.*engine.token_env"),
    "log-probabilities refused": (
        lambda handler, _: send_json(handler, {"error": {"message": "logprobs is not supported"}}, 400),
        ServerRefused,
        "status 400.*logprobs is not supported",
    ),
    "404": (lambda handler, _: send_json(handler, "no such model", 404), ServerRefused, "status 404: no such model"),
    "429": (lambda handler, _: send_json(handler, "", 429), ServerRefused, "status 429.*fewer requests"),
    "500": (lambda handler, _: send_json(handler, "boom", 500), ServerRefused, "status 500: boom"),
    "a long wait": (
        lambda handler, _: send_json(handler, "", 429, {"Retry-After": "900"}), ServerRefused, "status 429",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_bad_answer_is_one_paragraph_and_what_was_answered_stays(tmp_path: Path, name: str) -> None:
    reply, kind, words = BAD[name]
    error, path = refused(tmp_path, reply)
    assert isinstance(error, kind)

    assert re.search(words, str(error)), str(error)
    left = Trace.open(path)
    assert not left.complete
    # The first answer, whole, and nothing of the second.
    generated = left.generated(lens=False)
    assert generated.request.tolist() == [0, 0] and generated.token.tolist() == [5, 5]


@pytest.mark.parametrize("cut", [0, 1, 5, 6, 7, 40, 150, 151, 260, 320, 337])
def test_a_stream_cut_at_any_byte(tmp_path: Path, cut: int) -> None:
    error, path = refused(tmp_path, streaming(GOOD, cut=cut))
    assert isinstance(error, ServerAnswerInvalid)
    assert len(Trace.open(path).generated(lens=False).token) == 2


def test_events_are_read_however_the_network_cuts_them(tmp_path: Path) -> None:
    """One byte at a time, and everything in one piece: the same answer, to its end mark."""
    whole = (
        b"".join(b"data: " + json.dumps(each).encode() + b"\r\n\r\n" for each in GOOD)
        + b"data: [DONE]\r\n\r\n"
    )

    def by(size: int) -> Callable[[BaseHTTPRequestHandler, Any], None]:
        def reply(handler: BaseHTTPRequestHandler, _: Any) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", "text/event-stream")
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for first in range(0, len(whole), 7):
                piece = whole[first : first + 7]
                raw = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
                for at in range(0, len(raw), size):
                    handler.wfile.write(raw[at : at + size])
                    handler.wfile.flush()
            # Without the last chunk: the end mark is enough, and the connection stays open.
            time.sleep(0.2)

        return reply

    for size in (1, 1 << 16):
        replies = {"/v1/models": models("m"), "/v1/completions": by(size)}
        with serving(replies) as address:
            trace = record(scenario(address).with_changes(**{"schedule": "static"}), tmp_path / str(size))
        assert trace.generated(lens=False).token.tolist() == [5] * 6


def test_a_chunk_cut_in_the_middle(tmp_path: Path) -> None:
    def broken(handler: BaseHTTPRequestHandler, _: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"ff\r\ndata: ")
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True

    error, _ = refused(tmp_path, broken)
    assert isinstance(error, ServerAnswerInvalid) and "broke off in the middle" in str(error)


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LINE_LIMIT", 1 << 16)
    error, _ = refused(tmp_path, streaming(["data: " + "x" * (1 << 17)]))
    assert isinstance(error, ServerAnswerInvalid) and "a line of more than" in str(error)


def test_silence_and_comments_without_a_token_end_in_time(tmp_path: Path) -> None:
    def silent(handler: BaseHTTPRequestHandler, _: Any) -> None:
        time.sleep(0.5)

    error, _ = refused(tmp_path, silent, "engine.timeout=0.05")
    assert isinstance(error, ServerUnreachable) and "sent no token for 0.05 s" in str(error)

    def comments() -> Any:
        for _ in range(100):
            time.sleep(0.01)
            yield ": still here\n\n"

    error, _ = refused(tmp_path / "again", streaming(comments()), "engine.timeout=0.08")
    assert isinstance(error, ServerUnreachable) and "sent no token for 0.08 s" in str(error)


def test_nothing_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(ServerUnreachable, match="cannot be reached .* Start it") as found:
            open_engine(scenario(f"http://127.0.0.1:{held.getsockname()[1]}"))
    paragraph(found.value)


def test_a_server_that_is_gone_in_between(tmp_path: Path) -> None:
    with serving({"/v1/models": models("m"), "/v1/completions": streaming(GOOD)}) as address:
        engine = open_engine(scenario(address))
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        record(scenario(address), tmp_path / "a", engine=engine)


def test_tls_is_checked(tmp_path: Path) -> None:
    import ssl
    import subprocess

    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout",
         str(tmp_path / "key"), "-out", str(tmp_path / "pem"), "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("there is no openssl that makes a certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem", tmp_path / "key")
    with serving({"/v1/models": models("m"), "/v1/completions": streaming(GOOD)}, secure=context) as address:
        assert address.startswith("https")
        with pytest.raises(
            ServerUnreachable, match="TLS connection .* failed .* engine.verify=FILE"
        ) as found:
            open_engine(scenario(address))
        paragraph(found.value)
        open_engine(scenario(address, f"engine.verify={tmp_path / 'pem'}"))
        record(scenario(address, "engine.verify=false"), tmp_path / "run")
        with pytest.raises(ServerUnreachable, match="no file of certificates"):
            open_engine(scenario(address, "engine.verify=/nowhere"))


def test_a_proxy_of_the_environment_is_asked_for_another_machine_and_not_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def through(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        seen.append(handler.headers["Proxy-Authorization"])
        models("far")(handler, body)

    far = "http://models.invalid"
    with (
        serving({f"{far}/v1/models": through, f"{far}/v1/completions": streaming(GOOD)}) as proxy,
        serving({"/v1/models": models("m"), "/v1/completions": streaming(GOOD)}) as address,
    ):
        monkeypatch.setenv("http_proxy", proxy.replace("://", "://me:p%40ss@"))
        monkeypatch.delenv("no_proxy", raising=False)
        assert record(scenario(far), tmp_path / "far").header["model"]["name"] == "far"
        assert record(scenario(address), tmp_path / "near").header["model"]["name"] == "m"
    assert set(seen) == {"Basic bWU6cEBzcw=="}


def test_what_is_sent_again_is_counted_and_told(tmp_path: Path) -> None:
    asked: list[Any] = []

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append(body)
        if len(asked) == 1:
            send_json(handler, "busy", 429, {"Retry-After": "0"})
        elif len(asked) == 2:
            send_json(handler, "busy", 503)
        else:
            send_events(handler, GOOD)

    with serving({"/v1/models": models("m"), "/v1/completions": reply}) as address:
        trace = record(scenario(address).with_changes(**{"engine.retries": 2}), tmp_path / "a")
    assert trace.header["server"]["again"] == {"status 429": 1, "status 503": 1} and len(asked) == 5
    assert "1 requests were sent again (status 429)" in trace.header["notes"]


def test_a_token_is_sent_and_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "sk-very-secret")
    seen = []

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        seen.append(handler.headers["Authorization"])
        if len(seen) == 3:
            send_json(handler, f"bad key {seen[-1]}", 500)
        else:
            send_events(handler, GOOD)

    with serving({"/v1/models": models("m"), "/v1/completions": reply}) as address:
        with pytest.raises(ServerRefused, match=r"bad key Bearer \(token\)") as found:
            record(scenario(address, "engine.token_env=MY_TOKEN"), tmp_path / "run")
        assert seen == ["Bearer sk-very-secret"] * 3
        assert "secret" not in str(found.value)
        for file in (tmp_path / "run").iterdir():
            assert b"secret" not in file.read_bytes()
        monkeypatch.delenv("MY_TOKEN")
        with pytest.raises(ServerAddressInvalid, match="'MY_TOKEN', which is not set"):
            open_engine(scenario(address, "engine.token_env=MY_TOKEN"))
    monkeypatch.setenv("MY_TOKEN", "sk-very-secret")
    with pytest.raises(ServerAddressInvalid, match="plain HTTP to another machine"):
        open_engine(scenario("http://models.invalid", "engine.token_env=MY_TOKEN"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("ftp://host/v1", "expected an address"),
        ("http://", "expected an address"),
        ("http://me:pass@host/v1", "holds a user or a password"),
        ("http://host/v1?key=1", "has a query"),
        ("http://host:99999/v1", "expected an address"),
    ],
)
def test_addresses_that_are_none(model: str, words: str) -> None:
    given = Scenario.from_flags(model, PROMPTS, "engine=server")
    with pytest.raises(ServerAddressInvalid, match=words) as found:
        open_engine(given)
    paragraph(found.value)
    assert "pass" not in str(found.value).replace("password", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("engine.kind=vlm", "did you mean 'vllm'"),
        ("engine.timout=3", "did you mean 'timeout'"),
        ("engine.timeout=0", "engine.timeout is 0; expected seconds"),
        ("engine.cache=maybe", "expected 'off', or 'as it is'"),
        ("engine.body=3", "expected a JSON object"),
    ],
)
def test_settings_that_are_none(flags: str, words: str) -> None:
    with pytest.raises(EngineRefuses, match=words) as found:
        open_engine(scenario("http://127.0.0.1:9", flags))
    paragraph(found.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("kernels=candle-metal", "kernels cannot be told"),
        ("layout=packed", "layout packed cannot be told"),
        ("ignore_stop", "ignore_stop to openai cannot be told"),
        ("tokens=1,2", "token ids as the prompt to openai"),
    ],
)
def test_what_a_server_cannot_be_told(tmp_path: Path, flags: str, words: str) -> None:
    with serving({"/v1/models": models("m")}) as address, pytest.raises(EngineRefuses, match=words) as found:
        record(scenario(address, flags), tmp_path / "a")
    paragraph(found.value)


def test_several_models_and_one_that_is_not_there() -> None:
    with serving({"/v1/models": models("m", "n")}) as address:
        with pytest.raises(ServerRefused, match=r"2 models \(m, n\).* engine.model=NAME"):
            open_engine(scenario(address))
        with pytest.raises(ServerRefused, match="has no model 'o'; it names m, n"):
            open_engine(scenario(address, "engine.model=o"))
        open_engine(scenario(address, "engine.model=n"))


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_in_a_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    answered, interrupted = threading.Semaphore(0), threading.Event()

    def reply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["prompt"] == "three":
            # The others' answers are on their way; what is left is that they are read.
            assert answered.acquire(timeout=60) and answered.acquire(timeout=60)
            # Not interrupt_main, which does not wake who waits.
            threading.Timer(1, signal.pthread_kill, (main, signal.SIGINT)).start()
            interrupted.wait(60)
        send_events(handler, GOOD)
        answered.release()

    with serving({"/v1/models": models("m"), "/v1/completions": reply}) as address:
        with pytest.raises(KeyboardInterrupt):
            record(scenario(address, "static"), tmp_path / "a")
        interrupted.set()
    left = Trace.open(tmp_path / "a")
    assert not left.complete and set(left.generated(lens=False).request.tolist()) == {0, 1}


def test_a_misnamed_token_is_said(tmp_path: Path) -> None:
    """As mlx_lm.server 0.32.2 does where top_logprobs is asked."""
    better = {
        "content": [
            {
                "id": 5,
                "token": "a",
                "logprob": -2.0,
                "top_logprobs": [{"id": 6, "token": "b", "logprob": -0.5}],
            }
        ]
    }
    answer = [event(logprobs=better), event(), END]
    with serving({"/v1/models": models("m"), "/v1/completions": streaming(answer)}) as address:
        trace = record(scenario(address), tmp_path / "a")
    assert any(
        "3 tokens are not the likeliest of their own top list" in note for note in trace.header["notes"]
    )


def test_keys_of_text_that_collide_are_said(tmp_path: Path) -> None:
    values = {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "�": -2.0}],
        "text_offset": [0],
    }
    with serving(
        {"/v1/models": models("m"), "/v1/completions": streaming([event(logprobs=values), END])}
    ) as address:
        trace = record(scenario(address), tmp_path / "a")
    assert any("3 top lists are shorter" in note and "collide" in note for note in trace.header["notes"])
    with SmallModel().at() as address:
        healthy = record(scenario(address), tmp_path / "b")
    assert not any("likeliest" in note or "collide" in note for note in healthy.header["notes"])
