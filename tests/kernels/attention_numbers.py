"""What the statements of the attention kernels are made of: operations on one number, and a row of a call."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Number = np.float32
Bias = list[Number | None]

_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.restype = ctypes.c_float
_fmaf.argtypes = [ctypes.c_float] * 3

ZERO, ONE = Number(0), Number(1)
LOG2E = Number(1.44269504088896340736)
LOWEST = Number(-3.4028234663852886e38)


def fma(a: Number, b: Number, c: Number) -> Number:
    return Number(_fmaf(float(a), float(b), float(c)))


def _power(x: Number, near: Callable[[float], float], exact: Callable[[Decimal], Decimal]) -> Number:
    """The power to nearest even: from the library's double unless that is too near the middle of two floats."""
    if not abs(x) < 250:
        return Number(near(float(np.clip(x, -250, 250))))
    value = near(float(x))
    low, high = Number(value * (1 - 4e-16)), Number(value * (1 + 4e-16))
    if low == high:
        return low
    with localcontext() as context:
        context.prec = 60
        return Number(float(f"{exact(Decimal(float(x))):.40e}"))


def exp2(x: Number) -> Number:
    return _power(x, lambda y: 2.0**y, lambda y: (y * Decimal(2).ln()).exp())


def exp_fast(x: Number) -> Number:
    return exp2(Number(x * LOG2E))


def exp(x: Number) -> Number:
    return _power(x, math.exp, lambda y: y.exp())


def log(x: Number) -> Number:
    return Number(math.log(x))


def largest(numbers: list[Number]) -> Number:
    """The largest that is a number."""
    kept = [number for number in numbers if not np.isnan(number)]
    return max(kept) if kept else Number(np.nan)


def to_dtype(x: Number, dtype: str) -> Number:
    if dtype == "float32" or not np.isfinite(x):
        return x
    if dtype == "float16":
        return Number(np.float16(x))
    quantum = 2.0 ** (max(math.frexp(x)[1], -125) - 8)
    value = math.copysign(round(float(x) / quantum) * quantum, x)
    return Number(value)


def tree(numbers: list[Number]) -> Number:
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [low + high for low, high in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def columns(rows: list[list[Number]]) -> list[list[Number]]:
    return [list(column) for column in zip(*rows, strict=True)]


def chain(a: list[Number], b: list[Number], total: Number = ZERO) -> Number:
    for x, y in zip(a, b, strict=True):
        total = fma(x, y, total)
    return total


@dataclass(frozen=True)
class Row:
    """One row of a call: its query, its keys and values, what is added to each score (None: masked)."""

    q: list[Number]
    keys: list[list[Number]]
    values: list[list[Number]]
    bias: Bias
    sink: Number | None
    scale: Number
    dtype: str
    offset: int
    heads: int
    kv_heads: int
    rows: int
    batch: int
    masked: bool

    @property
    def shared(self) -> int:
        return self.rows * (self.heads // self.kv_heads)

    @property
    def positions(self) -> int:
        return self.offset + len(self.keys)

    @property
    def used(self) -> list[int]:
        return [key for key, added in enumerate(self.bias) if added is not None]

    def added(self, key: int) -> Number:
        value = self.bias[key]
        assert value is not None
        return value
