"""Paired runs: sides that are compared take turns in one process, so that whatever else the machine does falls on all.

A ratio is the median of the ratios within a round, never a ratio of two averages taken at different times.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import TypeVar

Measured = TypeVar("Measured")


def alternate(sides: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Each side's measurement of every round; sides swap places from round to round."""
    names = list(sides)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(rounds):
        # Reversed in every second round: a machine that slows down steadily then favours no side.
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(sides[name]())
    return found


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median of the rounds' own ratios."""
    return median(a / b for a, b in zip(of, to, strict=True))


def spread(of: Sequence[float], to: Sequence[float]) -> str:
    """Lowest and highest of the rounds' own ratios, as text."""
    ratios = [a / b for a, b in zip(of, to, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def machine() -> str:
    """One line: processor, cores, system, the packages that set the speed, and the load while this was called."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "numba", "numpy"))
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; "
        f"Python {platform.python_version()}, {packages}; load {load} at the start"
    )


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
