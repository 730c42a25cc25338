"""The bounds of norms and of rotary positions; see ``docs/bounds.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from detdiff.errors import OracleRefused

from .arithmetic import Arithmetic
from .bounds import Bounded, output_rounded
from .roundoff import LARGEST, SMALLEST, U32, Float64, growth

_DOUBLE = 2.0**-52
# A reciprocal root is at most 2 ULP off: a root and a division, or a GPU's instruction.
_ROOT = 4


@dataclass(frozen=True, eq=False)
class Norm:
    """Rows x (..., n) divided by their root mean square ("rms"), or first less their mean ("layer").

    ``weight`` and ``bias`` (n,) or None; ``weight_unit`` is the unit roundoff of what the module itself makes of its weight,
    0 where it takes it as it is. ``gate`` (..., n): the output is multiplied by its SiLU, in float32.
    """

    x: Float64
    eps: float
    form: Literal["rms", "layer"] = "rms"
    weight: Float64 | None = None
    bias: Float64 | None = None
    weight_unit: float = 0.0
    gate: Float64 | None = None

    def bounded(self, arithmetic: Arithmetic) -> Bounded:
        n = self.x.shape[-1]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            centred, off = self._centred()
            mean_square = np.square(centred).mean(axis=-1, keepdims=True)
            held = mean_square + self.eps
            # Squares are added in any order, then divided; eps is added.
            lost = growth((n + 4, U32)) * held + (2 * np.abs(centred) * off + off**2).mean(-1, keepdims=True)
            lost = lost + n * SMALLEST["float32"]
            root = 1.0 / np.sqrt(held)
            share = lost / held
            off_root = np.where(share < 1, 1 / np.sqrt(np.maximum(1 - share, 0)) - 1, np.inf)
            off_root = (1 + off_root) * (1 + growth((_ROOT, U32))) - 1
            exact = centred * root
            error = root * (1 + off_root) * off + np.abs(exact) * off_root
            exact, error = self._scaled(exact, error, arithmetic)
            bound, unbounded = output_rounded(exact, error, arithmetic)
            unbounded |= ~(np.square(self.x).sum(axis=-1, keepdims=True) < LARGEST["float32"] * 0.5)
            # Two products and the output are rounded to the dtype on any path.
            yardstick = growth((n, U32), (3, arithmetic.unit)) * np.abs(exact) + 3 * arithmetic.smallest
        bound[unbounded] = np.inf
        text = (
            f"{self.form} norm: mean square of {n} ((1 + u)^{n + 4} - 1), half of it in the root, root {_ROOT} u, products in "
            f"{arithmetic.dtype}, output rounding"
        )
        return Bounded(exact, bound, yardstick, np.abs(exact) + SMALLEST[arithmetic.dtype], unbounded, text)

    def _centred(self) -> tuple[Float64, Float64]:
        if self.form == "rms":
            return self.x, np.zeros_like(self.x)
        n = self.x.shape[-1]
        mean = self.x.mean(axis=-1, keepdims=True)
        off = growth((n + 1, U32)) * np.abs(self.x).mean(axis=-1, keepdims=True)
        centred = self.x - mean
        return centred, off + U32 * (np.abs(centred) + off) + _DOUBLE * n * np.abs(self.x).max(
            -1, keepdims=True
        )

    def _scaled(self, exact: Float64, error: Float64, arithmetic: Arithmetic) -> tuple[Float64, Float64]:
        """The root mean square times the weight, each product rounded to the dtype, plus the bias."""
        unit, tiny = arithmetic.unit, arithmetic.smallest
        size = np.abs(exact) + error
        error = error + growth((1, U32), (1, unit)) * size + tiny
        if self.weight is not None:
            weight = np.abs(self.weight)
            size = (np.abs(exact) + error) * weight
            staged = growth((2, unit), (1, self.weight_unit))
            error = error * weight + staged * size + tiny * (1 + np.abs(exact) + error)
            exact = exact * self.weight
        if self.bias is not None:
            error = error + unit * (np.abs(self.bias) + np.abs(exact) + error) + tiny
            exact = exact + self.bias
        if self.gate is not None:
            gate = self.gate / (1 + np.exp(-self.gate))
            # exp, a sum, a quotient, a product; the exponent's rounding grows with the gate.
            off = growth((14, U32)) * (1 + np.abs(self.gate)) * np.abs(gate) + 2.0**-120
            error = error * (np.abs(gate) + off) + np.abs(exact) * off + U32 * np.abs(exact * gate)
            exact = exact * gate
        return exact, error


@dataclass(frozen=True, eq=False)
class Rope:
    """x (rows, ..., D) rotated by its positions (rows,): the first ``dims`` items, in pairs.

    The angle of pair i is position * ``scale`` * base**(-2 i / dims), or over ``frequencies[i]``, float32 numbers that the
    module holds. ``multiplier``: what the items are multiplied by first. Pairs are neighbours if ``traditional``, else
    ``dims`` / 2 apart.
    """

    x: Float64
    positions: Float64
    dims: int
    traditional: bool = False
    base: float | None = None
    frequencies: Float64 | None = None
    scale: float = 1.0
    multiplier: float = 1.0

    def bounded(self, arithmetic: Arithmetic) -> Bounded:
        if arithmetic.backend != "cpu":
            raise OracleRefused(
                f"RoPE on {arithmetic.backend} uses the device's fast sine and cosine, for which no error is published outside "
                "-pi to pi. Judge the site on the CPU, or the sites around it."
            )
        half = self.dims // 2
        angle, off = self._angles()
        lead = (len(self.x),) + (1,) * (self.x.ndim - 2) + (half,)
        cos, sin = np.cos(angle).reshape(lead), np.sin(angle).reshape(lead)
        # A sine and its range reduction end within 2 ULP of 1 where the angle is right; then both are rounded.
        unit, tiny = arithmetic.unit, arithmetic.smallest
        turn = np.minimum(off + 4 * U32, 2.0).reshape(lead)
        turn_c, turn_s = turn + unit * (np.abs(cos) + turn) + tiny, turn + unit * (np.abs(sin) + turn) + tiny
        first, second = self._pairs()
        a, b = self.multiplier * self.x[..., first], self.multiplier * self.x[..., second]
        staged = 0.0 if self.multiplier == 1.0 else growth((2, unit))
        exact, error = self.x.copy(), np.zeros_like(self.x)
        size = np.abs(self.x)
        for place, cosine, sine in ((first, cos, -sin), (second, sin, cos)):
            products = np.abs(a * cosine) + np.abs(b * sine)
            turned = np.abs(a) * (turn_c if place is first else turn_s)
            turned = turned + np.abs(b) * (turn_s if place is first else turn_c)
            whole = products + turned
            exact[..., place] = a * cosine + b * sine
            # Products and their sum are rounded to the dtype.
            error[..., place] = turned + growth((1, unit)) * whole + staged * whole + 3 * tiny
            size[..., place] = np.sqrt(np.square(a) + np.square(b))
        rotated = np.zeros(self.x.shape[-1], np.bool_)
        rotated[: self.dims] = True
        bound, unbounded = output_rounded(exact, error, arithmetic)
        yardstick = size * 8 * U32 + arithmetic.unit * np.abs(exact) + tiny
        yardstick[..., : self.dims] += error[..., : self.dims]
        # What is not rotated is copied.
        for array in (bound, yardstick):
            array[..., ~rotated] = 0.0
        unbounded[..., ~rotated] = False
        text = (
            f"rope: |x| times the angle's error (up to {float(off.max(initial=0.0)):.1e}), sine and cosine 4 u, products in "
            f"{arithmetic.dtype}, output rounding"
        )
        return Bounded(exact, bound, yardstick, size + SMALLEST[arithmetic.dtype], unbounded, text)

    def _angles(self) -> tuple[Float64, Float64]:
        """The angles (rows, dims / 2), and how far float32 can be from them."""
        half = self.dims // 2
        if self.frequencies is not None:
            with np.errstate(divide="ignore"):
                speed = 1.0 / self.frequencies
            relative = np.ones(half)
        else:
            assert self.base is not None
            exponent = np.arange(half) * np.log(self.base) / half
            speed = np.exp(-exponent)
            # The logarithm of a rounded base over half as a float32, its product with i, and the power of that.
            relative = 8 * np.abs(exponent) + 8 + np.arange(half) / half
        angle = self.positions[:, None] * self.scale * speed
        # Position, scale and their product; the angle's product; three steps of the range reduction.
        return angle, np.abs(angle) * growth((1, U32)) * (relative + 8)

    def _pairs(self) -> tuple[slice, slice]:
        if self.traditional:
            return slice(0, self.dims, 2), slice(1, self.dims, 2)
        return slice(0, self.dims // 2), slice(self.dims // 2, self.dims)
