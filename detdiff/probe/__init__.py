"""Probing an operation: which numbers of rows change a row's bits, and what each costs.

Importing this imports neither mlx nor torch; what is probed does.
"""

from __future__ import annotations

from .answer import Probe
from .function import Function
from .linear import Linear, Shape
from .run import find_target, probe

__all__ = ["Function", "Linear", "Probe", "Shape", "find_target", "probe"]
