"""Test files that pytest runs: in this process, so that MLX is imported once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from inner_runs import STRICT, Imported, Run

sys.path.append(str(Path(__file__).resolve().parent.parent / "faults"))


_IMPORTED = Imported()


@pytest.fixture(autouse=True)
def imported() -> Iterator[Imported]:
    """Before ``pytester`` takes note of the modules that there are, and after it has put those back."""
    _IMPORTED.keep()
    yield _IMPORTED
    _IMPORTED.keep()


@pytest.fixture
def again(imported: Imported, pytester: pytest.Pytester) -> Run:
    """Run pytest with ``arguments`` on the files that are there."""

    def again(*arguments: str) -> pytest.RunResult:
        result = pytester.runpytest_inprocess(*STRICT, *arguments, plugins=[imported])
        imported.keep()
        return result

    return again


@pytest.fixture
def run(pytester: pytest.Pytester, again: Run) -> Run:
    """Write ``text`` as a test file and run it with ``arguments``."""

    def run(text: str, *arguments: str, file: str = "test_it.py") -> pytest.RunResult:
        (pytester.path / file).write_text(text, encoding="utf-8")
        return again(*arguments)

    return run
