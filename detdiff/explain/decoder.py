"""A decoder of the llama kind as operations, role by role, from its file alone: weights, constants, and which value feeds what.

Each operation is given what an engine itself had, so that its bound is that of one operation; what is between operations is
not the engine's word but the file's, so that a swapped weight, another base or a missing factor is outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.roles import FIRST, LAST, LAYER, Key, fed_by, named
from detdiff.errors import OracleRefused
from detdiff_kernels.rounding import rounded

from .attention_bounds import AttentionOperation
from .bounds import BoundedOutputs, Copied, Embedding, Linear, Norm, Rope, exact_weight, output_rounded
from .model_file import NORMS, WEIGHTS, Activation, Configuration, ModelFile
from .oracle import Operation
from .roundings import UNIT, Arithmetic, Float64, Op, growth

Fed = Mapping[str, Float64]
"""What feeds an operation, by the role that gave it, (rows, width) each."""


_LINEAR: Final = ("q", "k", "v", "o", "gate", "up", "down", "head")
_ERF = np.vectorize(erf, otypes=[np.float64])


@dataclass(frozen=True, eq=False)
class Sum:
    """One value plus another (rows, n)."""

    a: Float64
    b: Float64

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        exact = self.a + self.b
        bound, unbounded = output_rounded(exact, np.zeros_like(exact), arithmetic)
        scale = np.abs(self.a) + np.abs(self.b) + arithmetic.smallest
        return BoundedOutputs(exact, bound, bound, scale, unbounded, "sum: output rounding")


@dataclass(frozen=True, eq=False)
class GatedActivation:
    """The activation of ``gate`` times ``up`` (rows, n)."""

    gate: Float64
    up: Float64
    form: Activation

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        x, unit = self.gate, max(arithmetic.unit, UNIT["float32"])
        with np.errstate(over="ignore", invalid="ignore"):
            if self.form == "silu":
                active = x / (1.0 + np.exp(-x))
                # exp, a sum, a quotient, a product, in float32 or the dtype; the exponent's rounding grows with the gate.
                off = np.abs(active) * (growth((14, UNIT["float32"])) * (1 + np.abs(x)) + growth((6, unit)))
            else:
                inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
                active = 0.5 * x * (1.0 + (_ERF(x / np.sqrt(2)) if self.form == "gelu" else np.tanh(inner)))
                # One plus a number near minus one: the error is relative to the gate, not to what is left of it.
                off = growth((24, unit)) * np.abs(x)
            off = off + 4 * arithmetic.smallest
            exact = active * self.up
            error = off * np.abs(self.up) + growth((1, unit)) * np.abs(exact) + arithmetic.smallest
            bound, unbounded = output_rounded(exact, error, arithmetic)
        scale = np.abs(exact) + arithmetic.smallest
        return BoundedOutputs(
            exact, bound, bound, scale, unbounded, f"{self.form} times a factor, output rounding"
        )


@dataclass(frozen=True, eq=False)
class ScaledEmbedding:
    """Rows ``x`` (rows, n) of the embedding times a constant, which is rounded to the dtype first."""

    x: Float64
    factor: float

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        exact = self.x * self.factor
        error = growth((2, arithmetic.unit)) * np.abs(exact) + arithmetic.smallest
        bound, unbounded = output_rounded(exact, error, arithmetic)
        scale = np.abs(exact) + arithmetic.smallest
        return BoundedOutputs(
            exact, bound, bound, scale, unbounded, "embedding times a constant, output rounding"
        )


@dataclass(frozen=True, eq=False)
class LlamaDecoder:
    """The operations of a model's file."""

    file: ModelFile

    @property
    def configuration(self) -> Configuration:
        return self.file.configuration

    def keys(self) -> list[Key]:
        """Every role of the model with its layer, in the order of execution."""
        normed = self.file.norm("q_norm", 0) is not None
        inner = [role for role in LAYER if normed or role not in ("q_norm", "k_norm")]
        layers: list[Key] = [(role, layer) for layer in range(self.configuration.layers) for role in inner]
        return [*((role, None) for role in FIRST), *layers, *((role, None) for role in LAST)]

    def feeds(self, key: Key) -> dict[str, Key]:
        """The roles that an operation is given."""
        known = dict.fromkeys(self.keys())
        return fed_by(key, known, self.configuration.layers)

    def operation(
        self, key: Key, given: Fed, tokens: NDArray[np.int64], positions: NDArray[np.int64], dtype: str
    ) -> Operation:
        """Of rows that were fed ``tokens`` at ``positions`` (rows,). Attention is of one row: ``rope_k`` and ``v`` are
        then those of all positions up to it.

        Raises OracleRefused for what is not known of the model.
        """
        role, layer = key
        if role in self.configuration.unknown:
            raise OracleRefused(f"{named(key)}: {self.configuration.unknown[role]}. Judge what is around it.")
        if role == "embedding":
            return self._embedding(tokens, dtype)
        if role in _LINEAR:
            weight = self.file.weight(role, layer)
            op: Op = "head" if role == "head" else "linear"
            (x,) = given.values()
            return Linear(x, weight, self.file.bias(role, layer), weight.format != "dense", op)
        if role in NORMS:
            (x,) = given.values()
            return self._norm(role, layer, x, dtype)
        if role in ("rope_q", "rope_k"):
            (x,) = given.values()
            return self._rope(x, positions)
        if role == "attention":
            return self._attention(given, int(positions[0]))
        if role == "activation":
            return GatedActivation(given["gate"], given["up"], self.configuration.activation)
        if role in ("residual", "block"):
            one, other = given.values()
            return Sum(one, other)
        return Copied(given["head"])

    def _embedding(self, tokens: NDArray[np.int64], dtype: str) -> Operation:
        weight, factor = self.file.weight("embedding", None), self.configuration.embedding_scale
        if weight.format != "dense":
            if factor != 1.0:
                raise OracleRefused(
                    "The embedding is quantised and multiplied by a constant, whose roundings are not known together. Judge what "
                    "follows it."
                )
            return Embedding(tokens, weight, True)
        rows = rounded(exact_weight(weight, tokens).astype(np.float32), dtype).astype(np.float64)
        return Copied(rows) if factor == 1.0 else ScaledEmbedding(rows, factor)

    def _norm(self, role: str, layer: int | None, x: Float64, dtype: str) -> Norm:
        found = self.file.norm(role, layer)
        if found is None:
            raise OracleRefused(
                f"The model's file {self.file.path} has no weight for {role}. Give the file that was loaded."
            )
        weight, stored = found
        if role in ("q_norm", "k_norm"):
            x = x.reshape(len(x), -1, self.configuration.head_width)
        # A weight that the dtype does not hold is rounded to it, and what is added to one is too.
        unit = UNIT[dtype] if self.configuration.norm_offset or UNIT[stored] < UNIT[dtype] else 0.0
        return Norm(x, float(np.float32(self.configuration.eps)), "rms", weight, weight_unit=unit)

    def _rope(self, x: Float64, positions: NDArray[np.int64]) -> Rope:
        config = self.configuration
        divisors = config.rope_divisors
        return Rope(
            x.reshape(len(x), -1, config.head_width),
            positions.astype(np.float64),
            config.rope_width,
            base=config.rope_base,
            scale=config.rope_scale,
            divisors=None if divisors is None else np.array(divisors),
        )

    def _attention(self, given: Fed, position: int) -> AttentionOperation:
        config = self.configuration
        keys, values = (
            given[name].reshape(position + 1, config.kv_heads, config.head_width).swapaxes(0, 1)
            for name in ("rope_k", "v")
        )
        bias = np.zeros((1, 1, position + 1))
        query = given["rope_q"].reshape(1, config.heads, config.head_width)
        return AttentionOperation(query, keys, values, config.attention_scale, bias)


SAMPLED: Final = 64
"""Rows of each weight by which two files are compared."""


def files_apart(a: LlamaDecoder, b: LlamaDecoder) -> str:
    """What two models' files say differently, in a clause: a setting, or a weight by more than its dtype's rounding."""
    if a.file.path == b.file.path:
        return ""
    one, other = vars(a.configuration), vars(b.configuration)
    # The same checkpoint may be of another type, and hold its norms' weights less one.
    for name in one.keys() - {"model_type", "unknown", "norm_offset", "tied"}:
        if not _alike(one[name], other[name]):
            return f"the models' files differ: {name} is {one[name]} in a and {other[name]} in b"
    for key in a.keys():
        apart = _weights_apart(a, b, key)
        if apart:
            return f"the models' files differ: {apart}"
    return ""


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        # A file may hold its settings in float32.
        return bool(abs(a - b) <= 1e-6 * max(abs(a), abs(b)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)


def _weights_apart(a: LlamaDecoder, b: LlamaDecoder, key: Key) -> str:
    role, layer = key
    if role not in WEIGHTS:
        return ""
    if role in NORMS:
        found = [each.file.norm(role, layer) for each in (a, b)]
        if None in found:
            return "" if found[0] is found[1] else f"only one has a weight for {named(key)}"
        (x, dtype_x), (y, dtype_y) = (each for each in found if each is not None)
        room = 2 * max(UNIT[dtype_x], UNIT[dtype_y]) * (1 + np.maximum(np.abs(x), np.abs(y)))
    else:
        one, other = a.file.weight(role, layer), b.file.weight(role, layer)
        if (one.n, one.k) != (other.n, other.k):
            return f"the weight of {named(key)} is {one.n} by {one.k} in a and {other.n} by {other.k} in b"
        rows = np.unique(np.linspace(0, one.n - 1, SAMPLED).astype(np.int64))
        x, y = exact_weight(one, rows), exact_weight(other, rows)
        unit = max(UNIT.get(getattr(each, "dtype", ""), UNIT["bfloat16"]) for each in (one, other))
        room = 2 * unit * np.maximum(np.abs(x), np.abs(y)) + 2.0**-24
    return "" if (np.abs(x - y) <= room).all() else f"the weights of {named(key)} are not the same numbers"
