"""What all tests share: no network, no time limits on examples, one real model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before any test imports a host library: a model that is not on the disk is an error, never a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The time of an example says more about the machine than about the code. On CI every run tries the same
# examples, so that a red one can be repeated.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Directory of SmolLM2-135M-Instruct, 4-bit blocks with bf16 activations; `make model` fetches it."""
    asked = os.environ.get("DETDIFF_REAL_MODEL")
    path = ROOT / (asked or ".cache/models/smollm2-packed-bf16")
    if (path / "config.json").is_file():
        return path
    if asked:
        pytest.fail(f"DETDIFF_REAL_MODEL names {path}, which holds no model.")
    pytest.skip("no real model here; `make model` fetches it")
