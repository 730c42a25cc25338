"""Weights and rows laid out as an order walks them, with the coefficients and input sums of its units, and the walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .joins import JOINS, Join
from .order import PANEL, FlatOrder, Order, plan
from .rounding import DTYPES, Float32, narrow, rounded
from .threads import share
from .weights import Affine, Blocks, Dense, Unpacked, Weight, metal_dequantised, signed

# Joins whose coefficients are whole numbers of the K formats first, and how many of them are scales.
_INNER = {"q4_k": 4, "q6_k": 4, "q8_1_k": 2, "q8_1_scales": 2, "tile_scales": 8}


def terms_of(weight: Weight, order: Order, dtype: str) -> tuple[NDArray[Any], str]:
    """What the terms of ``order`` multiply, (n, k), and its kind: uint8 or int8 codes, or a dtype."""
    if order.weight in ("codes", "signed", "places"):
        return _codes_of(weight, order.weight)
    if order.weight in ("dtype_twice", "dtype_in_place"):
        return narrow(_twice_rounded(weight, dtype, order.weight == "dtype_in_place"), dtype), dtype
    kind = dtype if order.weight == "dtype" else order.weight.removeprefix("metal_")
    if isinstance(weight, Dense) and weight.dtype == kind:
        return weight.data, kind
    if isinstance(weight, Blocks) and order.weight.startswith("metal_"):
        return narrow(metal_dequantised(weight.kind, weight.unpacked()), kind), kind
    return narrow(weight.floats(), kind), kind


def _codes_of(weight: Weight, form: str) -> tuple[NDArray[Any], str]:
    assert not isinstance(weight, Dense)
    codes = weight.unpacked().codes
    if form == "signed":
        codes = signed(weight.format, weight.unpacked())
    elif form == "places":
        # Four neighbours of 16 bits: the low nibbles of two bytes, and the high ones 32 items further on.
        item = np.arange(weight.k)
        places = np.array([1, 256, 16, 4096], np.float16)[item % 2 + item // 32 % 2 * 2]
        return codes * places, "float16"
    return codes, str(codes.dtype)


def _twice_rounded(weight: Weight, dtype: str, in_place: bool) -> Float32:
    """scale * code rounded to ``dtype``, plus the bias rounded again; one rounding in float32.

    ``in_place``: a code of 2 or 4 bits is not shifted down, and its scale is divided for it first, in ``dtype``.
    """
    if not isinstance(weight, Affine) or dtype == "float32":
        return weight.floats()
    shape = (weight.n, -1, weight.group_size)
    scales = weight.scales[:, :, None]
    # Infinite scales are ordinary operands here.
    with np.errstate(all="ignore"):
        if in_place and weight.bits in (2, 4):
            places = np.exp2(np.arange(weight.group_size) * weight.bits % 8).astype(np.float32)
            scales = rounded(scales / places, dtype) * places
        products = rounded(weight.codes().reshape(shape) * scales, dtype)
        return rounded(products + weight.biases[:, :, None], dtype).reshape(weight.n, weight.k)


def coefficients_of(weight: Weight, join: str, firsts: NDArray[np.int64]) -> Float32:
    """The coefficients of units whose accumulators begin with the items ``firsts`` (units, accumulators), -1 where there
    is none: (n, units, coefficients). A unit without items gets such that leave a total as it is, -0.0 too."""
    assert not isinstance(weight, Dense)
    parts = weight.unpacked()
    item = np.maximum(firsts, 0)
    block = item[:, 0] // parts.size
    if join == "tile_min" and parts.scales is not None:
        found = _half_products(parts, item[:, 0])
    else:
        found = [parts.scale[:, block]]
        if parts.minimum is not None:
            found.append(parts.minimum[:, block])
        if join in _INNER and parts.scales is not None:
            sub = item[:, :: JOINS[join].accumulators // _INNER[join]] // parts.inner
            inner = [parts.scales] if parts.minima is None else [parts.scales, parts.minima]
            found = [array[:, sub[:, nth]] for array in inner for nth in range(sub.shape[1])] + found
    stacked: Float32 = np.stack(found[: JOINS[join].coefficients], axis=2)
    return np.where(firsts[:, :1] >= 0, stacked, _neutral(join))


def _half_products(parts: Unpacked, item: NDArray[np.int64]) -> list[Float32]:
    """Scale and minimum of Q4_K's sub-blocks as CUDA's tiles hold them, in float16."""
    assert parts.scales is not None and parts.minima is not None and parts.minimum is not None
    block, sub = item // parts.size, item // parts.inner
    with np.errstate(over="ignore", invalid="ignore"):
        scale = parts.scale[:, block] * parts.scales[:, sub]
        minimum = -parts.minimum[:, block] * parts.minima[:, sub]
    return [rounded(scale, "float16"), rounded(minimum, "float16")]


def _neutral(join: str) -> Float32:
    count = JOINS[join].coefficients
    if join == "affine":
        # Kernels that run over a row's end add zeros there.
        return np.zeros(count, np.float32)
    if join in _INNER:
        scale = count - (2 if join in ("q4_k", "q8_1_k") else 1)
        return np.where(np.arange(count) == scale, np.float32(-0.0), np.float32(0))
    return np.full(count, -0.0, np.float32)


_NOTHING = np.zeros(1, np.float32)


def rows_laid_out(
    x: Float32, order: Order, steps: FlatOrder, dtype: str, rows: int
) -> tuple[Float32, Float32]:
    """Contiguous ``x`` (m, k) as flat (group, term, row), and flat input sums (group, unit, sum, row); a group is
    ``rows`` rows."""
    join = JOINS[order.join]
    if join.of:
        return _quantised(x, order, steps, rows, join)
    if order.inputs == "float16":
        x = rounded(x, "float16")
    values = _by_terms(x, steps.terms, steps.scales, rows)
    if not join.sums:
        return values, _NOTHING
    plain = values
    if order.prescale or order.walk.fields:
        plain = _by_terms(x, steps.values, np.ones(len(steps.values), np.float32), rows)
    return values, _input_sums(plain, order, steps, dtype, rows, join)


def _by_terms(x: Float32, items: NDArray[np.int64], scales: Float32, rows: int) -> Float32:
    from .loops import input_loop  # numba takes most of a second to import

    groups = len(x) // rows
    values = np.empty(groups * len(items) * rows, np.float32)
    input_loop(rows)(x.reshape(-1), items, scales, values, x.shape[1], groups)
    return values


def _input_sums(plain: Float32, order: Order, steps: FlatOrder, dtype: str, rows: int, join: Join) -> Float32:
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


def _quantised(x: Float32, order: Order, steps: FlatOrder, rows: int, join: Join) -> tuple[Float32, Float32]:
    from .quantised_rows import quantised

    found = quantised(x, order.inputs)
    values = _by_terms(found.codes, steps.terms, steps.scales, rows)
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


_CHUNK = 64 * PANEL


@dataclass(frozen=True, eq=False)
class Panels:
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
    layouts: dict[Any, Panels] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.weight.n

    @property
    def k(self) -> int:
        return self.weight.k

    def layout(self, order: Order) -> Panels:
        """What ``order`` reads; orders that differ in their reduction alone share it."""
        steps = plan(order, self.k)
        # Contiguous ranges, however many, are one walk.
        walk = None if steps.straight else order.walk
        key = (walk, order.weight, order.join, order.unit)
        if key not in self.layouts:
            self.layouts[key] = _laid_out(self.weight, order, steps, self.dtype)
        return self.layouts[key]


def _laid_out(weight: Weight, order: Order, steps: FlatOrder, dtype: str) -> Panels:
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
    return Panels(
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
    loop: Any, values: Float32, sums: Float32, layout: Panels, out: Float32, sizes: Any
) -> Callable[[int, int], None]:
    return lambda first, last: loop(values, sums, layout.data, layout.scales, out, sizes, first, last)


def _groups(m: int) -> list[tuple[int, int, int]]:
    """(first row, groups, rows of a group): fours, then the rest one by one."""
    fours = m // 4
    found = [(0, fours, 4)] if fours else []
    return found + ([(fours * 4, m - fours * 4, 1)] if m % 4 else [])
