"""Real servers on free loopback ports, each in a process that the tests end: llama.cpp's of xllamacpp, and mlx_lm.server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from detdiff import Scenario, Trace, record
from detdiff.commands.inside import local
from detdiff.engines.llama_cpp.known_model import KnownModel
from detdiff.engines.registry import open_engine
from detdiff.explain.inside import ANOTHER_MODEL, look_inside

LLAMA = """
import os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.hostnames, params.port = ["127.0.0.1"], 0
params.n_parallel, params.n_ctx, params.cache_ram_mib, params.n_threads_http = 8, 2048, 0, 12
params.warmup = params.ui = False
params.endpoint_metrics = True
params.verbosity = 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
# It ends with the process that started it.
sys.stdin.read()
os._exit(0)
"""
TEXTS = [
    "The capital of France is", "def add(a, b):", "Once upon a time there was a king who", "Water boils at",
    "My son, do not forget", "In the beginning", "Two and two are", "The cat sat on the",
]  # fmt: skip


@contextmanager
def process(words: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, ended by its id whatever happens."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, env=environment, text=True, **how) as started:
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def llama_server(model: Path) -> Iterator[str]:
    """llama.cpp's server with eight slots; skipped without its library, failed on CI."""
    if not _installed("xllamacpp"):
        if os.environ.get("CI"):
            pytest.fail("xllamacpp is not installed")
        pytest.skip("xllamacpp is not installed; the extra llama has it")
    words = [sys.executable, "-c", LLAMA, str(model)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with process(words, **pipes) as started:
        assert started.stdout is not None
        address = started.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), "llama.cpp's server did not start"
        yield address


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


@contextmanager
def mlx_server(model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "mlx_lm",
        "server",
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with process(words, **pipes) as started:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert started.poll() is None, "mlx_lm.server did not start"
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        yield address


def summary(address: str, folder: Path, *more: str, texts: int = 8) -> tuple[int, dict[str, Any]]:
    (folder / "prompts.txt").write_text("\n".join(TEXTS[:texts]))
    found = run(
        "compare", "--model", f"{address}/v1", "--prompts", str(folder / "prompts.txt"), "--a", "schedule=serial",
        "--b", f"static:{texts}", "--repeats", "2", "--json", *more,
    )  # fmt: skip
    return found.exit_code, json.loads(found.stdout)


def test_llama_cpp_with_a_tiny_model(tmp_path: Path) -> None:
    """Shapes, ids, values and schedules of the real server; what its kernels do to so small a model is not asserted."""
    model = KnownModel(layers=2, kind="F16").write(tmp_path / "tiny.gguf")
    with llama_server(model) as address:
        code, found = summary(address, tmp_path, "--both", "max_tokens=8")
        chat = record(
            Scenario.from_flags(f"{address}/v1", ["hello", "there"], "chat static max_tokens=6"),
            tmp_path / "chat",
        )
        alone, together = (
            record(
                Scenario.from_flags(f"{address}/v1", TEXTS[:3], f"{schedule} max_tokens=8 ignore_stop"),
                tmp_path / schedule,
            )
            for schedule in ("serial", "static")
        )
    load = chat.header["times"]["together"]["load"]
    assert load["by"] == "/metrics" and 1 < load["shared"] <= 2
    _found_inside(model, alone, together, tmp_path)
    assert chat.complete and "logits" not in chat.lacks and len(chat.generated(lens=False).token) >= 2
    assert code in (0, 1, 3)
    (arm,) = found["arms"]
    assert arm["requests"] == 16 and arm["left_out"] == 0 and arm["cached_a"] == arm["cached_b"] == 0
    assert found["repeats"][0]["name"] == "side a" and found["repeats"][0]["differing"] == 0
    assert (code == 0) == (arm["differing"] == 0 and arm["met"] is True)
    assert arm["flipped"] or arm["largest"] < 0.1


def _found_inside(model: Path, alone: Trace, together: Trace, folder: Path) -> None:
    """The same file in llama.cpp itself answers as its server did, each request alone; what flips there when together may differ."""
    base, _ = local(str(model))
    found = look_inside(alone, together, base, open_engine(base), folder / "inside", budget=0)
    # Parts of characters, of which a model of random weights writes many, are left out by the server.
    own, theirs = (trace.generated(lens=False) for trace in (Trace.open(folder / "inside" / "a"), alone))
    for number in range(len(alone.requests)):
        rest = iter(own.token[own.request == number].tolist())
        assert all(token in rest for token in theirs.token[theirs.request == number].tolist())
    assert found.found != ANOTHER_MODEL and not found.exact
    assert any("shared a forward is not known" in words for words in found.not_carried)


@pytest.mark.thorough
@pytest.mark.real_model
@pytest.mark.parametrize("kind", ["f16", "q4_1"])
def test_llama_cpp_with_smollm2(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """F16 differs where this processor's kernels for one row and for eight do; Q4_1 is the same everywhere here."""
    model = request.getfixturevalue(f"smollm2_{kind}_gguf")
    with llama_server(model) as address:
        code, found = summary(address, tmp_path, "--both", "max_tokens=16")
    (arm,) = found["arms"]
    alone, together = found["repeats"]
    assert alone["differing"] == 0, "run to run is not zero"
    # Which requests meet in a forward may be another matter from run to run.
    assert together["largest"] < 0.1
    assert arm["most"] >= 2 and arm["requests"] == 16
    if kind == "q4_1":
        assert (code, arm["differing"], together["differing"]) == (0, 0, 0)
        return
    if code == 0:
        pytest.skip("this processor's F16 kernels give one row and eight the same bits")
    assert code == 1 and arm["differing"] > 0 and 0 < arm["largest"] < 0.1


@pytest.mark.thorough
def test_mlx_lm_server_gives_each_request_the_same_alone_and_together(
    tmp_path: Path, smollm2_packed_f32: Path
) -> None:
    with mlx_server(smollm2_packed_f32) as address:
        # Whether requests meet is the machine's to say; that they never did is an answer of its own.
        for _ in range(4):
            code, found = summary(address, tmp_path, "--both", "max_tokens=2", texts=4)
            if code != 3:
                break
    (arm,) = found["arms"]
    assert code == 0 and arm["differing"] == 0 and arm["numbers"] == 16 and arm["most"] >= 2
    assert any("names another token than the one it sent" in note for note in found["notes"])
    assert any("cannot be switched off" in note for note in found["notes"])
