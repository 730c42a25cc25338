"""How far outputs are from those of one another, and from the same sums in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import ulp_distance

from .operation import Exact, Float64
from .sweep import Seen

# Bits after the point, and the exponent of the smallest normal number.
_FORMATS = {"BF16": (7, -126), "F16": (10, -14), "F32": (23, -126), "F64": (52, -1022)}


@dataclass(frozen=True)
class Change:
    """Row 0 at M ``rows`` against row 0 alone, over all seeds.

    ``differing`` of ``outputs`` values have other bits; ``seeds`` are those in which any has. ``max_ulp`` is None
    where the dtype changed or has no ULP, and leaves out what is not finite.
    """

    rows: int
    differing: int
    outputs: int
    max_ulp: int | None
    seeds: tuple[int, ...]

    @property
    def equal(self) -> bool:
        return not self.seeds


@dataclass(frozen=True)
class Error:
    """What a class of M is from float64, over row 0 of all seeds.

    ULP are those of the output's dtype at the exact value; relative is to sum |x||w|, None where that is not known.
    ``non_finite`` outputs are in no other figure.
    """

    rows: tuple[int, ...]
    max_ulp: float
    mean_ulp: float
    max_relative: float | None
    mean_relative: float | None
    non_finite: int
    outputs: int


def change(seen: Sequence[Seen], rows: int) -> Change:
    """Row 0 at M ``rows`` against M = 1."""
    differing = outputs = 0
    worst: int | None = 0
    seeds = tuple(one.seed for one in seen if one.key(1) != one.key(rows))
    pairs = [pair for one in seen for pair in zip(one.outputs(1), one.outputs(rows), strict=True)]
    for alone, many in pairs:
        outputs += many.data.size
        if alone.dtype != many.dtype or alone.dtype not in _FORMATS:
            other = (
                alone.data != many.data if alone.dtype == many.dtype else np.ones(many.data.shape, np.bool_)
            )
            differing += int(np.count_nonzero(other))
            worst = None
            continue
        differing += int(np.count_nonzero(alone.bits() != many.bits()))
        finite = np.isfinite(alone.numbers()) & np.isfinite(many.numbers())
        apart = ulp_distance(alone, many)[finite]
        if worst is not None and apart.size:
            worst = max(worst, int(apart.max()))
    return Change(rows, differing, outputs, worst, seeds)


def error(seen: Sequence[Seen], exact: Sequence[Exact], rows: tuple[int, ...]) -> Error | None:
    """The error of one class, whose M all give row 0 the same bits; None where its dtype has no ULP."""
    ulps: list[Float64] = []
    relative: list[Float64] = []
    outputs = 0
    for one, truth in zip(seen, exact, strict=True):
        values = one.first[rows[0]]
        if values.dtype not in _FORMATS:
            return None
        want = truth.outputs.reshape(-1)
        numbers = values.numbers()
        outputs += numbers.size
        finite = np.isfinite(numbers) & np.isfinite(want)
        off = np.abs(numbers[finite] - want[finite])
        ulps.append(off / ulp(want[finite], values.dtype))
        if truth.magnitude is not None:
            size = truth.magnitude.reshape(-1)[finite]
            relative.append(np.divide(off, size, out=np.zeros_like(off), where=size > 0))
    joined = np.concatenate(ulps)
    ratios = np.concatenate(relative) if relative else None
    left = outputs - joined.size
    if not joined.size:
        return Error(rows, 0.0, 0.0, None, None, left, outputs)
    most, mean = (None, None) if ratios is None else (float(ratios.max()), float(ratios.mean()))
    return Error(rows, float(joined.max()), float(joined.mean()), most, mean, left, outputs)


def ulp(numbers: Float64, dtype: str) -> Float64:
    """The distance of neighbouring numbers of ``dtype`` (BF16, F16, F32, F64) at each of ``numbers``, in float64."""
    digits, smallest = _FORMATS[dtype]
    exponents: NDArray[np.int32] = np.frexp(numbers)[1] - 1
    exponents = np.where(numbers == 0, smallest, np.maximum(exponents, smallest))
    return np.ldexp(np.ones_like(numbers), exponents - digits)
