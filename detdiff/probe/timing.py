"""What each M costs: runs of all M take turns, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

import numpy as np

from .operation import Operation
from .rows import Content

BUDGET = 2.0  # seconds in all
FEWEST, MOST = 5, 101  # rounds
CLEAR = 0.05  # a smaller difference from row by row counts as none


@dataclass(frozen=True)
class Time:
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


def measure(operation: Operation, content: Content, rows: Sequence[int]) -> tuple[Time, ...]:
    """Times every M of ``rows``, which start with 1. Each round calls all M once, in a new order."""
    given = {m: operation.given(content.rows[:m]) for m in rows}
    for m in rows:
        operation.run(given[m])
    order = np.random.default_rng(0)
    taken: dict[int, list[float]] = {m: [] for m in rows}
    start = perf_counter()
    done = 0
    while done < FEWEST or (done < MOST and perf_counter() - start < BUDGET):
        for place in order.permutation(len(rows)).tolist():
            m = rows[place]
            before = perf_counter()
            operation.run(given[m])
            taken[m].append(perf_counter() - before)
        done += 1
    return tuple(_time(m, taken[m], taken[1]) for m in rows)


def _time(m: int, taken: Sequence[float], alone: Sequence[float]) -> Time:
    # A clock may be too coarse to see one call of a tiny operation.
    ratios = [max(t, 1e-9) / (m * max(one, 1e-9)) for t, one in zip(taken, alone, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return Time(m, quantiles(taken, n=4)[1], middle, low, high, len(taken))


def crossing(times: Sequence[Time]) -> int | None:
    """The smallest M from which on every swept M costs less in one call than row by row; None where none does."""
    found = None
    for time in reversed(times):
        if time.rows == 1 or not time.pays:
            break
        found = time.rows
    return found
