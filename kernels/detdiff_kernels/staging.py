"""Weights and rows laid out as an order walks them, and the walk itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .joins import JOINS
from .order import Order, Plan, plan
from .rounding import DTYPES, Float32
from .staged_rows import rows_laid_out
from .staged_weights import coefficients_of, terms_of
from .threads import share
from .weights import Weight

PANEL = 32
_CHUNK = 64 * PANEL


@dataclass(frozen=True, eq=False)
class Layout:
    """A weight in panels of 32 outputs: ``data`` flat (panel, term, output), ``kind`` what it holds; ``scales`` flat
    (panel, unit, coefficient, output). Outputs that fill up the last panel are zero."""

    data: NDArray[Any]
    kind: str
    scales: Float32


@dataclass(frozen=True, eq=False)
class Staged:
    """A weight (n, k) ready for one kernel and activations of ``dtype``; laid out when an order first asks for it."""

    kernel: str
    weight: Weight
    dtype: str
    layouts: dict[Any, Layout] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.weight.n

    @property
    def k(self) -> int:
        return self.weight.k

    def layout(self, order: Order) -> Layout:
        """What ``order`` reads; orders that differ in their reduction alone share it."""
        steps = plan(order, self.k)
        # Contiguous ranges, however many, are one walk.
        walk = None if steps.straight else order.walk
        key = (walk, order.weight, order.join, order.unit)
        if key not in self.layouts:
            self.layouts[key] = _laid_out(self.weight, order, steps, self.dtype)
        return self.layouts[key]


def _laid_out(weight: Weight, order: Order, steps: Plan, dtype: str) -> Layout:
    panels = -(-weight.n // PANEL)
    join = JOINS[order.join]
    coefficients = join.coefficients
    units = steps.lanes * steps.units
    firsts = steps.terms.reshape(units, join.accumulators, -1)[:, :, 0]
    data: NDArray[Any] | None = None
    kind = ""
    scales = np.zeros((panels, units * coefficients, PANEL) if coefficients else 1, np.float32)
    for first in range(0, weight.n, _CHUNK):
        part = weight.part(first, min(first + _CHUNK, weight.n))
        items, kind = terms_of(part, order, dtype)
        items = np.where(steps.terms >= 0, items[:, steps.terms], items.dtype.type(0))
        if order.walk.fields is not None:
            items &= steps.masks
        if data is None:
            data = np.zeros((panels, len(steps.terms), PANEL), items.dtype)
        _fill(data, first, items)
        if coefficients:
            found = coefficients_of(part, order.join, firsts)
            _fill(scales, first, found.reshape(part.n, -1))
    assert data is not None
    flat = data.reshape(-1)
    return Layout(
        flat.view(np.int16) if kind == "bfloat16" else flat.view(np.uint16) if kind == "float16" else flat,
        kind,
        scales.reshape(-1),
    )


def _fill(panels: NDArray[Any], first: int, rows: NDArray[Any]) -> None:
    whole = len(rows) // PANEL
    place = first // PANEL
    panels[place : place + whole] = rows[: whole * PANEL].reshape(whole, PANEL, rows.shape[1]).swapaxes(1, 2)
    if whole * PANEL < len(rows):
        panels[place + whole, :, : len(rows) - whole * PANEL] = rows[whole * PANEL :].T


def summed(x: Float32, staged: Staged, order: Order, out: Float32) -> None:
    """Fills ``out`` (m, n) with the sums of contiguous ``x`` (m, k) over a staged weight, in ``order``."""
    from .loops import Sizes, sum_loop  # numba takes most of a second to import

    steps, layout = plan(order, staged.k), staged.layout(order)
    chained, partial = (
        staged.dtype if field == "dtype" else field for field in (order.accumulate, order.partial)
    )
    fold = order.fold or steps.lanes
    panels = -(-staged.n // PANEL)
    for first, count, rows in _groups(len(x)):
        values, sums = rows_laid_out(x[first : first + count * rows], order, steps, staged.dtype, rows)
        loop = sum_loop(order.join, order.part, order.parts, layout.kind, chained, rows)
        part = out[first : first + count * rows].reshape(-1)
        sizes = Sizes(
            staged.n,
            steps.lanes,
            steps.units,
            steps.part,
            count,
            min(fold, steps.lanes),
            order.halve,
            int(order.zeroed),
            DTYPES.index(partial),
            DTYPES.index(staged.dtype),
        )
        work = _work(loop, values, sums, layout, part, sizes)
        share(work, panels, count * rows * staged.n * len(steps.terms))


def _work(
    loop: Any, values: Float32, sums: Float32, layout: Layout, out: Float32, sizes: Any
) -> Callable[[int, int], None]:
    return lambda first, last: loop(values, sums, layout.data, layout.scales, out, sizes, first, last)


def _groups(m: int) -> list[tuple[int, int, int]]:
    """(first row, groups, rows of a group): fours, then the rest one by one."""
    fours = m // 4
    found = [(0, fours, 4)] if fours else []
    return found + ([(fours * 4, m - fours * 4, 1)] if m % 4 else [])
