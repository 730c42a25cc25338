"""How a probe's figures read, in text and in the chart."""

from __future__ import annotations

from collections.abc import Sequence

from detdiff.report.words import runs_of

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def letter(number: int) -> str:
    """A class's name: A to Z, then AA, AB and so on."""
    name = ""
    number += 1
    while number:
        number, place = divmod(number - 1, 26)
        name = chr(ord("A") + place) + name
    return name


def duration(seconds: float) -> str:
    """Three digits and a unit, such as ``1.23 ms``."""
    unit, name = next(((unit, name) for unit, name in UNITS if seconds >= unit), UNITS[-1])
    scaled = seconds / unit
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {name}"


def spans_of(values: Sequence[int]) -> str:
    """Ascending whole numbers, such as ``1-3, 5``; nothing for none."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs_of(values))
