"""The compiled loops: one that sums in any order, and those that lay out its inputs.

Outputs lie in panels of 32 neighbours that run in one vector, so a lane of the real kernel is a vector here and its
order is plain to read. ``rows`` rows (1 or 4) run side by side to hide the latency of an FMA and to share
loaded weights; they share nothing else, so a row does not depend on its neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int8, int16, int64, intp, types, uint8, uint16, void

from . import joins, simd
from .compiled import Loop, compiled
from .joins import (
    ADD,
    AFFINE,
    CHAIN,
    JOINS,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_1,
    Q8_1_K,
    Q8_1_MIN2,
    Q8_1_SCALE,
    Q8_1_SCALES,
    SCALE,
    TILE,
    TILE_MIN,
    TILE_SCALES,
)  # fmt: skip
from .order import PANEL
from .simd import (
    add,
    fma,
    fma_in,
    load,
    mul,
    negative,
    rounded,
    rounded_as,
    spread,
    store,
    store_rows,
    zeros,
)

# What formulas multiply with, by place.
_NUMBERS = np.array([-8, -4, 1 / 2, 1 / 4, 1 / 16, 1 / 256], np.float32)

_IN = types.Array(float32, 1, "C", readonly=True)
_OUT = types.Array(float32, 1, "C")
_INDEX = types.Array(int64, 1, "C", readonly=True)
_ITEMS = {"float32": float32, "float16": uint16, "bfloat16": int16, "uint8": uint8, "int8": int8}


class Sizes(NamedTuple):
    """The sizes of a call: outputs, lanes, units of a lane, terms of a chain, groups of rows; ``fold``, ``halve`` and
    ``zeroed`` as in an order; and what partial sums and outputs are rounded to, as numbers in ``rounding.DTYPES``."""

    n: int
    lanes: int
    units: int
    chain: int
    groups: int
    fold: int
    halve: int
    zeroed: int
    partial: int
    output: int


_SIZES = types.NamedUniTuple(intp, len(Sizes._fields), Sizes)


@cache
def sum_loop(join: str, part: int, parts: int, weights: str, chained: str, rows: int) -> Loop:
    """The loop of an order: fills the outputs of panels ``first`` to ``last - 1``.

    ``part`` and ``parts`` cut units (0 and 1 for a chain); ``weights`` is what the weight array holds (float32,
    float16 or bfloat16 bits, uint8 or int8 codes); ``chained`` what the FMAs of a chain are rounded to. The loop takes
    flat x (group, term, row), input sums (group, unit, sum, row), weights (panel, term, output), coefficients
    (panel, unit, coefficient, output), outputs (m, n), Sizes, first, last.
    """
    code, coefficients, inputs, accumulators, _, _ = JOINS[join]
    chains = parts // accumulators
    wide = PANEL * rows

    def loop(x: Any, sums: Any, w: Any, scales: Any, out: Any, sizes: Any, first: int, last: int) -> None:
        n, lanes, units, fold, halve = sizes.n, sizes.lanes, sizes.units, sizes.fold, sizes.halve
        partial = sizes.partial
        terms = lanes * (sizes.chain if code == CHAIN else units * part * parts)
        totals = np.empty(lanes * wide, np.float32)
        for panel in range(first, last):
            for group in range(sizes.groups):
                i = group * terms * rows
                j = panel * terms * PANEL
                c = panel * lanes * units * coefficients * PANEL
                s = group * lanes * units * inputs * rows
                for lane in range(lanes):
                    total = zeros(wide)
                    if code == CHAIN:
                        for _ in range(sizes.chain):
                            total = fma_in(spread(x, i, PANEL, rows), load(w, j, PANEL, rows), total, chained)
                            i += rows
                            j += PANEL
                    else:
                        for _ in range(units):
                            unit, other, held = zeros(wide), zeros(wide), zeros(wide)
                            for nth in range(accumulators):
                                a = zeros(wide)
                                for _ in range(chains):
                                    one = zeros(wide)
                                    for _ in range(part):
                                        one = fma(spread(x, i, PANEL, rows), load(w, j, PANEL, rows), one)
                                        i += rows
                                        j += PANEL
                                    a = one if chains == 1 else add(a, one)
                                if code == Q4_0 and nth == 0:
                                    unit = fma(spread(_NUMBERS, 0, wide, 1), spread(sums, s, PANEL, rows), a)
                                elif code == Q4_K:
                                    if nth % 2 == 0:
                                        held = a
                                    else:
                                        pair = nth // 2
                                        y = spread(sums, s + pair * rows, PANEL, rows)
                                        least = load(scales, c + (4 + pair) * PANEL, PANEL, rows)
                                        scale = load(scales, c + pair * PANEL, PANEL, rows)
                                        a = fma(spread(_NUMBERS, 5, wide, 1), a, held)
                                        if pair == 0:
                                            unit, other = mul(a, scale), mul(y, least)
                                        else:
                                            other = fma(y, least, other)
                                            if pair == 2:
                                                unit = fma(a, scale, unit)
                                            else:
                                                unit = fma(mul(a, scale), spread(_NUMBERS, 4, wide, 1), unit)
                                elif code == Q6_K:
                                    scale = load(scales, c + nth * PANEL, PANEL, rows)
                                    unit = mul(a, scale) if nth == 0 else fma(a, scale, unit)
                                elif code == Q8_1_K or code == Q8_1_SCALES:
                                    y = spread(sums, s + nth * rows, PANEL, rows)
                                    unit = fma(y, mul(a, load(scales, c + nth * PANEL, PANEL, rows)), unit)
                                    if code == Q8_1_K:
                                        least = load(scales, c + (2 + nth) * PANEL, PANEL, rows)
                                        codes = spread(sums, s + (2 + nth) * rows, PANEL, rows)
                                        other = fma(y, mul(codes, least), other)
                                elif code == TILE_SCALES:
                                    scale = load(scales, c + nth * PANEL, PANEL, rows)
                                    if nth % 2 == 0:
                                        held = mul(a, scale)
                                    else:
                                        y = spread(sums, s + nth // 2 * rows, PANEL, rows)
                                        unit = fma(fma(a, scale, held), y, unit)
                                else:
                                    unit = a if nth == 0 else add(unit, a)
                            if code == ADD:
                                total = add(total, unit)
                            elif code == AFFINE:
                                shift = mul(
                                    load(scales, c + PANEL, PANEL, rows), spread(sums, s, PANEL, rows)
                                )
                                total = add(total, fma(load(scales, c, PANEL, rows), unit, shift))
                            elif code == SCALE or code == Q4_0:
                                total = fma(load(scales, c, PANEL, rows), unit, total)
                            elif code == Q4_K or code == Q8_1_K:
                                d = c + (coefficients - 2) * PANEL
                                shift = negative(mul(load(scales, d + PANEL, PANEL, rows), other))
                                total = add(total, fma(load(scales, d, PANEL, rows), unit, shift))
                            elif code == Q6_K or code == Q8_1_SCALES or code == TILE_SCALES:
                                d = c + (coefficients - 1) * PANEL
                                total = fma(load(scales, d, PANEL, rows), unit, total)
                            else:
                                scale = load(scales, c, PANEL, rows)
                                y = spread(sums, s, PANEL, rows)
                                if code == TILE:
                                    total = fma(mul(unit, scale), y, total)
                                elif code == Q8_1_SCALE:
                                    total = fma(mul(scale, y), unit, total)
                                elif code == Q8_1:
                                    shift = mul(
                                        spread(_NUMBERS, 1, wide, 1), spread(sums, s + rows, PANEL, rows)
                                    )
                                    total = fma(scale, fma(unit, y, shift), total)
                                else:
                                    least = load(scales, c + PANEL, PANEL, rows)
                                    shift = spread(sums, s + rows, PANEL, rows)
                                    if code == TILE_MIN:
                                        total = fma(mul(scale, y), unit, total)
                                        total = fma(least, shift, total)
                                    else:
                                        share = spread(_NUMBERS, 2 if code == Q8_1_MIN2 else 3, wide, 1)
                                        shift = mul(rounded(mul(least, shift), "float16"), share)
                                        scale = rounded(mul(scale, y), "float16")
                                        total = add(total, fma(unit, scale, shift))
                            c += coefficients * PANEL
                            s += inputs * rows
                    total = rounded_as(total, partial)
                    store(add(total, zeros(wide)) if sizes.zeroed else total, totals, lane * wide)
                for lane in range(fold if fold < lanes else 0):
                    total = load(totals, lane * wide, wide, 1)
                    for other in range(lane + fold, lanes, fold):
                        total = rounded_as(add(total, load(totals, other * wide, wide, 1)), partial)
                    store(total, totals, lane * wide)
                half = halve // 2
                while half:
                    for start in range(0, fold, halve):
                        for lane in range(start, start + half):
                            low = load(totals, lane * wide, wide, 1)
                            high = load(totals, (lane + half) * wide, wide, 1)
                            store(add(low, high), totals, lane * wide)
                    half //= 2
                total = load(totals, 0, wide, 1)
                for start in range(halve, fold, halve):
                    total = rounded_as(add(total, load(totals, start * wide, wide, 1)), partial)
                place = group * rows * n + panel * PANEL
                total = rounded_as(total, sizes.output)
                store_rows(total, out, place, n, PANEL, min(PANEL, n - panel * PANEL))

    loop.__name__ = f"{join}_{part}x{parts}_{weights}_{chained}_{rows}"
    weight = types.Array(_ITEMS[weights], 1, "C", readonly=True)
    return compiled(loop, [void(_IN, _IN, weight, _IN, _OUT, _SIZES, intp, intp)], simd, joins)


@cache
def input_loop(rows: int) -> Loop:
    """Lays rows out by terms: takes flat x (m, k), item numbers of the terms (-1: +0.0), powers of two, flat out
    (group, term, row), k, groups. An input is divided by the power and multiplied by it again."""

    def loop(x: Any, items: Any, scales: Any, out: Any, k: int, groups: int) -> None:
        place = 0
        for group in range(groups):
            for term in range(len(items)):
                item = items[term]
                scale = scales[term]
                for row in range(group * rows, group * rows + rows):
                    value = x[row * k + item] if item >= 0 else np.float32(0.0)
                    out[place] = value / scale * scale
                    place += 1

    loop.__name__ = f"rows_laid_out_{rows}"
    return compiled(loop, [void(_IN, _INDEX, _IN, _OUT, intp, intp)])


@cache
def unit_sums_loop(run: int, dtype: str, rows: int) -> Loop:
    """Sums of a unit's inputs: runs of ``run`` items are added in ``dtype`` and then in float32.

    Takes flat x (group, item, row), flat out (group, unit, row), items of a unit, units of all groups.
    """

    def loop(x: Any, out: Any, items: int, units: int) -> None:
        i = 0
        for unit in range(units):
            total = zeros(rows)
            for _ in range(items // run):
                part = load(x, i, rows, 1)
                i += rows
                for _ in range(run - 1):
                    part = rounded(add(part, load(x, i, rows, 1)), dtype)
                    i += rows
                total = add(total, part)
            store(total, out, unit * rows)

    loop.__name__ = f"sums_of_{run}_{dtype}_{rows}"
    return compiled(loop, [void(_IN, _OUT, intp, intp)], simd)


@cache
def picked_sums_loop(rows: int) -> Loop:
    """Sums of a unit's inputs in float32, each of groups of runs: takes flat x (group, item, row), flat out
    (group, unit, sum, row), positions in a unit (sum, group, run, item), items of a unit, units of all groups."""

    def loop(x: Any, out: Any, positions: Any, items: int, units: int) -> None:
        place = 0
        for unit in range(units):
            first = unit * items
            for nth in range(positions.shape[0]):
                total = zeros(rows)
                for group in range(positions.shape[1]):
                    several = zeros(rows)
                    for run in range(positions.shape[2]):
                        part = load(x, (first + positions[nth, group, run, 0]) * rows, rows, 1)
                        for item in range(1, positions.shape[3]):
                            at = (first + positions[nth, group, run, item]) * rows
                            part = add(part, load(x, at, rows, 1))
                        several = add(several, part)
                    total = add(total, several)
                store(total, out, place)
                place += rows

    loop.__name__ = f"picked_sums_{rows}"
    positions = types.Array(int64, 4, "C", readonly=True)
    return compiled(loop, [void(_IN, _OUT, positions, intp, intp)], simd)


@cache
def affine_loop() -> Loop:
    """scale * code + bias with one rounding: flat codes (32 items of one group at a time), scales and biases (one
    each a group), flat out, items of a group."""

    def loop(codes: Any, scales: Any, biases: Any, out: Any, size: int) -> None:
        for group in range(len(scales)):
            scale, bias = spread(scales, group, 8, 1), spread(biases, group, 8, 1)
            for i in range(group * size, group * size + size, 8):
                store(fma(scale, load(codes, i, 8, 1), bias), out, i)

    loop.__name__ = "affine_weights"
    return compiled(loop, [void(types.Array(uint8, 1, "C", readonly=True), _IN, _IN, _OUT, intp)], simd)
