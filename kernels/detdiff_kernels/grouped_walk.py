"""Sums over several simdgroups or warps: each is summed by halving, and then their sums in the same way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .order import Indices, Order, Walk


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
