"""A linear layer with an adapter in float64, and how far rounding can be from it: beside the weights, or fused into them.

Beside: y = x W + s (x A) B, each product within its own bound, and their sums rounded. Fused: y = x W' within the bound of a linear
layer, and each weight of W' is off W + s (A B) by the roundings that made it, and, quantised, by half a step of its group, or by a
step where it is at the group's end. DoRA scales each output by m over the length of its row of W + s (A B). Mirrors
``mlx_lm.tuner.lora`` and ``mlx_lm.tuner.dora``, 0.32.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff_kernels.weights import Dense, Weight

from .bounds import Linear, exact_weight
from .roundings import U32, UNIT, Arithmetic, Float64, growth


@dataclass(frozen=True, eq=False)
class PlainLinear:
    """The weight (n, k) of a linear layer, its ``dtype``'s name, its bias (n,), and for codes the ``step`` (n, k) of each weight's
    group and whether it has the first or last code of it (``ends``, bool (n, k))."""

    weight: Weight
    dtype: str
    bias: Float64 | None = None
    step: Float64 | None = None
    ends: NDArray[np.bool_] | None = None

    @cached_property
    def exact(self) -> Float64:
        """The weights in float64."""
        return exact_weight(self.weight)

    def operation(self, x: Float64) -> Linear:
        """Rows (m, k) through it."""
        return Linear(x, self.weight, self.bias, self.step is not None)


@dataclass(frozen=True, eq=False)
class AdaptedLinear:
    """``base`` with a (k, r), b (r, n), the scale of their product, and for DoRA the lengths ``magnitude`` (n,)."""

    base: PlainLinear
    a: Float64
    b: Float64
    scale: float
    magnitude: Float64 | None = None

    def scaled(self, scale: float) -> AdaptedLinear:
        """The same with another scale; without ``magnitude``, as lengths belong to a scale."""
        return AdaptedLinear(self.base, self.a, self.b, scale)

    @cached_property
    def product(self) -> Float64:
        """W + s (A B), (n, k)."""
        return self.base.exact + self.scale * (self.a @ self.b).T

    @cached_property
    def _lengths(self) -> Float64 | None:
        """What DoRA multiplies each output with."""
        if self.magnitude is None:
            return None
        return np.asarray(self.magnitude / np.linalg.norm(self.product, axis=1))

    def change(self, x: Float64) -> Float64:
        """What the adapter of scale 1 adds to the outputs of rows (m, k)."""
        return (x @ self.a) @ self.b

    def expected(self, x: Float64) -> Float64:
        """Outputs (m, n) in float64."""
        plain = x @ self.target.T
        return plain if self.base.bias is None else plain + self.base.bias

    def beside(self, x: Float64, arithmetic: Arithmetic) -> Float64:
        """The bound (m, n) where the adapter runs beside the weights."""
        own = Linear(x, self.base.weight, None, self.base.step is not None).bounded(arithmetic)
        first = Linear(x, _dense(self.a.T)).bounded(arithmetic)
        second = Linear(np.abs(first.exact) + first.bound, _dense(np.abs(self.b.T))).bounded(arithmetic)
        change = abs(self.scale) * (second.bound + first.bound @ np.abs(self.b))
        size = np.abs(own.exact) + own.bound + abs(self.scale) * (second.exact + second.bound)
        bound = own.bound + change + growth((3, arithmetic.unit)) * size
        if self._lengths is not None:
            relative = self._length_error() + growth((2, arithmetic.unit))
            bound = np.abs(self._lengths) * (bound * (1 + relative) + relative * size)
        return self._with_bias(bound, x, arithmetic)

    def weight_bound(self, into: PlainLinear) -> Float64:
        """How far the weights ``into`` that the adapter was fused into may be off ``product``, (n, k)."""
        unit = UNIT[into.dtype]
        bound = self._product_error(unit)
        if self._lengths is not None:
            size = np.abs(self.base.exact) + abs(self.scale) * (np.abs(self.a) @ np.abs(self.b)).T
            relative = (self._length_error() + growth((2, unit)))[:, None]
            bound = np.abs(self._lengths)[:, None] * (bound * (1 + relative) + relative * size)
        if into.step is not None and into.ends is not None:
            # A group's scale is moved so that zero is a code, which may cut off its ends.
            steps = np.where(into.ends, 1.0, 0.5) * into.step
            bound = np.asarray(bound + steps + growth((4, unit)) * np.abs(into.exact))
        return bound

    @property
    def target(self) -> Float64:
        """What the weights are to be with the adapter in them, (n, k)."""
        return self.product if self._lengths is None else self.product * self._lengths[:, None]

    def _product_error(self, unit: float) -> Float64:
        """How far W + s (A B) is off, (n, k), when it is made in a dtype."""
        rank = self.a.shape[1]
        part = abs(self.scale) * (np.abs(self.a) @ np.abs(self.b)).T
        made = growth((rank + 2, max(U32, min(unit, U32)))) * part
        return np.asarray(made + growth((2, unit)) * (np.abs(self.base.exact) + part))

    def _length_error(self) -> Float64:
        """How far each length is off, relative to it, (n,)."""
        lengths = np.linalg.norm(self.product, axis=1)
        unit = UNIT[self.base.dtype]
        made = np.linalg.norm(self._product_error(unit), axis=1) / lengths
        return np.asarray(made + growth((self.product.shape[1] + 2, max(U32, unit))))

    def _with_bias(self, bound: Float64, x: Float64, arithmetic: Arithmetic) -> Float64:
        if self.base.bias is None:
            return bound
        return np.asarray(
            bound + growth((2, arithmetic.unit)) * (np.abs(self.expected(x)) + np.abs(self.base.bias))
        )


def _dense(weight: Float64) -> Dense:
    return Dense(np.ascontiguousarray(weight, np.float32))


@dataclass(frozen=True)
class AdapterMiss:
    """A site of a run that is not what its adapter makes it: ``place`` in words, ``worst`` in units of the bound there; ``as_if``
    says what it is instead, where something that was tried fits in every place, and ``tried`` what was."""

    run: str
    site: str
    place: str
    worst: float
    as_if: str
    tried: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """In a clause."""
        found = f"{self.site} in run {self.run}, {self.place}, is off by {self.worst:.3g} times the bound of its adapter"
        return (
            f"{found}; {self.as_if}" if self.as_if else f"{found}; it is neither {' nor '.join(self.tried)}"
        )


Units = Callable[[AdaptedLinear], Float64]
"""How far something is off what a layer makes of it, in units of the bound."""


def weights_missed(adapted: AdaptedLinear, into: PlainLinear, where: tuple[str, str]) -> AdapterMiss | None:
    """Judge weights that the adapter is to be fused into; ``where`` is (run, site). None where all are inside."""

    def units(layer: AdaptedLinear) -> Float64:
        return np.abs(into.exact - layer.target) / np.maximum(layer.weight_bound(into), _TINY)

    found = units(adapted)
    if found.max() <= 1:
        return None
    row, column = np.unravel_index(int(np.argmax(found > 1)), found.shape)
    change = (adapted.a @ adapted.b).T
    place = f"its weights, first output {row}, input {column}"
    return _instead(
        adapted, units, (into.exact - adapted.base.exact, change), (*where, place, float(found.max()))
    )


def outputs_missed(
    adapted: AdaptedLinear,
    x: Float64,
    output: Float64,
    arithmetic: Arithmetic,
    places: Sequence[tuple[str, int]],
    where: tuple[str, str],
) -> AdapterMiss | None:
    """Judge outputs (m, n) of rows (m, k) of an adapter beside its weights. None where all are inside.

    ``places`` are (request, position) by row, ``where`` (run, site).
    """

    def units(layer: AdaptedLinear) -> Float64:
        errors = np.abs(output - layer.expected(x))
        found = errors / np.maximum(layer.beside(x, arithmetic), _TINY)
        # What is not finite is no number that a bound could hold.
        return np.where(np.isfinite(errors), found, np.inf)

    found = units(adapted)
    if found.max() <= 1:
        return None
    request, position = places[int(np.argmax((found > 1).any(axis=1)))]
    plain = adapted.scaled(0.0).expected(x)
    place = f"first at position {position} of {request}"
    return _instead(adapted, units, (output - plain, adapted.change(x)), (*where, place, float(found.max())))


def _instead(
    adapted: AdaptedLinear, units: Units, parts: tuple[Float64, Float64], where: tuple[str, str, str, float]
) -> AdapterMiss:
    """``parts`` are what was added to what is without the adapter, and what a scale of 1 adds."""
    added, change = parts
    fitted = float(np.sum(added * change) / max(float(np.sum(change * change)), _TINY))
    tries = [("as without the adapter", adapted.scaled(0.0), "it is as without the adapter")]
    # Codes leave the fitted scale near the one that was meant.
    for scale in dict.fromkeys(
        (fitted, float(f"{fitted:.3g}"), float(f"{fitted:.2g}"), float(f"{fitted:.1g}"))
    ):
        words = f"it is as with the scale {scale:.4g}, and the adapter's is {adapted.scale:.4g}"
        tries.append(("as with another scale", adapted.scaled(scale), words))
    if adapted.magnitude is not None:
        lengths = "it is as without DoRA's lengths"
        tries.append(("as without DoRA's lengths", adapted.scaled(adapted.scale), lengths))
    as_if = next(
        (words for _, layer, words in tries if np.isfinite(layer.scale) and units(layer).max() <= 1), ""
    )
    return AdapterMiss(*where, as_if, tuple(dict.fromkeys(name for name, _, _ in tries)))


_TINY: Final = float(np.finfo(np.float64).tiny)
