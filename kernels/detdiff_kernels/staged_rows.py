"""Rows laid out as an order walks them, with the input sums of its units."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from .joins import JOINS, Join
from .order import Order, Plan
from .rounding import Float32, rounded

_NOTHING = np.zeros(1, np.float32)


def rows_laid_out(x: Float32, order: Order, steps: Plan, dtype: str, rows: int) -> tuple[Float32, Float32]:
    """Contiguous ``x`` (m, k) as flat (group, term, row), and flat input sums (group, unit, sum, row); a group is
    ``rows`` rows."""
    join = JOINS[order.join]
    if join.of:
        return _quantised(x, order, steps, rows, join)
    if order.inputs == "float16":
        x = rounded(x, "float16")
    values = _laid_out(x, steps.terms, steps.scales, rows)
    if not join.sums:
        return values, _NOTHING
    plain = values
    if order.prescale or order.walk.fields:
        plain = _laid_out(x, steps.values, np.ones(len(steps.values), np.float32), rows)
    return values, _input_sums(plain, order, steps, dtype, rows, join)


def _laid_out(x: Float32, items: NDArray[np.int64], scales: Float32, rows: int) -> Float32:
    from .loops import input_loop  # numba takes most of a second to import

    groups = len(x) // rows
    values = np.empty(groups * len(items) * rows, np.float32)
    input_loop(rows)(x.reshape(-1), items, scales, values, x.shape[1], groups)
    return values


def _input_sums(plain: Float32, order: Order, steps: Plan, dtype: str, rows: int, join: Join) -> Float32:
    from .loops import picked_sums_loop, unit_sums_loop

    items = len(steps.values) // (steps.lanes * steps.units)
    units = len(plain) // rows // items
    sums = np.empty(units * join.sums * rows, np.float32)
    if join.runs:
        picked_sums_loop(rows)(plain, sums, _positions(order.join), items, units)
    else:
        unit_sums_loop(order.sums, dtype, rows)(plain, sums, items, units)
    return sums


@cache
def _positions(join: str) -> NDArray[np.int64]:
    return np.array(JOINS[join].runs, np.int64)


def _quantised(x: Float32, order: Order, steps: Plan, rows: int, join: Join) -> tuple[Float32, Float32]:
    from .quantised_rows import quantised

    found = quantised(x, order.inputs)
    values = _laid_out(found.codes, steps.terms, steps.scales, rows)
    parts = steps.terms.reshape(steps.lanes * steps.units, join.accumulators, -1)
    sums = np.empty((len(x), len(parts), join.sums), np.float32)
    for place, (what, nth) in enumerate(join.of):
        items = parts[:, nth]
        block = np.maximum(items[:, 0], 0) // 32
        if what == "codes":
            sums[:, :, place] = found.codes[:, np.maximum(items, 0)].sum(axis=2)
        else:
            sums[:, :, place] = (found.scale if what == "scale" else found.total)[:, block]
    # A unit without items must not take part, whatever the block that stands in for it holds.
    sums[:, parts[:, 0, 0] < 0] = 0
    return values, np.ascontiguousarray(
        sums.reshape(-1, rows, len(parts), join.sums).transpose(0, 2, 3, 1)
    ).reshape(-1)
