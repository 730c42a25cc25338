"""Bounds of products and sums that several processes share: each multiplies its part of the inputs, and an all-reduce adds up what they have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import OracleRefused
from detdiff_kernels.weights import Affine, Dense, Weight

from .bounds import BoundedOutputs, Linear, Switch, exact_weight
from .roundings import U32, UNIT, Arithmetic, Float64, growth


@dataclass(frozen=True, eq=False)
class SharedLinear:
    """``linear`` over ``size`` processes: each rounds the product of its run of columns, these are added up in the output's dtype in
    any order, and the bias is added once, after that.

    Beyond the sums of one product, a term passes one more rounding for each process: that of its part, and the additions.
    """

    linear: Linear
    size: int

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        whole = replace(self.linear, bias=None).bounded(arithmetic)
        size = np.zeros_like(whole.exact)
        weight = exact_weight(self.linear.weight)
        for part in np.split(np.arange(weight.shape[1]), self.size):
            size += np.abs(self.linear.x[:, part] @ weight[:, part].T)
        lost = self.size * arithmetic.smallest
        bound = whole.bound + growth((self.size, arithmetic.unit)) * (size + whole.bound) + lost
        plain = whole.yardstick + growth((self.size, U32)) * (size + whole.yardstick) + lost
        exact = whole.exact
        if self.linear.bias is not None:
            exact = exact + self.linear.bias
            rounding = arithmetic.unit * (np.abs(exact) + bound) + arithmetic.smallest
            bound, plain = bound + rounding, plain + rounding
        text = f"{whole.text}; over {self.size} processes, each part rounded and {self.size - 1} additions to {arithmetic.dtype}"
        unbounded = whole.unbounded | ~(size + bound < arithmetic.largest)
        return BoundedOutputs(exact, bound, plain, whole.scale, unbounded, text)


@dataclass(frozen=True, eq=False)
class AllReduce:
    """The sum of ``parts`` (processes, rows, items), added in the output's dtype in any order."""

    parts: Float64

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        exact: Float64 = self.parts.sum(axis=0)
        size: Float64 = np.abs(self.parts).sum(axis=0)
        additions = len(self.parts) - 1
        lost = additions * arithmetic.smallest + len(self.parts) * 2.0**-52 * size
        bound = growth((additions, arithmetic.unit)) * size + lost
        plain = growth((additions, UNIT["float32"])) * size + lost
        unbounded: NDArray[np.bool_] = ~(size + bound < arithmetic.largest)
        text = f"all-reduce: ((1 + u)^n - 1) sum |part|, {additions} additions to {arithmetic.dtype}"
        return BoundedOutputs(exact, bound, plain, size, unbounded, text)


def columns_of(operation: Linear | Switch, part: slice) -> Linear | Switch:
    """The operation on a run of the columns of its weights, without a bias; ``x`` is as wide as they are. Raises OracleRefused."""
    if isinstance(operation, Linear):
        return Linear(operation.x, _columns(operation.weight, part), None, operation.quantised)
    weights = tuple(_columns(weight, part) for weight in operation.weights)
    return replace(operation, weights=weights, biases=(None,) * len(weights))


def _columns(weight: Weight, part: slice) -> Weight:
    if isinstance(weight, Dense):
        return replace(weight, data=np.ascontiguousarray(weight.data[:, part]))
    if isinstance(weight, Affine) and not (part.start % weight.group_size or part.stop % weight.group_size):
        words = slice(part.start * weight.bits // 32, part.stop * weight.bits // 32)
        groups = slice(part.start // weight.group_size, part.stop // weight.group_size)
        return replace(
            weight,
            packed=np.ascontiguousarray(weight.packed[:, words]),
            scales=np.ascontiguousarray(weight.scales[:, groups]),
            biases=np.ascontiguousarray(weight.biases[:, groups]),
        )
    raise OracleRefused(
        f"The columns {part.start} to {part.stop - 1} of a {type(weight).__name__} weight cannot be taken apart from the others. Judge the whole "
        "product."
    )
