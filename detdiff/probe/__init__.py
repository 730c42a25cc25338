"""Probing an operation: which numbers of rows change a row's bits, and what each costs.

Importing this imports neither mlx nor torch; what is probed does.
"""

from __future__ import annotations

from .operation import LinearSizes
from .run import Probe, find_target, probe
from .targets import Function, LinearTarget

__all__ = ["Function", "LinearTarget", "Probe", "LinearSizes", "find_target", "probe"]
