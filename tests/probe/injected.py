"""Operations with one injected fault each. Without it they are exact: a row's outputs depend on the row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.probe import Function, Probe, probe

K, N = 8, 5
WEIGHT = np.arange(1, K * N + 1).reshape(K, N)

Rows = NDArray[np.float32]
Op = Callable[[Rows], NDArray[Any]]


def exact(x: Rows) -> NDArray[np.float64]:
    """Integer sums, in which no order of adding can show."""
    return (np.rint(x.astype(np.float64) * 64).astype(np.int64) @ WEIGHT).astype(np.float64)


def injected(fault: Callable[[Rows, NDArray[np.float64]], None]) -> Op:
    """``fault`` is given the rows and the right outputs, and changes the outputs in place."""

    def operation(x: Rows) -> NDArray[np.float32]:
        y = exact(x)
        fault(x, y)
        return y.astype(np.float32)

    return operation


def probed(operation: Op, rows: str = "1..9", seeds: int = 3) -> Probe:
    return probe(Function(operation, "injected:operation", K), rows=rows, seeds=seeds, timed=False)
