"""Scores an output against float64: inside what rounding allows or not, and which of two sides is nearer."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import OracleRefused

from .arithmetic import Arithmetic
from .bounds import Bounded
from .roundoff import UNIT, Float64, numbers

# A side is nearer if its root mean square error is at most this share of the other's, and as many elements are nearer
# as chance would give less often than that.
_SHARE = 0.8
_CHANCE = 0.01
# The median of a normal variable's size.
_MEDIAN_OF_NORMAL = 0.6745
_NAMES = {"float32": "float32", "float16": "float16 or tf32", "bfloat16": "bfloat16"}


class Operation(Protocol):
    """An operation with what it was given: ``Linear``, ``Switch``, ``Embedding``, ``Copied``, ``AttentionOperation``,
    ``Norm`` or ``Rope``."""

    def bounded(self, arithmetic: Arithmetic) -> Bounded:
        """Its outputs in float64 and the bound of a path; raises OracleRefused."""
        ...


@dataclass(frozen=True, eq=False)
class Judgement:
    """An output against float64, in units of the bound of the path that gave it.

    ``worst`` is at ``where``, an index of the output; ``outside`` counts elements beyond the bound, ``not_finite`` those
    among them that are NaN or infinite although no overflow is possible there. ``float32_units`` is the worst error in
    units of the bound that float32 sums over the same operands have, output rounding included: far above 1 where operands or
    sums were in less. ``precision`` is the unit roundoff of operands that would give the common element's error, 0 where the
    output's own rounding explains it, and ``precision_name`` the dtype that is nearest: "exact", "float32", "float16 or
    tf32", "bfloat16", or "none" from 1/2 on. ``errors`` are absolute, inf where not finite; ``scale`` is what a
    single rounding of operands leads to on average, over its unit.
    """

    path: str
    dtype: str
    bound: str
    worst: float
    where: tuple[int, ...]
    mean: float
    outside: int
    not_finite: int
    elements: int
    float32_units: float
    precision: float
    precision_name: str
    errors: Float64 = field(repr=False)
    scale: Float64 = field(repr=False)

    @property
    def inside(self) -> bool:
        """Whether rounding explains every element."""
        return self.outside == 0

    def as_json(self) -> dict[str, Any]:
        """All but the arrays; infinite figures as None."""
        figures = {
            name: value if np.isfinite(value) else None
            for name, value in (
                ("worst", self.worst), ("mean", self.mean), ("float32_units", self.float32_units),
                ("precision", self.precision),
            )
        }  # fmt: skip
        return {
            "path": self.path,
            "dtype": self.dtype,
            "bound": self.bound,
            "inside": self.inside,
            "where": list(self.where),
            "outside": self.outside,
            "not_finite": self.not_finite,
            "elements": self.elements,
            "precision_name": self.precision_name,
            **figures,
        }


@dataclass(frozen=True)
class Sides:
    """Which of two outputs of one operation is nearer to float64.

    ``ratio`` is A's root mean square error over B's, each element's error in units of its own scale; ``a_nearer`` and
    ``b_nearer`` count elements.
    """

    nearer: Literal["a", "b", "equal"]
    ratio: float
    a_nearer: int
    b_nearer: int


def judge(operation: Operation, output: Any, arithmetic: Arithmetic) -> Judgement:
    """Scores ``output``, an array of the operation's output shape, widened, or recorded ``Values``.

    Raises OracleRefused for another shape, for nothing to judge, and where the operation's bound is not known.
    """
    found = operation.bounded(arithmetic)
    given = numbers(output)
    if given.size != found.exact.size or not given.size:
        raise OracleRefused(
            f"The oracle was given an output of shape {given.shape}; expected one of {found.exact.shape} with at least one "
            "element. Give the rows that the operation's inputs are of."
        )
    given = given.reshape(found.exact.shape)
    finite = np.isfinite(given)
    allowed = found.unbounded & ~finite
    # What is not finite in float64 either, bit for bit the same kind, is no error.
    same = (np.isnan(given) & np.isnan(found.exact)) | (given == found.exact)
    signed = (found.bound == 0) & (given == 0) & (found.exact == 0)
    signed &= np.signbit(given) != np.signbit(found.exact)
    with np.errstate(all="ignore"):
        errors = np.where(same, 0.0, np.where(finite, np.abs(given - found.exact), np.inf))
        units = _ratio(errors, found.bound)
        units[allowed] = 0.0
        units[~finite & ~allowed & ~same] = np.inf
        plain = _ratio(errors, found.yardstick)
        plain[found.unbounded] = 0.0
    units[np.isnan(units) | signed] = np.inf
    where = np.unravel_index(int(np.argmax(units)), units.shape)
    outside = units > 1.0
    precision = _precision(errors, found, arithmetic)
    return Judgement(
        path=arithmetic.path,
        dtype=arithmetic.dtype,
        bound=found.text,
        worst=float(units.max()),
        where=tuple(int(i) for i in where),
        mean=float(np.mean(units)),
        outside=int(np.count_nonzero(outside)),
        not_finite=int(np.count_nonzero(outside & ~finite)),
        elements=units.size,
        float32_units=float(np.nanmax(plain, initial=0.0)),
        precision=precision,
        precision_name=_name(precision),
        errors=errors,
        scale=found.scale,
    )


def compare_sides(a: Judgement, b: Judgement) -> Sides:
    """Which side is nearer: its root mean square error is smaller by a fifth, and more elements are nearer than chance
    allows (a sign test on those that differ), so that no single element decides. Raises OracleRefused for two shapes."""
    if a.errors.shape != b.errors.shape:
        raise OracleRefused(
            f"Sides of shapes {a.errors.shape} and {b.errors.shape} were given; expected two outputs of one operation. Judge "
            "the same rows on both sides."
        )
    a_nearer = int(np.count_nonzero(a.errors < b.errors))
    b_nearer = int(np.count_nonzero(b.errors < a.errors))
    with np.errstate(all="ignore"):
        sizes = [_root_mean_square(_ratio(side.errors, side.scale)) for side in (a, b)]
        ratio = 1.0 if sizes[0] == sizes[1] else float(np.divide(sizes[0], sizes[1]))
    if not _by_chance(a_nearer, b_nearer):
        if a_nearer > b_nearer and ratio <= _SHARE:
            return Sides("a", ratio, a_nearer, b_nearer)
        if b_nearer > a_nearer and ratio >= 1 / _SHARE:
            return Sides("b", ratio, a_nearer, b_nearer)
    return Sides("equal", ratio, a_nearer, b_nearer)


def _by_chance(one: int, other: int) -> bool:
    """Whether a fair coin gives so uneven a count more often than ``_CHANCE``, on both sides."""
    n, few = one + other, min(one, other)
    if n > 1000:
        return bool(abs(one - other) / np.sqrt(n) < 2.58)
    tail = sum(comb(n, i) for i in range(few + 1))
    return bool(2 * tail / 2**n > _CHANCE)


def _ratio(errors: Float64, by: Float64) -> Float64:
    """Zero over zero, and anything over infinity, is zero."""
    found: Float64 = np.divide(errors, by, out=np.where(errors > 0, np.inf, 0.0), where=by > 0)
    return np.where((by == np.inf) & np.isfinite(errors), 0.0, found)


def _root_mean_square(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if np.isfinite(values).all() else float("inf")


def _precision(errors: Float64, found: Bounded, arithmetic: Arithmetic) -> float:
    """The unit roundoff of operands that would give such errors, without what rounding the output explains."""
    usable: NDArray[np.bool_] = np.isfinite(errors) & (found.scale > 0) & np.isfinite(found.scale)
    if not usable.any():
        return 0.0
    explained = arithmetic.unit * np.abs(found.exact[usable]) + arithmetic.smallest
    if arithmetic.dtype == "float32":
        explained = np.zeros_like(explained)
    left = np.maximum(errors[usable] - explained, 0.0)
    # Even over plus and minus the unit, such errors are normal by the time they are summed. The median is that of the
    # common element: a fault in a few leaves it alone.
    return float(np.sqrt(3.0) / _MEDIAN_OF_NORMAL * np.median(left / found.scale[usable]))


def _name(precision: float) -> str:
    if precision == 0:
        return "exact"
    if precision >= 0.5:
        return "none"
    return _NAMES[min(UNIT, key=lambda dtype: abs(np.log2(precision) - np.log2(UNIT[dtype])))]
