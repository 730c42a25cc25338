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
        "gemma270_bf16",
    }
    for item in items:
        if real & set(getattr(item, "fixturenames", ())):
            item.add_marker("real_model")


def _lay_out(kind: str, *options: str, model: str = "smollm2") -> Path:
    cache = Path(os.environ.get("DETDIFF_MODEL_CACHE") or Path.home() / ".cache" / "detdiff")
    directory = cache / "tests" / f"{model}-{kind}-{_import_version()}"
    command = [sys.executable, str(TOOL), model, str(directory), *options]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        problem = (
            f"no real model: `python {TOOL} {model} DEST {' '.join(options)}` said: {done.stderr[-1000:]}"
        )
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    os.utime(directory)
    _forget_old(directory.parent)
    return directory


def _import_version() -> str:
    # A layout that an older import wrote must not pass for the work of this one.
    sources = sorted((ROOT / "detdiff" / "engines" / "mlx" / "gguf_import").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in (*sources, ROOT / TOOL))).hexdigest()[:12]


def _forget_old(folder: Path) -> None:
    for other in folder.iterdir():
        try:
            if time.time() - other.stat().st_mtime > WEEK:
                shutil.rmtree(other)
        except FileNotFoundError:  # another worker was quicker
            continue
