"""A sweep of small cells: grids, and the folders that they leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def engine_is_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers find `sweep_engine` as the tests do, and what a sweep sets for them ends with the test."""
    there = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{there}" if there else str(HERE))
    monkeypatch.syspath_prepend(str(HERE))
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    assert str(HERE) in sys.path
