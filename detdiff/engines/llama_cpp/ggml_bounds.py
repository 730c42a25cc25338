"""Bounds of what ggml computes on a CPU: how it stages the rows of a matrix product, and operations on single elements.

Read in ggml-org/llama.cpp, ggml/src/ggml-cpu: 005913f ggml-cpu.c (type_traits_cpu: a weight's type names the type that rows are
converted to), ops.cpp and vec.cpp; quantisation in arch/x86/quants.c, arch/arm/quants.c and ggml-quants.c (quantize_row_*_ref).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from detdiff.errors import OracleRefused
from detdiff.explain.attention_bounds import AttentionRoundings, Count
from detdiff.explain.bounds import BoundedOutputs, Linear, exact_weight, magnitude, output_rounded
from detdiff.explain.roundings import LARGEST, SMALLEST, U32, UNIT, Arithmetic, Float64, growth
from detdiff_kernels.rounding import rounded
from detdiff_kernels.weights import Blocks, Dense, Weight

_DOUBLE = 2.0**-52
_BLOCK = 2048  # outputs whose weights are widened at a time: a head is large
_EXP = 4
"""Roundings of ggml's own exponential, at most 1.45 ULP off, and of expf; vec.h, ggml_v_expf."""
STAGED: Final = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "Q8_0": "q8_0", "Q4_0": "q8_0", "Q4_1": "q8_1", "Q4_K": "q8_k",
    "Q6_K": "q8_k",
}  # fmt: skip
"""What rows are converted to for a weight of a type, before any product: ``vec_dot_type``."""


def staged_as(weight: Weight) -> str:
    """What rows are converted to for a weight. Raises OracleRefused for one that no GGUF file holds."""
    kind = weight.dtype if isinstance(weight, Dense) else weight.format
    if kind not in STAGED:
        raise OracleRefused(
            f"A weight is {kind}, for which ggml's staging of rows is not known; known are {', '.join(STAGED)}. Judge other sites."
        )
    return STAGED[kind]


@dataclass(frozen=True, eq=False)
class StagedRows:
    """Rows (m, k) as ggml stages them: ``values``, and by how much each may still be other; of blocks with sums of their own, these
    sums (m, k / 32), which are rounded apart, and by how much more than their values they may be other."""

    values: Float64
    doubt: Float64
    sums: Float64 | None = None
    sums_doubt: Float64 | None = None


def staged_rows(x: Float64, kind: str) -> StagedRows:
    """``x`` (m, k), float32 numbers, as the conversion to ``kind`` leaves them; no conversion loses what is not finite.

    Codes are rounded quotients. Where a quotient is as good as in the middle of two codes, which of them is taken depends on how a
    processor's code divides and rounds: that quantum is in doubt.
    """
    none = np.zeros_like(x)
    if kind == "float32":
        return StagedRows(x, none)
    if kind in ("float16", "bfloat16"):
        with np.errstate(over="ignore"):
            return StagedRows(rounded(x.astype(np.float32), kind).astype(np.float64), none)
    size, most = (256, 127.0) if kind == "q8_k" else (32, 127.0)
    parts = x.reshape(len(x), -1, size)
    largest = np.abs(parts).max(axis=2, keepdims=True)
    plain = (largest.astype(np.float32) / np.float32(most)).astype(np.float64)
    # Blocks of 32 keep their scale as float16, superblocks as float32.
    with np.errstate(over="ignore"):
        scale = plain if kind == "q8_k" else plain.astype(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        quotient = np.where(largest > 0, parts * most / largest, 0.0)
    codes = np.rint(quotient)
    middle = np.abs(np.abs(quotient) % 1.0 - 0.5) < 8 * most * U32
    # The scale is a reciprocal of a rounded quotient for superblocks, so it is itself a few roundings off.
    spread = 4 * U32 * scale * np.abs(codes) if kind == "q8_k" else 0.0
    with np.errstate(invalid="ignore"):
        values, doubt = codes * scale, np.where(middle, scale, 0.0) + spread
        doubt = np.broadcast_to(doubt, parts.shape)
        total = other = None
        if kind == "q8_1":
            whole = (plain * codes.sum(axis=2, keepdims=True)).astype(np.float32)
            total = whole.astype(np.float16).astype(np.float64).reshape(len(x), -1)
            # Another code is another sum, which is rounded anew.
            unsure = doubt.sum(axis=2)
            other = np.where(unsure > 0, 2 * UNIT["float16"] * (np.abs(total) + unsure), 0.0)
    return StagedRows(values.reshape(x.shape), doubt.reshape(x.shape), total, other)


@dataclass(frozen=True, eq=False)
class StagedLinear(Linear):
    """Rows times a weight of a GGUF file, as ggml computes it on a CPU: rows staged by the weight's type, sums in float32 in any order.

    What staging does to this very product is computed, and allowed in both directions: some processors' code takes rows as they are.
    ``half_sums``: products of float16 weights may be summed in float16, as ARM's vector code does (vec.cpp ggml_vec_dot_f16 over
    simd-mappings.h GGML_F16_VEC, and llamafile/sgemm.cpp).
    """

    half_sums: bool = False

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        _on_cpu(arithmetic, "products")
        kind = staged_as(self.weight)
        rows = staged_rows(self.x, kind)
        k = self.x.shape[1]
        # Integers sum exactly inside of blocks, which are then scaled, and their minima added.
        steps = k + 1 if not isinstance(self.weight, Blocks) else k // 8 + 16
        halves = k // 8 + 8 if self.half_sums and kind == "float16" else 0
        grown = growth((steps, U32), (halves, UNIT["float16"])) + _DOUBLE * (k + 4)
        own, exact, yardstick, scale = np.empty((4, len(self.x), self.weight.n))
        over = np.zeros(exact.shape, np.bool_)
        held = np.abs(rows.values) + rows.doubt
        with np.errstate(invalid="ignore", over="ignore"):
            for at in range(0, self.weight.n, _BLOCK):
                part = slice(at, min(at + _BLOCK, self.weight.n))
                weight = self.weight.part(part.start, part.stop)
                w, size = exact_weight(weight), magnitude(weight)
                exact[:, part] = self.x @ w.T
                whole = held @ size.T
                error = self._effect(rows, w, weight) + rows.doubt @ size.T
                error += grown * whole + SMALLEST["float32"] * (8.0 * k + size.sum(axis=1))
                if halves:
                    error += SMALLEST["float16"] * 2 * halves
                limit = LARGEST["float16"] if halves else LARGEST["float32"]
                over[:, part] = ~(np.maximum(whole, error) < limit * 0.5)
                own[:, part] = error
                plain = np.abs(self.x) @ np.abs(w).T
                yardstick[:, part] = growth((k + 1, U32)) * plain
                scale[:, part] = np.sqrt(np.square(self.x) @ np.square(w).T)
        own[over] = np.inf
        bound, unbounded = output_rounded(exact, own, arithmetic)
        yardstick += arithmetic.unit * np.abs(exact) + arithmetic.smallest
        order = f"{steps} roundings to float32" + (f" and {halves} to float16" if halves else "")
        text = f"linear: what staging rows as {kind} does, and ((1 + u)^n - 1) sum |x||w|, {order}, output rounding"
        return BoundedOutputs(exact, bound, yardstick, scale, unbounded | over, text)

    def _effect(self, rows: StagedRows, w: Float64, weight: Weight) -> Float64:
        """How far the product of staged rows is from that of the given ones."""
        effect: Float64 = (rows.values - self.x) @ w.T
        if rows.sums is None or rows.sums_doubt is None or not isinstance(weight, Blocks):
            return np.abs(effect)
        held = weight.unpacked().minimum
        assert held is not None
        minimum = held.astype(np.float64)
        sums = rows.values.reshape(len(rows.values), -1, 32).sum(axis=2)
        # Minima meet the blocks' own sums.
        found: Float64 = np.abs(effect + (rows.sums - sums) @ minimum.T)
        return found + rows.sums_doubt @ np.abs(minimum).T


@dataclass(frozen=True, eq=False)
class Elementwise:
    """Two arrays of one shape, or that broadcast, element by element in float32: their sum, their product, or the SiLU of the first times
    the second (vec.cpp ggml_vec_swiglu_f32)."""

    form: Literal["sum", "product", "swiglu"]
    a: Float64
    b: Float64

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        _on_cpu(arithmetic, "element-wise operations")
        with np.errstate(over="ignore", invalid="ignore"):
            if self.form == "sum":
                exact, size = self.a + self.b, np.abs(self.a) + np.abs(self.b)
                error = _DOUBLE * size
            elif self.form == "product":
                exact = self.a * self.b
                size, error = np.abs(exact), _DOUBLE * np.abs(exact)
            else:
                exact = self.a / (1 + np.exp(-self.a)) * self.b
                size = np.abs(exact)
                # The exponential, a sum, a quotient, a product; an exponential that overflows leaves a zero.
                error = growth((_EXP + 3, U32)) * size + 2.0**-120 * (1 + np.abs(self.b))
            bound, unbounded = output_rounded(exact, error, arithmetic)
            yardstick = 4 * U32 * size + arithmetic.unit * np.abs(exact) + arithmetic.smallest
        text = f"{self.form}: {'exponential ' + str(_EXP) + ' u, ' if self.form == 'swiglu' else ''}output rounding"
        return BoundedOutputs(exact, bound, yardstick, size + SMALLEST["float32"], unbounded, text)


def attending(
    flash: bool, k: str, v: str, keys: int, width: int, *, half_sums: bool = False
) -> AttentionRoundings:
    """The roundings of ggml's attention on a CPU over a cache of dtypes ``k`` and ``v``.

    Read in ops.cpp: with flash attention ggml_compute_forward_flash_attn_ext_f16_one_chunk, which stages the query by the keys' type
    and adds float16 values to an output that is float16 itself, and ..._tiled, which holds both as float32 and stays within that;
    without, two products (the second over weights staged by the values' type) around ggml_compute_forward_soft_max_f32, whose
    sums are float64.
    """
    cached: tuple[Count, ...] = ()
    if flash and "float32" in (k, v):
        # The graph casts both, as flash attention takes no others.
        cached, k, v = ((1, "float16"),), "float16", "float16"
    query = "" if k == "float32" else k
    product: tuple[Count, ...] = ((width + 1, "float32"),)
    if half_sums and k == "float16":
        product = (*product, (width // 8 + 8, "float16"))
    weights: tuple[Count, ...] = () if v == "float32" else ((1, v),)
    sums: tuple[Count, ...] = ((keys + 48, "float32"),)
    if flash:
        # A weight is a float32, but for vector code that works in float16.
        weights = weights if half_sums and v == "float16" else ()
        sums = ((4 * keys + 48, "float32"),)
    elif half_sums and v == "float16":
        sums = (*sums, (keys // 8 + 16, "float16"))
    return AttentionRoundings(
        query=(), cached=cached, score=product, scores=((2, "float32"),), apart=3, whole=0, power=_EXP + 1, sums=sums, weights=weights,
        rounded=query, running="float16" if flash and v == "float16" else "",
    )  # fmt: skip


def _on_cpu(arithmetic: Arithmetic, what: str) -> None:
    if arithmetic.backend != "cpu":
        raise OracleRefused(
            f"llama.cpp computed {what} on {arithmetic.backend}, and which roundings it does there is not known. Judge the site on the "
            "CPU (n_gpu_layers = 0)."
        )
