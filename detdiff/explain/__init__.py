"""Explaining a divergence: controls, patches, the float64 oracle, verdicts.

``Verdict`` and what it is made of need no model; ``explain`` runs one, and loads MLX on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .control import Control
from .verdict import KINDS, Evidence, Verdict

if TYPE_CHECKING:
    from .investigate import DECIDING, ORDER, explain

__all__ = ["DECIDING", "KINDS", "ORDER", "Control", "Evidence", "Verdict", "explain"]


def __getattr__(name: str) -> Any:
    if name not in ("DECIDING", "ORDER", "explain"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".investigate", __name__), name)
