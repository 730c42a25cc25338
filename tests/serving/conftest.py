"""Served models in threads of the tests' own process, one engine for all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from clients import TEMPLATE, Served, served

from detdiff.engines.mlx.engine import MlxEngine
from detdiff.engines.mlx.model import load


@pytest.fixture(autouse=True)
def _quick_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


def opened() -> Any:
    """The built-in model, with a chat template."""
    loaded = load("builtin")
    loaded.tokenizer._tokenizer.chat_template = TEMPLATE
    loaded.tokenizer.has_chat_template = True
    return MlxEngine(loaded)


@pytest.fixture(scope="package")
def engine() -> Any:
    """What a test serves itself."""
    return opened()


@pytest.fixture(scope="module")
def native() -> Iterator[Served]:
    """A server with MLX's own kernels, which nothing records. Taps are on its model as long as it runs."""
    with served(opened()) as found:
        yield found
