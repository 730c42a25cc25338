"""Rounding float32 values to an activation's dtype and back, to nearest even, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

DTYPES = ("float32", "float16", "bfloat16")


def widen(data: NDArray[Any], dtype: str) -> Float32:
    """float16 values, or uint16 bits of bfloat16, as float32; exact."""
    if dtype == "bfloat16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.astype(np.float32)


def narrow(values: Float32, dtype: str) -> NDArray[Any]:
    """float32 values rounded to ``dtype``: as float32, as float16, or as the uint16 bits of bfloat16."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    # Adding could carry a NaN's payload into infinity or beyond; a NaN keeps its sign and stays quiet.
    quiet = bits >> np.uint32(16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def rounded(values: Float32, dtype: str) -> Float32:
    """float32 values rounded to ``dtype`` and widened again."""
    return values if dtype == "float32" else widen(narrow(values, dtype), dtype)
