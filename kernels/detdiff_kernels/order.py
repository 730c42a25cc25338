"""The order of a sum as data: which lane takes which items, how a lane adds them, how lanes become one number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
# Outputs that run side by side in one vector.
PANEL = 32
Join = Literal[
    "chain", "add", "affine", "scale", "q4_0", "q4_0_pairs", "q4_1", "q4_1_pairs", "q4_k", "q6_k", "q8_1", "q8_1_min2",
    "q8_1_min4", "q8_1_scale", "q8_1_k", "q8_1_scales", "tile", "tile_min", "tile_scales",
]  # fmt: skip
WeightForm = Literal[
    "codes", "float32", "dtype", "float16", "dtype_twice", "dtype_in_place", "signed", "places", "metal_float32",
    "metal_float16",
]  # fmt: skip
Inputs = Literal["dtype", "float16", "q8_1", "q8_1_tile", "q8_1_tile_float", "q8_0"]


@dataclass(frozen=True)
class Walk:
    """Which items of a row each lane takes, and in which order.

    Of every ``step`` items, seen as an array of the sizes ``axes``, the axes ``lane`` (outermost first) tell the
    lane and the axes ``terms`` the order inside of it. The steps follow each other; items behind the last one count
    as +0.0 times +0.0. ``fields`` splits codes: of every ``fields[0]`` items in a lane's order, each pair (item,
    mask) is one term with the masked code; without it an item is a term.

    ``ranges`` > 0 instead: lane l takes the ``ranges`` consecutive items from l * ranges on, the last lane all
    that are left; ``axes`` is then (lanes, ranges).
    """

    axes: tuple[int, ...]
    lane: tuple[int, ...] = (0,)
    terms: tuple[int, ...] = (1,)
    fields: tuple[int, tuple[tuple[int, int], ...]] | None = None
    ranges: int = 0

    @property
    def step(self) -> int:
        """Items that all lanes together take at a time."""
        return prod(self.axes)

    @property
    def lanes(self) -> int:
        return prod(self.axes[axis] for axis in self.lane)

    def items(self, k: int) -> Indices:
        """Item numbers (lanes, items of a lane); -1 where there is none."""
        if self.ranges:
            return self._ranges(k)
        steps = -(-k // self.step)
        numbers = np.arange(self.step).reshape(self.axes).transpose(*self.lane, *self.terms)
        numbers = numbers.reshape(self.lanes, 1, -1) + np.arange(steps)[:, None] * self.step
        numbers = numbers.reshape(self.lanes, -1)
        return np.where(numbers < k, numbers, -1)

    def _ranges(self, k: int) -> Indices:
        starts = np.arange(self.lanes) * self.ranges
        ends = np.append(starts[1:], k)
        length = int((ends - starts).max())
        # What is missing comes first, where a chain that starts at +0.0 does not feel it.
        numbers = ends[:, None] - length + np.arange(length)
        return np.where(numbers >= starts[:, None], numbers, -1)

    def masked(self, items: Indices) -> tuple[Indices, NDArray[np.uint8]]:
        """Items as terms: item numbers (lanes, terms of a lane), and what of each code belongs to the term."""
        if self.fields is None:
            return items, np.full(items.shape, 0xFF, np.uint8)
        size, parts = self.fields
        packs = items.reshape(items.shape[0], -1, size)[:, :, [item for item, _ in parts]]
        masks = np.broadcast_to(np.array([mask for _, mask in parts], np.uint8), packs.shape)
        return packs.reshape(items.shape[0], -1), masks.reshape(items.shape[0], -1)


@dataclass(frozen=True)
class LooseTail(Walk):
    """A walk whose steps are whole: of the items behind the last one each lane takes ``loose`` at a time, and each of
    these is a unit of its own, filled up with +0.0 times +0.0."""

    loose: int = 1

    def items(self, k: int) -> Indices:
        whole = k // self.step * self.step
        rest = lanes_of(self.lanes, self.loose).items(k - whole)
        rest = np.where(rest >= 0, rest + whole, -1).reshape(self.lanes, -1, self.loose)
        units = np.pad(rest, ((0, 0), (0, 0), (0, self.step // self.lanes - self.loose)), constant_values=-1)
        return np.concatenate([super().items(whole), units.reshape(self.lanes, -1)], axis=1)


@dataclass(frozen=True)
class TailFirst(Walk):
    """One lane in order, but what the last whole ``tile`` items leave comes first, filled up to a tile."""

    tile: int = 1

    def items(self, k: int) -> Indices:
        whole = k // self.tile * self.tile
        tail = np.arange(whole, whole + self.tile if whole < k else whole)
        return np.concatenate([np.where(tail < k, tail, -1), np.arange(whole)])[None]


def lanes_of(lanes: int, values: int) -> Walk:
    """Lane l takes ``values`` consecutive items of every ``lanes * values``, starting at l * values."""
    return Walk((lanes, values))


IN_ORDER = lanes_of(1, 1)
"""One lane that takes all items, ascending."""


@dataclass(frozen=True)
class Order:
    """How one output is summed. Sums are float32 and every multiply-add is one FMA, unless a field says otherwise.

    ``weight`` is what a term multiplies: ``codes`` (scales follow in ``join``), the dequantised weight in
    ``float32``, or rounded to ``dtype`` (the activation's) or ``float16``; ``dtype_twice`` rounds the product of
    scale and code as well as the sum with the bias, and ``dtype_in_place`` does so with codes of 2 and 4 bits where
    they lie in their byte and a scale divided by as much in that dtype. ``signed`` codes of Q4_0 are less 8;
    ``places`` leaves codes where their 16-bit word has them; ``metal_float32`` and ``metal_float16`` are what ggml's
    Metal code makes of blocks. Rounding is to nearest even; float16 overflows to infinity. ``inputs`` says what x is
    rounded or quantised to first, see ``quantised_rows.py``.

    A lane's terms are cut into parts of ``part`` terms, each a chain that starts at +0.0; ``parts`` of them make a
    unit, and +0.0 times +0.0 fills up the last one. ``join`` says what becomes of a unit, see ``joins.py``; ``chain``
    has no parts, the lane's total is one chain.
    ``sums`` > 0: joins need the sum of a unit's inputs, in runs of that many added in the activation's dtype and then
    in float32. ``prescale``: inputs are divided by these powers of two in turn and codes multiplied by them, which
    shows only where the quotient underflows.

    Then lane r of the first ``fold`` takes lanes r + fold, r + 2 fold, ... in order; groups of ``halve`` lanes add by
    halving (lane l takes l + halve/2, then l + halve/4, ...) in float32; the groups add in order. ``partial`` is what
    lane totals and sums in order are rounded to; 0 for ``fold`` means all lanes. ``zeroed``: a sum of lanes in order
    starts at +0.0, which shows where all of them are -0.0. ``accumulate`` ``dtype`` rounds every FMA of a chain to
    the activation's dtype, and to nothing else before. The output rounds to the dtype once.
    """

    walk: Walk
    join: Join = "chain"
    weight: WeightForm = "float32"
    part: int = 0
    parts: int = 1
    sums: int = 0
    prescale: tuple[int, ...] = ()
    fold: int = 0
    halve: int = 1
    zeroed: bool = False
    partial: Literal["float32", "dtype"] = "float32"
    accumulate: Literal["float32", "dtype"] = "float32"
    inputs: Inputs = "dtype"

    @property
    def unit(self) -> int:
        """Terms of a unit; 0 for a chain."""
        return self.part * self.parts


@dataclass(frozen=True, eq=False)
class FlatOrder:
    """An order at work on rows of ``k`` items: flat, lane after lane.

    ``terms`` and ``masks`` are item numbers and code masks of every term, ``values`` the items that the sums of
    units run over, ``scales`` the powers of two of ``prescale``; ``units`` counts units of a lane, 1 for a chain. ``straight`` says that
    the terms are all items as they lie.
    """

    terms: Indices
    masks: NDArray[np.uint8]
    values: Indices
    scales: NDArray[np.float32]
    lanes: int
    units: int
    part: int
    straight: bool


@lru_cache(maxsize=512)
def plan(order: Order, k: int) -> FlatOrder:
    """What an order does to rows of ``k`` items."""
    items = order.walk.items(k)
    terms, masks = order.walk.masked(items)
    if order.unit and terms.shape[1] % order.unit:
        # Only units of unmasked terms can end early: a masked lane's step is one unit.
        items = np.pad(items, ((0, 0), (0, -items.shape[1] % order.unit)), constant_values=-1)
        terms, masks = order.walk.masked(items)
    units = terms.shape[1] // order.unit if order.unit else 1
    scales: NDArray[np.float32] = np.array(order.prescale or (1,), np.float32)
    per_item: NDArray[np.float32] = np.resize(scales, items.shape)
    if order.walk.fields is not None:
        size, parts = order.walk.fields
        packs = per_item.reshape(items.shape[0], -1, size)[:, :, [item for item, _ in parts]]
        per_item = packs.reshape(items.shape[0], -1)
    return FlatOrder(
        terms.reshape(-1),
        masks.reshape(-1),
        items.reshape(-1),
        np.ascontiguousarray(per_item.reshape(-1)),
        order.walk.lanes,
        units,
        order.part or terms.shape[1],
        np.array_equal(terms.reshape(-1), np.arange(k)),
    )


@dataclass(frozen=True)
class Grouped(Walk):
    """A walk whose lanes are ``groups`` times 32, group after group, numbered anew so that one halving over all lanes sums
    every group first, and then the groups as if there were 32: what is missing counts as +0.0.

    What is behind the last whole ``tail`` items (0: nothing) is taken one item a lane, in a unit of ``unit`` terms. With
    ``pairs`` there are two lanes where the kernel has one, the second of each behind all the first ones.
    """

    groups: int = 1
    tail: int = 0
    unit: int = 0
    pairs: bool = False

    @property
    def lanes(self) -> int:
        return 32 * self.width * (2 if self.pairs else 1)

    @property
    def width(self) -> int:
        """Groups with those that are missing, a power of two."""
        return 1 << (self.groups - 1).bit_length()

    def items(self, k: int) -> Indices:
        whole = k // self.tail * self.tail if self.tail else k
        numbers = Walk(self.axes, self.lane, self.terms).items(whole)
        if whole < k:
            rest = np.full((len(numbers), self.unit), -1)
            rest[: k - whole, 0] = np.arange(whole, k)
            numbers = np.concatenate([numbers, rest], axis=1)
        found = np.full((2 if self.pairs else 1, 32, self.width, numbers.shape[1]), -1)
        found[:, :, : self.groups] = numbers.reshape(len(found), self.groups, 32, -1).swapaxes(1, 2)
        return found.reshape(self.lanes, -1)


def grouped(order: Order) -> Order:
    """An order over a grouped walk, with the sums that go with it; a walk of one group has no missing ones to add."""
    assert isinstance(order.walk, Grouped)
    lanes = 32 * order.walk.width
    return replace(order, fold=lanes, halve=lanes, zeroed=order.walk.groups > 1)
