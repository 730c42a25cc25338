"""Reducing a pair of runs: the smallest pair of scenarios that still diverges in the same way.

``reduce`` runs models, and loads MLX on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .result import ReduceOptions, Reduction, Step

if TYPE_CHECKING:
    from .run import reduce

__all__ = ["ReduceOptions", "Reduction", "Step", "reduce"]


def __getattr__(name: str) -> Any:
    if name != "reduce":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".run", __name__), name)
