"""How a server of ours ends: by a signal, by a fault of the model, by a full disk; what was recorded stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clients import PROMPTS, Streamed, served, wait_for
from command_line import run
from test_serve import same_run_again

from detdiff import Trace
from detdiff.engines.mlx.live import PackedLive
from detdiff.errors import ModelRunError, TraceDiskFull
from detdiff.trace import TraceWriter


@contextmanager
def process(trace: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`detdiff serve` in a process of its own, and its address."""
    words = [sys.executable, "-m", "detdiff.cli", "serve", "--port", "0", "--trace", str(trace), *more]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as started:
        try:
            assert started.stdout is not None
            line = started.stdout.readline()
            assert line.startswith("builtin is served at http://127.0.0.1:"), line
            yield started, line.split()[-1].removesuffix("/v1")
        finally:
            started.kill()


def stream(address: str, tokens: int) -> tuple[Iterator[bytes], Any]:
    body = {"prompt": PROMPTS[0], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    answer = urllib.request.urlopen(f"{address}/v1/completions", json.dumps(body).encode(), timeout=60)
    return iter(answer.readline, b""), answer


def test_sigterm_in_the_middle_of_an_answer_leaves_a_whole_trace(engine: Any, tmp_path: Path) -> None:
    with process(tmp_path / "served", "--grace", "0", "--kernels", "candle-metal") as (started, address):
        for _ in range(2):
            whole, short = stream(address, 2)
            with short:
                assert b"[DONE]" in b"".join(whole)
        lines, answer = stream(address, 900)
        with answer:
            for _ in range(8):
                next(lines)
            started.send_signal(signal.SIGTERM)
            said = b"".join(lines)
        assert b"the server stopped" in said and b"[DONE]" not in said
        assert started.wait(60) == 0
        assert started.stdout is not None and started.stderr is not None
        told = started.stdout.read()
        assert "Stopped after 3 requests" in told and "is whole: 3 requests" in told
        assert "Traceback" not in started.stderr.read()
    trace = Trace.open(tmp_path / "served", checked=True)
    assert trace.complete and 4 <= trace.requests[2]["cancel"] < 900
    assert "the server stopped" in trace.header["notes"][0]
    same_run_again(engine, trace, tmp_path / "again")


@pytest.mark.thorough
def test_a_second_signal_ends_what_has_grace_left(tmp_path: Path) -> None:
    with process(tmp_path / "served", "--grace", "600", "--kernels", "candle-metal") as (started, address):
        lines, answer = stream(address, 900)
        with answer:
            for _ in range(8):
                next(lines)
            started.send_signal(signal.SIGTERM)
            # Only a server that heard the first one refuses.
            wait_for(lambda: refuses(address))
            started.send_signal(signal.SIGINT)
            said = b"".join(lines)
        assert b"the server stopped" in said and b"[DONE]" not in said
        assert started.wait(60) == 0
        assert started.stderr is not None and started.stderr.read() == ""
    assert Trace.open(tmp_path / "served", checked=True).complete


def refuses(address: str) -> bool:
    """Whether no new connection is taken."""
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).read()
    except OSError:
        return True
    return False


@pytest.mark.thorough
def test_a_server_that_is_killed_leaves_its_finished_shards(tmp_path: Path) -> None:
    with process(tmp_path / "served") as (started, address):
        lines, answer = stream(address, 900)
        with answer:
            for _ in range(2 * 700):
                next(lines)
            started.kill()
            started.wait(60)
    trace = Trace.open(tmp_path / "served", checked=True)
    assert not trace.complete and len(trace.row_index().request) >= 512
    assert (
        [each["id"] for each in trace.requests]
        == [each["id"] for each in trace.scenario["request"]]
        == ["r0"]
    )


def test_running_requests_may_go_on_for_a_while(engine: Any) -> None:
    with served(engine, grace=30.0) as found:
        one = Streamed(found, max_tokens=40)
        found.server.should_exit = True
        assert "data: [DONE]" in list(one.lines)


def test_a_forward_that_fails_ends_the_server_and_is_told_to_all(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, said = PackedLive.step, []

    def failing(self: PackedLive) -> Any:
        if self.steps == 5:
            raise ModelRunError("The model failed.")
        return step(self)

    monkeypatch.setattr(PackedLive, "step", failing)
    body = {"prompt": PROMPTS[0], "max_tokens": 20, "ignore_eos": True}
    with (
        pytest.raises(ModelRunError, match="The model failed"),
        served(engine, "", tmp_path / "served") as found,
    ):
        answer = found.post("/v1/completions", body)
        said.append(answer.json()["error"]["message"])
        assert answer.status_code == 503
    assert said == ["The server failed: The model failed. Start it again."]
    trace = Trace.open(tmp_path / "served", checked=True)
    assert not trace.complete and 0 < len(trace.forwards()) <= 5 and trace.requests[0]["id"] == "r0"


def test_a_disk_that_is_full_ends_the_server(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TraceWriter, line: Any) -> None:
        raise TraceDiskFull("There is no space left.")

    monkeypatch.setattr(TraceWriter, "forward", full)
    with pytest.raises(TraceDiskFull), served(engine, "", tmp_path / "served") as found:
        assert found.post("/v1/completions", {"prompt": "x", "max_tokens": 9}).status_code == 503


def test_requests_that_wait_when_the_server_stops_are_told(engine: Any) -> None:
    statuses: list[int] = []
    with served(engine, "active=1") as found:
        one = Streamed(found, max_tokens=900)
        body = {"prompt": PROMPTS[1], "max_tokens": 9}
        waiting = threading.Thread(
            target=lambda: statuses.append(found.post("/v1/completions", body).status_code)
        )
        waiting.start()
        wait_for(lambda: found.metric("num_requests_waiting") == 1)
        found.server.should_exit = True
        waiting.join()
        list(one.lines)
    assert statuses == [503]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "layout=padded"], "cannot have layout padded"),
        (["--set", "draft=builtin-draft"], "cannot have a draft"),
        (["--set", "schedule=static"], "cannot have schedule static"),
        (["--set", "no_such_key=1"], "there is no key 'no_such_key'"),
        (["--set", "temperature=1"], "temperature is a setting of requests, which clients send with each"),
        (["--kernels", "nonsense"], "nonsense"),
        (["--host", "256.0.0.1"], "cannot be listened on"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is(words: list[str], reason: str) -> None:
    found = run("serve", "--port", "0", *words)
    assert found.exit_code == 2 and "Traceback" not in found.output
    assert reason in " ".join(found.stderr.split())


def test_a_request_that_says_no_length_gets_the_servers(engine: Any) -> None:
    asked = {"prompt": "In the", "ignore_eos": True}
    with served(engine, tokens=3) as found:
        assert found.post("/v1/completions", asked).json()["usage"]["completion_tokens"] == 3
        assert (
            found.post("/v1/completions", {**asked, "max_tokens": 2}).json()["usage"]["completion_tokens"]
            == 2
        )
    with served(engine) as found:
        assert found.post("/v1/completions", asked).json()["usage"]["completion_tokens"] == 16


def test_a_port_that_is_taken_is_said(engine: Any) -> None:
    with served(engine) as found:
        port = found.address.rpartition(":")[2]
        refused = run("serve", "--port", port)
    assert refused.exit_code == 2
    assert f"127.0.0.1 port {port} cannot be listened on" in " ".join(refused.stderr.split())
