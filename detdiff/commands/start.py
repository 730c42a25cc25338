"""What a command does before the first model is opened, so that its process spends its time on the model."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_KNOWN_BEFORE = frozenset(
    {"__class__", "__dict__", "__doc__", "__file__", "__loader__", "__name__", "__spec__"}
)
"""What Python's own import reads of a module that it finds, and what the module has before it is run."""


class _UnusedModule(ModuleType):
    """A module that is run when something of it is first asked for, a submodule included."""

    def __getattribute__(self, name: str) -> Any:
        if name in _KNOWN_BEFORE:
            return super().__getattribute__(name)
        _run(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _KNOWN_BEFORE:
            _run(self)
        ModuleType.__setattr__(self, name, value)


def wait_for_use(name: str) -> None:
    """From now on an import of the package ``name`` costs nothing until something of it is used.

    mlx-lm imports transformers, which imports torch where it is installed, two seconds of a processor, and for a model of
    mlx-lm uses nothing of it. A package that is imported already, or is not installed, is left alone.
    """
    if name in sys.modules:
        return
    spec = find_spec(name)
    if spec is None or spec.loader is None or spec.origin is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _UnusedModule
    sys.modules[name] = module


def _run(module: ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    module.__class__ = ModuleType
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # As after an import that failed: the next one tries again.
        sys.modules.pop(spec.name, None)
        raise


def settled() -> None:
    """What was imported and loaded stays: the garbage collector does not look through it again while a model runs."""
    gc.freeze()
