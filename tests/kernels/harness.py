"""What the truth tests of kernels share: scalar arithmetic that owes the library nothing, and operands that hurt.

Equality is of bits, except that a NaN equals a NaN: which payload an FMA passes on is not part of an order.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiers import THOROUGH

from detdiff_kernels import Affine, Dense, Kernel, Weight, kernel

Float32 = NDArray[np.float32]
Codes = NDArray[np.int64]

DTYPES = ("float32", "float16", "bfloat16")
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)

fma = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
fma.restype = ctypes.c_float
fma.argtypes = [ctypes.c_float] * 3
"""``fma(a, b, c)`` of float32 values, rounded once."""


def f32(value: float) -> float:
    """A double rounded to float32.

    A sum, difference, product or quotient of two float32 values that was computed in double precision becomes what
    float32 arithmetic gives: 53 bits are more than twice 24, so rounding twice does no harm.
    """
    return ctypes.c_float(value).value


def f16(value: float) -> float:
    """A value rounded to float16; what is too large becomes infinite."""
    try:
        return float(struct.unpack("e", struct.pack("e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def bf16(value: float) -> float:
    """A float32 value, or the sum of two bfloat16 values, rounded to bfloat16."""
    value = f32(value)
    if value != value:
        return value
    (bits,) = struct.unpack("I", struct.pack("f", value))
    high, low = bits >> 16, bits & 0xFFFF
    high += low > 0x8000 or (low == 0x8000 and high & 1 == 1)
    return float(struct.unpack("f", struct.pack("I", high << 16))[0])


ROUND: dict[str, Callable[[float], float]] = {"float32": f32, "float16": f16, "bfloat16": bf16}


def add(a: float, b: float) -> float:
    """a + b of float32 values in float32."""
    return f32(a + b)


def mul(a: float, b: float) -> float:
    """a * b of float32 values in float32."""
    return f32(a * b)


def fma_in(a: float, b: float, c: float, dtype: str) -> float:
    """a * b + c of values of ``dtype``, rounded once to ``dtype``."""
    if dtype == "float32":
        return float(fma(a, b, c))
    product = a * b
    total = product + c
    if dtype == "float16" or not math.isfinite(total):
        # 53 bits reach from any sum that float16 can hold down to the last bit of its smallest product.
        return ROUND[dtype](total)
    back = total - product
    lost = (product - (total - back)) + (c - back)
    near = f32(total)
    rest = (total - near) + lost if math.isfinite(near) else 0.0
    (bits,) = struct.unpack("I", struct.pack("f", near))
    if rest and not bits & 1:
        # Rounded to odd in float32: the second rounding then sees on which side of a tie the sum lies.
        near = float(np.nextafter(np.float32(near), np.float32(math.copysign(math.inf, rest))))
    return bf16(near)


def tree(sums: list[float], narrow: Callable[[float], float] = f32) -> float:
    """Pairwise halving: lane l takes l + half, then l + a quarter, and so on; every sum is rounded by ``narrow``."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [narrow(low + high) for low, high in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def rounded(values: Float32, dtype: str) -> Float32:
    """An array rounded to a dtype, one scalar at a time."""
    if dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    narrow = ROUND[dtype]
    return np.array([narrow(value) for value in values.ravel().tolist()], np.float32).reshape(values.shape)


def linear(name: str) -> Kernel:
    """The linear kernel of that name."""
    chosen = kernel(name)
    assert isinstance(chosen, Kernel)
    return chosen


def differing(a: Float32, b: Float32) -> int:
    """How many elements differ in bits, NaN against NaN not counted."""
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return int(((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))).sum())


def normals(*shape: int, seed: int = 0, dtype: str = "float32") -> Float32:
    return rounded(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def unaligned(array: Float32) -> Float32:
    """The same values at an odd address, as a mapped file may have them."""
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw.view(np.float32).reshape(array.shape)


def dense(values: Float32, dtype: str) -> Dense:
    """A dense weight of float32 values that the dtype can hold."""
    if dtype == "float16":
        return Dense(values.astype(np.float16), dtype)
    if dtype == "bfloat16":
        return Dense((values.view(np.uint32) >> 16).astype(np.uint16), dtype)
    return Dense(values, dtype)


def packed(codes: Codes, bits: int) -> NDArray[np.uint32]:
    """Codes (n, k) as MLX packs them: row by row one long little-endian number, the first code lowest."""
    size = codes.shape[1] * bits // 8
    rows = []
    for row in codes.tolist():
        number = sum(code << place * bits for place, code in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(size, "little"), "<u4"))
    return np.ascontiguousarray(rows, np.uint32)


def affine(codes: Codes, scales: Float32, biases: Float32, bits: int) -> Affine:
    return Affine(packed(codes, bits), scales, biases, bits, codes.shape[1] // scales.shape[1])


def random_affine(
    n: int, k: int, bits: int, group_size: int, dtype: str, seed: int = 0, size: float = 1.0
) -> Affine:
    """An affine weight with scales and biases like those of a trained model, times ``size``."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (n, k))
    scales = (rng.uniform(0.01, 0.1, (n, k // group_size)) * size).astype(np.float32)
    middle = np.float32((1 << bits) / 2) * scales
    biases = -middle * rng.uniform(0.9, 1.1, scales.shape).astype(np.float32)
    return affine(codes, rounded(scales, dtype), rounded(biases, dtype), bits)


@dataclass(frozen=True, eq=False)
class Case:
    """Operands of one call: x (m, k) and a weight, all of them values of ``dtype``."""

    x: Float32
    weight: Weight
    dtype: str

    def __repr__(self) -> str:
        weight = self.weight
        width = f"{weight.bits} bits, groups of {weight.group_size}" if weight.bits else "dense"
        return f"<x {self.x.shape}, weight ({weight.n}, {weight.k}) {width}, {self.dtype}>"


# Where halves, floats and sums change their behaviour: zeros, smallest and largest numbers, ties.
EDGES = [
    0.0, 1.0, 1.5, 2.0**-149, 2.0**-133, 2.0**-126, 3.4028235e38, 65504.0, 65519.0, 65520.0, 1e5, 2.0**-24, 2.0**-25,
    1 + 2.0**-11, 1 + 2.0**-8, 2.0**-14, 2.0**-100,
]  # fmt: skip
# Kernels that leave a code where it lies in its word divide inputs and scales for it: what overflows or underflows
# on that way alone is not the library's to say.
INPUT_EDGES = [min(edge, 2.0**118) for edge in EDGES]
SCALE_EDGES = [edge for edge in EDGES if edge == 0 or edge > 2.0**-120]
SPECIALS = [math.inf, math.nan]


def _values(draw: st.DrawFn, rows: int, k: int, dtype: str, edges_of: list[float]) -> Float32:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    palette = np.array(edges_of + draw(st.sampled_from([[], SPECIALS])), np.float32)
    share_of_edges = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    values = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-12, 12, (rows, k)))
    signs = rng.choice(np.array([-1, 1], np.float32), (rows, k))
    edges = palette[rng.integers(0, len(palette), (rows, k))] * signs
    chosen = np.where(rng.random((rows, k)) < share_of_edges, edges, values)
    return rounded(chosen.astype(np.float32), dtype)


def _shape(draw: st.DrawFn, k: int, most: int) -> tuple[int, int]:
    """m and n, with m * n * k not far above ``most``: scalar statements take a microsecond a term."""
    if not THOROUGH:
        most //= 3
    # Long rows are few, for the same reason.
    m = draw(st.integers(1, max(3 if THOROUGH else 2, min(9, most // k))))
    return m, draw(st.integers(1, max(1, min(70, most // (m * k)))))


@st.composite
def dense_cases(draw: st.DrawFn, widths: st.SearchStrategy[int] | None = None, most: int = 3000) -> Case:
    """x (m, k) and a dense w (n, k): random normals with edges, or specials, or cancelling pairs among them."""
    dtype = draw(st.sampled_from(DTYPES))
    k = draw(widths if widths is not None else st.integers(1, 300) | st.integers(900, 1100))
    m, n = _shape(draw, k, most)
    x, w = _values(draw, m, k, dtype, EDGES), _values(draw, n, k, dtype, EDGES)
    if draw(st.booleans()):
        w[:, k // 2 : k // 2 * 2] = w[:, : k // 2]
        x[:, k // 2 : k // 2 * 2] = -x[:, : k // 2]
    return Case(x, dense(w, dtype), dtype)


@st.composite
def affine_cases(
    draw: st.DrawFn,
    widths: st.SearchStrategy[int] | None = None,
    bits: tuple[int, ...] = BITS,
    most: int = 3000,
) -> Case:
    """x (m, k) and an affine weight whose scales and biases are like a model's, or edges, or specials.

    ``widths`` are drawn and rounded up to whole groups.
    """
    dtype, width = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(bits))
    group_size = draw(st.sampled_from(GROUPS))
    k = draw(widths if widths is not None else st.integers(1, 300) | st.integers(900, 1100))
    k = -(-k // group_size) * group_size
    m, n = _shape(draw, k, most)
    x = _values(draw, m, k, dtype, INPUT_EDGES)
    if draw(st.booleans()):
        weight = random_affine(n, k, width, group_size, dtype, draw(st.integers(0, 2**32 - 1)))
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        codes = rng.integers(0, 1 << width, (n, k))
        scales, biases = (_values(draw, n, k // group_size, dtype, SCALE_EDGES) for _ in range(2))
        weight = affine(codes, scales, biases, width)
    return Case(x, weight, dtype)
