"""How far outputs are from those of one another and from the same sums in float64, and what each M costs.

Runs of all M take turns, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import ulp_distance

from .operation import ExactOutputs, Float64, ProbedOperation, ProbeTarget
from .sweep import RowContent, SeedSweep

# Bits after the point, and the exponent of the smallest normal number.
_FORMATS = {"BF16": (7, -126), "F16": (10, -14), "F32": (23, -126), "F64": (52, -1022)}


@dataclass(frozen=True)
class RowChange:
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


def change(seen: Sequence[SeedSweep], rows: int) -> RowChange:
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
    return RowChange(rows, differing, outputs, worst, seeds)


def error(seen: Sequence[SeedSweep], exact: Sequence[ExactOutputs], rows: tuple[int, ...]) -> Error | None:
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


Clock = Callable[[], float]
BUDGET = 2.0  # seconds in all
FEWEST, MOST = 5, 101  # rounds
CLEAR = 0.05  # a smaller difference from row by row counts as none


@dataclass(frozen=True)
class CallTime:
    """One call of ``rows`` rows: ``seconds`` is the median of the rounds.

    ``ratio`` is this call's time over that of ``rows`` calls of one row, taken within each round: its median, and
    its quartiles ``low`` and ``high``.
    """

    rows: int
    seconds: float
    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def per_row(self) -> float:
        return self.seconds / self.rows

    @property
    def pays(self) -> bool:
        """One call takes at least 5 % less than row by row, in the median round."""
        return self.ratio <= 1 - CLEAR

    @property
    def costs(self) -> bool:
        """One call takes at least 5 % more than row by row, in the median round."""
        return self.ratio >= 1 + CLEAR


def measure(
    operation: ProbedOperation,
    content: RowContent,
    rows: Sequence[int],
    now: Clock = perf_counter,
    *,
    budget: float = BUDGET,
) -> tuple[CallTime, ...]:
    """Times every M of ``rows``, which start with 1, in seconds of ``now``."""
    given = {m: operation.given(content.rows[:m]) for m in rows}
    return call_times(lambda m: operation.run(given[m]), rows, now, budget)


def call_times(
    call: Callable[[int], object], rows: Sequence[int], now: Clock = perf_counter, budget: float = BUDGET
) -> tuple[CallTime, ...]:
    """Times ``call(m)`` for every M of ``rows``, which start with 1. Each round calls all M once, in a new order; ``budget`` is in
    seconds."""
    for m in rows:
        call(m)
    order = np.random.default_rng(0)
    taken: dict[int, list[float]] = {m: [] for m in rows}
    start = perf_counter()
    done = 0
    while done < FEWEST or (done < MOST and perf_counter() - start < budget):
        for place in order.permutation(len(rows)).tolist():
            m = rows[place]
            before = now()
            call(m)
            taken[m].append(now() - before)
        done += 1
    return tuple(_time(m, taken[m], taken[1]) for m in rows)


def _time(m: int, taken: Sequence[float], alone: Sequence[float]) -> CallTime:
    # A clock may be too coarse to see one call of a tiny operation.
    ratios = [max(t, 1e-9) / (m * max(one, 1e-9)) for t, one in zip(taken, alone, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return CallTime(m, quantiles(taken, n=4)[1], middle, low, high, len(taken))


def crossing(times: Sequence[CallTime]) -> int | None:
    """The smallest M from which on every swept M costs less in one call than row by row; None where none does."""
    found = None
    for time in reversed(times):
        if time.rows == 1 or not time.pays:
            break
        found = time.rows
    return found


@dataclass(frozen=True)
class RowCosts:
    """What each M costs in calls that a model makes ``count`` times a forward: those of one linear shape, or the whole forward."""

    what: str
    count: int
    times: tuple[CallTime, ...]


def costs_of(
    shapes: Iterable[tuple[str, int, ProbeTarget]], rows: Sequence[int], now: Clock
) -> list[RowCosts]:
    """Of (shape, how many sites have it, one of them)."""
    found = []
    for shape, count, target in shapes:
        operation = target.operation(0)
        content = RowContent.of_seed(0, rows[-1], operation)
        found.append(RowCosts(shape, count, measure(operation, content, rows, now)))
    return found


def joined_ratio(costs: Sequence[RowCosts], rows: int) -> float:
    """The time of all calls of ``rows`` rows over that of as many calls of one row each, medians."""
    together = {
        m: sum(each.count * next(t.seconds for t in each.times if t.rows == m) for each in costs)
        for m in (1, rows)
    }
    return together[rows] / (rows * together[1])
