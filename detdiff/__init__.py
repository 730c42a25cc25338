"""detdiff: record two runs of a language model and find where, and why, they diverge.

The public names below load on first use, so that ``import detdiff`` imports neither mlx nor numba and two
traces can be compared on a machine that has no mlx.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detdiff.compare import Divergence, compare
    from detdiff.engines.record import record
    from detdiff.explain import Verdict, explain
    from detdiff.invariance.invariant import invariant
    from detdiff.scenario import Scenario
    from detdiff.trace import Trace

__version__ = "0.1.0"

__all__ = ["Divergence", "Scenario", "Trace", "Verdict", "compare", "explain", "invariant", "record"]

_HOME = {
    "Divergence": "detdiff.compare",
    "Scenario": "detdiff.scenario",
    "Trace": "detdiff.trace",
    "Verdict": "detdiff.explain",
    "compare": "detdiff.compare",
    "explain": "detdiff.explain",
    "invariant": "detdiff.invariance.invariant",
    "record": "detdiff.engines.record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    # `compare` and `explain` are both a subpackage and the function in it. Importing a subpackage binds its name here,
    # which would make `detdiff.compare` a function or a module by the order of imports; it is always the function.
    def __setattr__(self, name: str, value: object) -> None:
        if not (name in ("compare", "explain") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
