"""Test files that pytest runs: in this process, so that MLX is imported once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "faults"))

STRICT = (
    "-p",
    "no:cacheprovider",
    "--strict-markers",
    "-W",
    "error",
    # An editable install of a plugin has a module that is imported before pytest.
    "-W",
    "ignore:Module already imported so cannot be rewritten",
)
Run = Callable[..., pytest.RunResult]


class Imported:
    """Remembers what inner runs have imported, but for their test files; MLX and numba cannot be imported twice."""

    def __init__(self) -> None:
        self._seen: dict[str, ModuleType] = {}

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Right before pytest puts back the modules that there were before an inner run."""
        folder = str(config.rootpath)
        for name, module in sys.modules.items():
            if not str(getattr(module, "__file__", None)).startswith(folder):
                self._seen.setdefault(name, module)

    def keep(self) -> None:
        for name, module in self._seen.items():
            sys.modules.setdefault(name, module)


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


def text_of(result: pytest.RunResult) -> str:
    """What was printed, its lines joined: prose is wrapped."""
    return " ".join(result.stdout.str().split())
