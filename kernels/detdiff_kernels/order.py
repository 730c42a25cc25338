"""The order of a sum as data, and what carries it out: staging a weight, then summing over it.

A kernel family is an ``Order``. Two loops serve them all: sums over lanes, and one chain per output. The
compiled loops are imported on first use, so that listing kernels and choosing by a profile need no numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .threads import share

Float32 = NDArray[np.float32]

_PANEL = 32


@dataclass(frozen=True)
class Order:
    """How one output is summed. Accumulators and outputs are float32, every multiply-add is one FMA.

    ``lanes`` partial sums run side by side; lane l takes ``values`` consecutive items of every ``lanes *
    values``, in ascending order, starting at l * values. At the end the lanes are added by halving: lane l
    takes lane l + n/2, then l + n/4, and so on. Items missing in the last step count as +0.0 times +0.0. One
    lane is a plain chain over ascending k. ``staging`` is what weights are rounded to first, to nearest even;
    float16 overflows to infinity.
    """

    lanes: int
    values: int
    staging: Literal["float32", "float16"]

    @property
    def step(self) -> int:
        """Items that all lanes together take at a time."""
        return self.lanes * self.values


@dataclass(frozen=True, eq=False)
class Staged:
    """A weight (n, k) as one order wants it. ``data`` is flat: float32, or uint16 holding float16 bits."""

    order: Order
    n: int
    k: int
    data: NDArray[Any]


def stage(order: Order, weight: Float32) -> Staged:
    """Rounds and lays out a float32 weight (n, k).

    Lanes read rows as they are: a contiguous, aligned float32 weight is then referred to, not copied. A chain
    wants panels of 32 outputs, k-major within a panel, so that it streams; outputs that fill up the last
    panel are zero.
    """
    n, k = weight.shape
    data: NDArray[Any] = weight
    if order.staging == "float16":
        with np.errstate(over="ignore", under="ignore"):
            data = weight.astype(np.float16)
    if order.lanes == 1:
        full = n // _PANEL * _PANEL
        panels = np.zeros((-(-n // _PANEL), k, _PANEL), dtype=data.dtype)
        panels[: full // _PANEL] = data[:full].reshape(-1, _PANEL, k).swapaxes(1, 2)
        if full < n:
            panels[-1, :, : n - full] = data[full:].T
        data = panels
    flat = np.require(np.asarray(data), requirements=["C", "A"]).reshape(-1)
    return Staged(order, n, k, flat.view(np.uint16) if order.staging == "float16" else flat)


def accumulate(x: Float32, staged: Staged, out: Float32) -> None:
    """Fills ``out`` (m, n) with the sums of contiguous ``x`` (m, k) over a staged weight."""
    from . import loops  # numba takes most of a second to import

    order, n, k, m = staged.order, staged.n, staged.k, x.shape[0]
    flat, weights, result = np.asarray(x).reshape(-1), staged.data, np.asarray(out).reshape(-1)
    if order.lanes == 1:
        loop, count = loops.chain_loop(_PANEL), -(-n // _PANEL)
    else:
        loop, count = loops.lane_loop(order.lanes, order.values), n
        by_turn = np.empty(m * -(-k // order.step) * order.step, dtype=np.float32)
        loops.turn_loop(order.lanes, order.values)(flat, by_turn, m, k)
        flat = by_turn
    share(lambda first, last: loop(flat, weights, result, m, n, k, first, last), count, m * n * k)
