"""Runs of pytest in the process of a test: how strict they are, what they leave imported, and the text of one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

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


def text_of(result: pytest.RunResult) -> str:
    """What was printed, its lines joined: prose is wrapped."""
    return " ".join(result.stdout.str().split())
