"""What a bound is, and the bounds of linear operations, embeddings, norms, rotary positions and what must be exact; see ``docs/bounds.md``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import OracleRefused
from detdiff_kernels.weights import Affine, Blocks, Dense, Weight

from .roundings import LARGEST, SMALLEST, U32, UNIT, Arithmetic, Float64, LinearRoundings, Op, growth

_DOUBLE = 2.0**-52
_CODES = 127.0
_BLOCK = 2048  # outputs whose weights are widened at a time: a head is large
_HALF = UNIT["float16"]
_HALF_TINY = SMALLEST["float16"]
_INFINITE = 65520.0  # the first number that float16 rounds to infinity


@dataclass(frozen=True, eq=False)
class BoundedOutputs:
    """The outputs of an operation in float64, and how far rounding can be from them; arrays of one shape.

    ``yardstick`` is the bound of the same operation with float32 sums over operands as they are, whatever the path;
    ``scale`` is what a single rounding of operands, multiplied by its unit, leads to on average; ``unbounded`` marks
    outputs that may overflow, and so may be infinite or NaN. ``text`` says what the bound is.
    """

    exact: Float64
    bound: Float64
    yardstick: Float64
    scale: Float64
    unbounded: NDArray[np.bool_]
    text: str


@dataclass(frozen=True, eq=False)
class Linear:
    """Rows x (m, k) times a weight (n, k), plus a bias (n,).

    ``quantised`` says that the module holds codes, in whichever mode; ``op`` is what profiles call the operation.
    """

    x: Float64
    weight: Weight
    bias: Float64 | None = None
    quantised: bool = False
    op: Op = "linear"

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        sums = arithmetic.sums(self.weight, len(self.x), quantised=self.quantised, op=self.op)
        plain = LinearRoundings("float32", "dtype", self.weight.k + 1, 0, 0, False, self.weight)
        own, exact, yardstick, scale = np.empty((4, len(self.x), self.weight.n))
        for at in range(0, self.weight.n, _BLOCK):
            part = slice(at, min(at + _BLOCK, self.weight.n))
            own[:, part], exact[:, part] = _sum_bound(self.x, _part(sums, part), arithmetic.dtype)
            yardstick[:, part], _ = _sum_bound(self.x, _part(plain, part), "float32")
            scale[:, part] = np.sqrt(np.square(self.x) @ np.square(exact_weight(_part(plain, part).block)).T)
        roundings = 1
        if self.bias is not None:
            # Kernels round the sum, and then the sum with the bias.
            own += arithmetic.unit * (np.abs(exact) + own) + arithmetic.smallest
            exact = exact + self.bias
            roundings = 2
        bound, unbounded = output_rounded(exact, own, arithmetic)
        yardstick += roundings * (arithmetic.unit * np.abs(exact) + arithmetic.smallest)
        order = f"{sums.float32} roundings to float32" if sums.float32 else ""
        if sums.dtype:
            order += f"{' and ' if order else ''}{sums.dtype} to {arithmetic.dtype}"
        staged = "" if sums.inputs == "dtype" else f", inputs as {sums.inputs}"
        text = (
            f"linear: ((1 + u)^n - 1) sum |x||w|, {order}, weights as {sums.weights}{staged}, output rounding"
        )
        return BoundedOutputs(exact, bound, yardstick, scale, unbounded, text)


@dataclass(frozen=True, eq=False)
class Switch:
    """Rows x (m, k) that go to the weights of their experts, ``chosen`` (m,) places in ``weights``."""

    x: Float64
    chosen: NDArray[np.int64]
    weights: tuple[Weight, ...]
    biases: tuple[Float64 | None, ...]
    quantised: bool = False

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        parts: list[tuple[NDArray[np.int64], BoundedOutputs]] = []
        for expert in np.unique(self.chosen).tolist():
            mine = np.flatnonzero(self.chosen == expert)
            one = Linear(self.x[mine], self.weights[expert], self.biases[expert], self.quantised, "switch")
            parts.append((mine, one.bounded(arithmetic)))
        if not parts:
            raise OracleRefused(
                "An expert operation was given no row; expected at least one. Capture a row of the site."
            )
        shape = (len(self.x), self.weights[0].n)
        exact, bound, yardstick, scale = np.empty((4, *shape))
        text = parts[0][1].text.replace("linear", "switch", 1)
        whole = BoundedOutputs(exact, bound, yardstick, scale, np.empty(shape, np.bool_), text)
        for mine, part in parts:
            for name in ("exact", "bound", "yardstick", "scale", "unbounded"):
                getattr(whole, name)[mine] = getattr(part, name)
        return whole


@dataclass(frozen=True, eq=False)
class Embedding:
    """Rows ``ids`` (m,) of a weight (n, k): as they are, or dequantised in the output's dtype."""

    ids: NDArray[np.int64]
    weight: Weight
    quantised: bool = False

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        chosen = exact_weight(self.weight, self.ids)
        if not self.quantised:
            return exactly(chosen, "embedding: the weight's rows, bit for bit")
        # mlx dequantises by a product and a sum, each rounded; the other modes by products.
        roundings = 2 if isinstance(self.weight, Affine) else 3
        size = magnitude(self.weight, self.ids)
        bound = growth((roundings, arithmetic.unit)) * size + roundings * arithmetic.smallest
        unbounded = np.abs(chosen) + bound >= arithmetic.largest
        text = f"embedding: {roundings} roundings to {arithmetic.dtype} of |scale| code + |bias|"
        return BoundedOutputs(chosen, bound, bound, size, unbounded, text)


@dataclass(frozen=True, eq=False)
class Copied:
    """What a cache or a state must hold or give back: the same numbers."""

    expected: Float64

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        return exactly(self.expected, "the same numbers, bit for bit: nothing is computed here")


def exactly(expected: Float64, text: str) -> BoundedOutputs:
    """A bound of nothing."""
    none = np.zeros(expected.shape)
    scale = np.abs(expected) + (expected == 0)
    return BoundedOutputs(expected, none, none, scale, np.zeros(expected.shape, np.bool_), text)


def output_rounded(
    exact: Float64, error: Float64, arithmetic: Arithmetic, roundings: int = 1
) -> tuple[Float64, NDArray[np.bool_]]:
    """``error`` with the rounding of the output to its dtype, and which outputs may overflow in it."""
    bound = error + growth((roundings, arithmetic.unit)) * (np.abs(exact) + error) + arithmetic.smallest
    return bound, ~(np.abs(exact) + bound < arithmetic.largest)


def exact_weight(weight: Weight, rows: NDArray[np.int64] | slice = slice(None)) -> Float64:
    """The numbers (rows, k) that a weight stands for, in float64; of affine codes to one rounding of float64."""
    if isinstance(weight, Dense):
        chosen: Float64 = replace(weight, data=np.atleast_2d(weight.data[rows])).floats().astype(np.float64)
        return chosen
    scaled, shift = _scaled(weight, rows)
    return scaled + shift


def magnitude(weight: Weight, rows: NDArray[np.int64] | slice = slice(None)) -> Float64:
    """|scale| code + |bias| (rows, k): what roundings of codes apart from biases are relative to."""
    if isinstance(weight, Dense):
        return np.abs(exact_weight(weight, rows))
    scaled, shift = _scaled(weight, rows)
    return np.abs(scaled) + np.abs(shift)


def _scaled(
    weight: Affine | Blocks, rows: NDArray[np.int64] | slice = slice(None)
) -> tuple[Float64, Float64]:
    """Scale times code, and what is added to it, (rows, k) each.

    Codes of Q4_0 are stored from 0 to 15 and less 8 in what they stand for.
    """
    parts = weight.unpacked()
    codes = parts.codes[rows].astype(np.float64)

    def each(outer: NDArray[np.float32], inner: NDArray[np.float32] | None) -> Float64:
        found = np.repeat(outer[rows].astype(np.float64), parts.size, axis=1)
        return found if inner is None else found * np.repeat(inner[rows].astype(np.float64), parts.inner, 1)

    scale = each(parts.scale, parts.scales)
    if weight.format == "Q4_0":
        return scale * codes, -8.0 * scale
    if parts.minimum is None:
        return scale * codes, np.zeros_like(scale)
    shift = each(parts.minimum, parts.minima)
    return scale * codes, -shift if parts.minima is not None else shift


def _sum_bound(x: Float64, sums: LinearRoundings, dtype: str) -> tuple[Float64, Float64]:
    """The error before the output is rounded, and the exact sums, both (m, n)."""
    weight = sums.block
    w = exact_weight(weight)
    size = magnitude(weight)
    coefficient = size if sums.split else np.abs(w)
    with np.errstate(over="ignore", invalid="ignore"):
        w_error = _weight_error(sums, dtype, w, size)
        x_error, y_error = _input_error(x, sums)
        given, held = np.abs(x) + x_error, coefficient + w_error
        exact = x @ w.T
        whole = given @ held.T
        error = (sums.growth(dtype) + _DOUBLE * (x.shape[1] + 4)) * whole
        error += np.abs(x) @ w_error.T + x_error @ held.T
        if sums.split:
            shift = _shift(weight)
            if sums.sums_dtype:
                error += growth((sums.sums_dtype, UNIT[dtype])) * (given @ shift.T)
            if y_error:
                error += _HALF * (given @ shift.T) + _HALF_TINY * shift.sum(axis=1)
            if sums.halves:
                error += _HALF * whole + _HALF_TINY * (_codes(weight).sum(axis=1) * _CODES + x.shape[1])
        error += _underflow(sums, dtype, held, x.shape[1])
        overflow = _overflows(sums, dtype, given, whole, held)
    error[overflow] = np.inf
    return error, exact


def _part(sums: LinearRoundings, outputs: slice) -> LinearRoundings:
    return replace(sums, block=sums.block.part(outputs.start, outputs.stop))


def _shift(weight: Weight) -> Float64:
    """What is added to scale times code, without its sign."""
    return np.zeros((weight.n, weight.k)) if isinstance(weight, Dense) else np.abs(_scaled(weight)[1])


def _codes(weight: Weight) -> Float64:
    """The codes without their signs; there are none in a dense weight."""
    if isinstance(weight, Dense):
        return np.zeros((weight.n, weight.k))
    return np.abs(weight.unpacked().codes.astype(np.float64))


def _weight_error(sums: LinearRoundings, dtype: str, w: Float64, size: Float64) -> Float64:
    """How far the staged weights can be from the numbers that the weight stands for."""
    form, weight = sums.weights, sums.block
    unit, tiny = UNIT[dtype], SMALLEST[dtype]
    if form in ("codes", "signed", "places"):
        if sums.half_products:
            return _HALF * size + _HALF_TINY * (_codes(weight) + 1)
        return np.zeros_like(w)
    if form in ("dtype_twice", "dtype_in_place"):
        if not isinstance(weight, Affine):
            return np.zeros_like(w)
        places = 1.0 if form == "dtype_twice" else 2.0 ** max(8 - weight.bits, 0)
        # In float32 a product and a sum are one rounding fewer.
        error: Float64 = growth((2, unit), (1, U32)) * size + 3 * tiny * (1 + places * _codes(weight))
        return error
    kind = dtype if form == "dtype" else form.removeprefix("metal_")
    if isinstance(weight, Dense) and weight.dtype == kind:
        return np.zeros_like(w)
    error = np.zeros_like(w) if isinstance(weight, Dense) else U32 * np.abs(w) + SMALLEST["float32"]
    if form.startswith("metal_") and isinstance(weight, Blocks):
        error = error + 3 * U32 * size + _sixteenth_error(weight)
    if kind != "float32":
        error = error + UNIT[kind] * (np.abs(w) + error) + SMALLEST[kind]
    error[~(np.abs(w) + error < LARGEST[kind])] = np.inf
    return error


def _sixteenth_error(weight: Blocks) -> Float64:
    """A code in the upper half of a byte meets a sixteenth of its scale, in float16; only subnormal ones lose bits."""
    parts = weight.unpacked()
    step = np.where(np.abs(parts.scale) < 16 * 2.0**-14, 16 * _HALF_TINY, 0.0)
    lost = np.repeat(step, parts.size, axis=1) * _codes(weight)
    return lost if parts.scales is None else lost * np.repeat(np.abs(parts.scales), parts.inner, axis=1)


def _input_error(x: Float64, sums: LinearRoundings) -> tuple[Float64, bool]:
    """How far the staged inputs can be from the given ones, and whether sums of blocks are float16."""
    if sums.inputs == "dtype":
        return np.zeros_like(x), False
    if sums.inputs == "float16":
        error = _HALF * np.abs(x) + _HALF_TINY
        error[np.abs(x) >= _INFINITE] = np.inf
        return error, False
    most = np.abs(x).reshape(len(x), -1, 32).max(axis=2)
    # Half a quantum of the block; the quotient's own roundings can turn to the other neighbour; the scale is rounded.
    scale = U32 if sums.inputs == "q8_1_tile_float" else _HALF
    tiny = SMALLEST["float32"] if sums.inputs == "q8_1_tile_float" else _HALF_TINY
    error = most * (0.5 / _CODES + scale + 4 * U32) + _CODES * tiny
    error[most / _CODES >= _INFINITE] = np.inf
    error = np.repeat(error, 32, axis=1)
    total = np.abs(x).reshape(len(x), -1, 32).sum(axis=2)
    if sums.inputs != "q8_1_tile_float":
        error[np.repeat(total >= _INFINITE, 32, axis=1)] = np.inf
    return error, True


def _underflow(sums: LinearRoundings, dtype: str, held: Float64, k: int) -> Float64:
    """What results below the normal numbers lose: one step each, times what still multiplies it."""
    places = 4096.0 if sums.split else 1.0
    lost: Float64 = sums.flushed * (8.0 * k + places * held.sum(axis=1))
    if sums.dtype:
        lost = lost + SMALLEST[dtype] * 2.0 * sums.dtype * (1 + held.max(axis=1))
    return lost


def _overflows(
    sums: LinearRoundings, dtype: str, given: Float64, whole: Float64, held: Float64
) -> NDArray[np.bool_]:
    """Where a sum on the way can pass the largest number of what holds it."""
    limit = LARGEST[dtype] if sums.dtype else LARGEST["float32"]
    over = ~(whole < limit)
    if sums.split:
        over |= ~(given.sum(axis=1) * 4096.0 * 255.0 < LARGEST["float32"])[:, None]
    if sums.raw:
        groups = np.add.reduceat(given, np.arange(0, given.shape[1], 32), axis=1)
        over |= ~(groups.max(axis=1) * sums.raw < LARGEST[dtype])[:, None]
    if sums.halves:
        over |= ~(given.sum(axis=1)[:, None] * held.max(axis=1)[None] < _INFINITE)
    if sums.sums_dtype and dtype == "float16":
        over |= ~(given.sum(axis=1) < _INFINITE)[:, None]
    return over


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

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
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
        return BoundedOutputs(
            exact, bound, yardstick, np.abs(exact) + SMALLEST[arithmetic.dtype], unbounded, text
        )

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

    The angle of pair i is position * ``scale`` * base**(-2 i / dims), over ``divisors[i]`` where there are any, or over
    ``frequencies[i]``, float32 numbers that the module holds; ``chained``: over them it is the angle of the pair before, times
    a float32 power of the base, as ggml has it. ``multiplier``: what the items are multiplied by first. Pairs are neighbours
    if ``traditional``, else ``dims`` / 2 apart.
    """

    x: Float64
    positions: Float64
    dims: int
    traditional: bool = False
    base: float | None = None
    frequencies: Float64 | None = None
    scale: float = 1.0
    multiplier: float = 1.0
    chained: bool = False
    divisors: Float64 | None = None

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
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
        return BoundedOutputs(exact, bound, yardstick, size + SMALLEST[arithmetic.dtype], unbounded, text)

    def _angles(self) -> tuple[Float64, Float64]:
        """The angles (rows, dims / 2), and how far float32 can be from them."""
        half = self.dims // 2
        if self.chained:
            assert self.base is not None
            step = np.log(self.base) / half
            speed = np.exp(-step * np.arange(half)) / (1.0 if self.frequencies is None else self.frequencies)
            # Each step rounds its product, and brings the error of the power and of its exponent.
            relative = np.arange(half) * (3 + step) + 2
        elif self.frequencies is not None:
            with np.errstate(divide="ignore"):
                speed = 1.0 / self.frequencies
            relative = np.ones(half)
        else:
            assert self.base is not None
            exponent = np.arange(half) * np.log(self.base) / half
            speed = np.exp(-exponent)
            # The logarithm of a rounded base over half as a float32, its product with i, and the power of that.
            relative = 8 * np.abs(exponent) + 8 + np.arange(half) / half
            if self.divisors is not None:
                # The divisors are made of the frequencies, by a product, a difference and two quotients.
                speed, relative = speed / self.divisors, 2 * relative + 16
        angle = self.positions[:, None] * self.scale * speed
        # Position, scale and their product; the angle's product; three steps of the range reduction.
        return angle, np.abs(angle) * growth((1, U32)) * (relative + 8)

    def _pairs(self) -> tuple[slice, slice]:
        if self.traditional:
            return slice(0, self.dims, 2), slice(1, self.dims, 2)
        return slice(0, self.dims // 2), slice(self.dims // 2, self.dims)
