"""Operands for the oracle's tests: weights of every format, inputs that are ordinary and inputs that hurt."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff_kernels import Affine, Blocks, Dense, Weight
from detdiff_kernels.rounding import narrow, rounded
from detdiff_kernels.weights import BLOCKS

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

DTYPES = ("float32", "float16", "bfloat16")
MX = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
BITS = (2, 3, 4, 5, 6, 8)


def given(array: Float32, dtype: str) -> mx.array:
    return mx.array(array).astype(MX[dtype])


def read(array: mx.array) -> Float64:
    """An MLX array's numbers, widened."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, kind: str = "normal") -> Float32:
    """Values of ``dtype``: normal, of a wide range, in pairs that cancel, or near the smallest numbers."""
    values = rng.standard_normal(shape)
    if kind == "wide":
        values = values * np.exp2(rng.integers(-10, 6, shape))
    elif kind == "cancelling":
        half = shape[-1] // 2
        values[..., half : 2 * half] = -values[..., :half] * (
            1 + 2.0**-6 * rng.integers(0, 2, (*shape[:-1], half))
        )
    elif kind == "subnormal":
        values = values * {"float32": 2.0**-128, "float16": 2.0**-18, "bfloat16": 2.0**-128}[dtype]
    return rounded(values.astype(np.float32), dtype)


def dense(values: Float32, dtype: str) -> Dense:
    return Dense(narrow(np.ascontiguousarray(values), dtype), dtype)


def quantised(values: Float32, bits: int, group_size: int, dtype: str) -> Affine:
    packed, scales, biases = mx.quantize(mx.array(values), group_size=group_size, bits=bits)
    held = [np.array(a.astype(MX[dtype]).astype(mx.float32)) for a in (scales, biases)]
    return Affine(np.array(packed), held[0], held[1], bits, group_size)


def blocks(rng: np.random.Generator, kind: str, n: int, k: int) -> Blocks:
    """Random codes and inner scales; the float16 scales are small and positive."""
    items, size = BLOCKS[kind]
    raw = rng.integers(0, 256, (n, k // items, size), dtype=np.uint8)
    for at in {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
        scale = rng.uniform(1e-5, 0.02, (n, k // items)).astype(np.float16)
        raw[:, :, at : at + 2] = scale[:, :, None].view(np.uint8)
    return Blocks(kind, raw.reshape(n, -1))


def weights(rng: np.random.Generator, n: int, k: int, dtype: str, kind: str = "normal") -> dict[str, Weight]:
    """A weight of every format that rows of ``k`` items allow; scales of the affine ones are values of ``dtype``."""
    values = rows(rng, (n, k), dtype, kind)
    found: dict[str, Weight] = {"dense": dense(values, dtype)}
    if kind != "normal":
        return found
    for bits in BITS:
        found[f"affine-{bits}"] = quantised(values, bits, 32 if bits % 2 else 64, dtype)
    centred = quantised(values, 4, 32, dtype)
    scales = np.abs(centred.scales)
    found["centred"] = Affine(centred.packed, scales, scales * np.float32(-8), 4, 32)
    for name in BLOCKS:
        if k % BLOCKS[name][0] == 0:
            found[name] = blocks(rng, name, n, k)
    return found


def widened(array: Any) -> Float64:
    return np.asarray(array, np.float64)
