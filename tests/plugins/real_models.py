"""Fixtures with a real model's weights, laid out once by `tools/real_model.py` for all test workers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = Path("tools", "real_model.py")
WEEK = 7 * 24 * 3600


@pytest.fixture(scope="session")
def smollm2_packed_bf16() -> Path:
    """SmolLM2-135M-Instruct, the file's own 4-bit blocks, scales and activations in bfloat16."""
    return _lay_out("packed-bf16", "--packed", "--dtype", "bf16")


@pytest.fixture(scope="session")
def smollm2_packed_f32() -> Path:
    """SmolLM2-135M-Instruct, the file's own 4-bit blocks, scales and activations in float32."""
    return _lay_out("packed-f32", "--packed", "--dtype", "f32")


@pytest.fixture(scope="session")
def smollm2_bf16() -> Path:
    """SmolLM2-135M-Instruct, unpacked to dense bfloat16."""
    return _lay_out("bf16", "--dtype", "bf16")


@pytest.fixture(scope="session")
def smollm2_draft_3bit() -> Path:
    """SmolLM2-135M-Instruct again, quantised to 3 bits: a draft of the same tokenizer that is rejected often."""
    return _lay_out("draft-q3", "--quantize", "3", "--dtype", "bf16")


@pytest.fixture(scope="session")
def smollm2_f16_gguf() -> Path:
    """SmolLM2-135M-Instruct as one GGUF file, matrices unpacked to float16."""
    return _lay_out("f16.gguf", "--gguf", "f16")


@pytest.fixture(scope="session")
def smollm2_f32_gguf() -> Path:
    """SmolLM2-135M-Instruct as one GGUF file, matrices unpacked to float32."""
    return _lay_out("f32.gguf", "--gguf", "f32")


@pytest.fixture(scope="session")
def smollm2_q8_0_gguf() -> Path:
    """SmolLM2-135M-Instruct as one GGUF file, matrices quantised again to Q8_0."""
    return _lay_out("q8_0.gguf", "--gguf", "q8_0")


@pytest.fixture(scope="session")
def smollm2_q4_1_gguf() -> Path:
    """SmolLM2-135M-Instruct as one GGUF file, as it is published: Q4_1 with a Q8_0 embedding."""
    return _lay_out("q4_1.gguf", "--gguf", "q4_1")


@pytest.fixture(scope="session")
def gemma270_bf16() -> Path:
    """Gemma 3 270M, unpacked to dense bfloat16; only where it is asked for."""
    if not os.environ.get("DETDIFF_TEST_GEMMA"):
        pytest.skip(
            "set DETDIFF_TEST_GEMMA=1 to fetch Gemma 3 270M, whose weights come under the Gemma terms of use"
        )
    return _lay_out("bf16", "--dtype", "bf16", model="gemma270")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    real = {
        "smollm2_packed_bf16",
        "smollm2_packed_f32",
        "smollm2_bf16",
        "smollm2_draft_3bit",
        "smollm2_f16_gguf",
        "smollm2_f32_gguf",
        "smollm2_q8_0_gguf",
        "smollm2_q4_1_gguf",
        "gemma270_bf16",
    }
    for item in items:
        if real & set(getattr(item, "fixturenames", ())):
            item.add_marker("real_model")


def _lay_out(kind: str, *options: str, model: str = "smollm2") -> Path:
    cache = Path(os.environ.get("DETDIFF_MODEL_CACHE") or Path.home() / ".cache" / "detdiff")
    name, dot, ending = kind.partition(".")
    laid_out = cache / "tests" / f"{model}-{name}-{_import_version()}{dot}{ending}"
    # The tool writes all of it or nothing, and reading a GGUF file again takes seconds.
    if not laid_out.exists():
        _run_tool(model, laid_out, options)
    os.utime(laid_out)
    _forget_old(laid_out.parent)
    return laid_out


def _run_tool(model: str, laid_out: Path, options: tuple[str, ...]) -> None:
    command = [sys.executable, str(TOOL), model, str(laid_out), *options]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        problem = (
            f"no real model: `python {TOOL} {model} DEST {' '.join(options)}` said: {done.stderr[-1000:]}"
        )
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)


def _import_version() -> str:
    # A layout that an older import wrote must not pass for the work of this one.
    sources = sorted((ROOT / "detdiff" / "engines" / "mlx" / "gguf_import").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in (*sources, ROOT / TOOL))).hexdigest()[:12]


def _forget_old(folder: Path) -> None:
    for other in folder.iterdir():
        try:
            if time.time() - other.stat().st_mtime > WEEK:
                shutil.rmtree(other) if other.is_dir() else other.unlink()
        except FileNotFoundError:  # another worker was quicker
            continue
