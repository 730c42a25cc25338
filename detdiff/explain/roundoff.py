"""Unit roundoffs, and what many roundings come to together; see ``docs/bounds.md``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LARGEST = {"float32": (2 - 2.0**-23) * 2.0**127, "float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
# Half the distance of the numbers around zero: what a rounding to nearest can be off where it is subnormal.
SMALLEST = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
FLUSHED = 2.0**-126
"""What is lost where float32 numbers below the smallest normal one become zero."""

U32 = UNIT["float32"]


def growth(*roundings: tuple[float, float]) -> float:
    """What ``(count, unit)`` roundings can make of a number, relative to it: the product of all (1 + unit)**count, less 1.

    At most gamma of the sum of all count * unit (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma
    3.1), and unlike gamma it holds for any count.
    """
    with np.errstate(over="ignore"):
        return float(np.expm1(sum(count * np.log1p(unit) for count, unit in roundings)))


def numbers(values: Any) -> Float64:
    """An array, or recorded ``Values`` in their own shape, as float64; exact for all float types that models use."""
    if hasattr(values, "numbers"):
        found: Float64 = values.numbers().reshape(values.data.shape)
        return found
    return np.asarray(values, np.float64)
