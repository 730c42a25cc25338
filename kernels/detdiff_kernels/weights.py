"""Weights as models hold them: dense, MLX's affine groups, GGUF blocks. Kernels unpack them in their own order.

Layouts of blocks from https://github.com/ggml-org/ggml/blob/d99724f/src/ggml-common.h, values from ``dequantize_row_*``
of src/ggml-quants.c there, and from ``dequantize_*`` of src/ggml-metal/ggml-metal.metal (all read).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BadOperand, UnsupportedFormat
from .rounding import Float32, rounded, widen

# Items and bytes of a block.
BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A quantised weight (n, k) taken apart.

    ``codes`` uint8 or int8 (n, k); for every ``size`` items one ``scale`` and, where the format has it, one ``minimum``,
    float32 (n, k / size). The K formats multiply these by whole numbers of their own for every ``inner`` items:
    ``scales`` and ``minima``, float32 (n, k / inner).
    """

    codes: NDArray[Any]
    size: int
    scale: Float32
    minimum: Float32 | None = None
    inner: int = 0
    scales: Float32 | None = None
    minima: Float32 | None = None


def unpacked(kind: str, raw: Bytes) -> Unpacked:
    """Takes rows of blocks apart; ``raw`` is uint8 (n, bytes of a row), the kind one of ``BLOCKS``."""
    return _UNPACK[kind](raw.reshape(len(raw), -1, BLOCKS[kind][1]))


def _halves(raw: Bytes, first: int) -> Float32:
    return np.ascontiguousarray(raw[:, :, first : first + 2]).view(np.float16)[:, :, 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The low nibbles of all bytes of the last axis, then the high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _q4_0(raw: Bytes) -> Unpacked:
    return Unpacked(_nibbles(raw[:, :, 2:]).reshape(len(raw), -1), 32, _halves(raw, 0))


def _q4_1(raw: Bytes) -> Unpacked:
    return Unpacked(_nibbles(raw[:, :, 4:]).reshape(len(raw), -1), 32, _halves(raw, 0), _halves(raw, 2))


def _q8_0(raw: Bytes) -> Unpacked:
    codes = np.ascontiguousarray(raw[:, :, 2:]).view(np.int8)
    return Unpacked(codes.reshape(len(raw), -1), 32, _halves(raw, 0))


def _q4_k(raw: Bytes) -> Unpacked:
    rows, blocks = raw.shape[:2]
    codes = _nibbles(raw[:, :, 16:].reshape(rows, blocks, 4, 32)).reshape(rows, -1)
    # Twelve bytes: the low six bits of eight of them are four scales and four minima; four more hold low nibbles of
    # the others, whose two highest bits are left over in the eight.
    first, second, last = raw[:, :, 4:8], raw[:, :, 8:12], raw[:, :, 12:16]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=2)
    minima = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=2)
    return Unpacked(
        codes, 256, _halves(raw, 0), _halves(raw, 2), 32,
        scales.reshape(rows, -1).astype(np.float32), minima.reshape(rows, -1).astype(np.float32),
    )  # fmt: skip


def _q6_k(raw: Bytes) -> Unpacked:
    rows, blocks = raw.shape[:2]
    low = _nibbles(raw[:, :, :128].reshape(rows, blocks, 2, 64)).reshape(rows, blocks, 2, 4, 32)
    high = raw[:, :, 128:192].reshape(rows, blocks, 2, 1, 32)
    bits = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    codes = (low | bits << np.uint8(4)).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(raw[:, :, 192:208]).view(np.int8).astype(np.float32)
    return Unpacked(
        codes.reshape(rows, -1), 256, _halves(raw, 208), None, 16, scales.reshape(rows, -1)
    )  # fmt: skip


_UNPACK: dict[str, Callable[[Bytes], Unpacked]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip


def signed(kind: str, parts: Unpacked) -> NDArray[Any]:
    """The codes, those of Q4_0 less 8."""
    return parts.codes.view(np.int8) - np.int8(8) if kind == "Q4_0" else parts.codes


def dequantised(kind: str, parts: Unpacked) -> Float32:
    """The numbers (n, k) that blocks stand for; whole products are exact, so each is rounded once."""
    codes = signed(kind, parts).astype(np.float32)
    with np.errstate(all="ignore"):
        return _shifted(codes, parts, parts.scale)


def metal_dequantised(kind: str, parts: Unpacked) -> Float32:
    """What ggml's Metal code makes of blocks: where a code is the upper half of a byte it stays there, and the scale is
    divided by 16 for it in float16, which loses bits below 2^-10; -8 times a scale of Q4_0 overflows in float16."""
    if kind in ("Q8_0", "Q6_K"):
        return dequantised(kind, parts)
    codes, scale = parts.codes.astype(np.float32), parts.scale
    upper = np.arange(parts.codes.shape[1]) // (16 if kind != "Q4_K" else 32) % 2 == 1
    with np.errstate(all="ignore"):
        minimum = rounded(scale * np.float32(-8), "float16") if kind == "Q4_0" else parts.minimum
        whole = Unpacked(parts.codes, parts.size, scale, minimum, parts.inner, parts.scales, parts.minima)
        divided = rounded(scale / np.float32(16), "float16")
        lower_values = _shifted(codes, whole, scale)
        return np.where(upper, _shifted(codes * np.float32(16), whole, divided), lower_values)


def _shifted(codes: Float32, parts: Unpacked, scale: Float32) -> Float32:
    values = codes.reshape(*scale.shape, -1) * _each(scale, parts.scales)
    if parts.minimum is not None:
        sign = np.float32(1 if parts.minima is None else -1)
        values = values + sign * _each(parts.minimum, parts.minima)
    return values.reshape(len(codes), -1)


def _each(outer: Float32, inner: Float32 | None) -> Float32:
    """What multiplies every item of a block, (n, blocks, 1 or items)."""
    if inner is None:
        return outer[:, :, None]
    products = outer[:, :, None] * inner.reshape(*outer.shape, -1)
    return np.repeat(products, 256 // products.shape[2], axis=2)


AFFINE_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, eq=False)
class Dense:
    """A weight (n, k). ``data`` is float32, float16, or uint16 that holds bfloat16 bits; ``dtype`` says which.

    Raises BadOperand for another dtype or rank, and for an empty weight.
    """

    data: NDArray[Any]
    dtype: str = "float32"

    format = "dense"
    bits = None
    group_size = None

    def __post_init__(self) -> None:
        holds = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}.get(self.dtype)
        if holds is None or self.data.dtype != holds or self.data.ndim != 2 or not self.data.size:
            raise BadOperand(
                f"A dense weight of dtype {self.dtype!r} was given an array of {self.data.dtype} and shape "
                f"{self.data.shape}; expected shape (outputs, inputs), both at least 1, in float32, float16, or "
                "uint16 with the bits of bfloat16. Convert the weight first."
            )

    @property
    def n(self) -> int:
        return int(self.data.shape[0])

    @property
    def k(self) -> int:
        return int(self.data.shape[1])

    def part(self, first: int, last: int) -> Dense:
        """Outputs ``first`` to ``last - 1``, not copied."""
        return Dense(self.data[first:last], self.dtype)

    def floats(self) -> Float32:
        """The weight as float32 (n, k), exactly; no copy where it is float32 already."""
        return self.data if self.dtype == "float32" else widen(self.data, self.dtype)


@dataclass(frozen=True, eq=False)
class Affine:
    """MLX's affine quantisation: w = scale * code + bias, one scale and bias per ``group_size`` items of a row.

    ``packed`` uint32 (n, k * bits / 32) holds the codes with the first one lowest, without gaps; ``scales`` and
    ``biases`` are float32 (n, k / group_size). Raises UnsupportedFormat for other bits and BadOperand for arrays
    that do not fit each other.
    """

    packed: NDArray[np.uint32]
    scales: Float32
    biases: Float32
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in AFFINE_BITS:
            raise UnsupportedFormat(
                f"A weight is quantised to {self.bits} bits; expected one of {', '.join(map(str, AFFINE_BITS))}. "
                "Quantise it to one of these, or run it native."
            )
        fits = self.packed.dtype == np.uint32 and self.packed.ndim == 2 and self.packed.size
        n, words = self.packed.shape if self.packed.ndim == 2 else (0, 0)
        k = words * 32 // self.bits
        groups = (n, k // self.group_size) if self.group_size > 0 else ()
        exact = self.group_size > 0 and words * 32 % self.bits == 0 and k % self.group_size == 0
        if not (fits and exact and self.scales.shape == self.biases.shape == groups):
            raise BadOperand(
                f"A {self.bits}-bit weight has packed codes {self.packed.dtype} {self.packed.shape}, scales "
                f"{self.scales.shape} and biases {self.biases.shape} for groups of {self.group_size}; expected uint32 "
                "(n, k * bits / 32) and (n, k / group size) twice, and k divisible by the group size. Quantise it again."
            )
        if not self.scales.dtype == self.biases.dtype == np.float32:
            raise BadOperand(
                f"Scales of {self.scales.dtype} and biases of {self.biases.dtype} were given; expected float32. "
                "Convert them, which is exact for float16 and bfloat16."
            )

    @property
    def format(self) -> str:
        return "affine"

    @property
    def n(self) -> int:
        return int(self.packed.shape[0])

    @property
    def k(self) -> int:
        return int(self.packed.shape[1] * 32 // self.bits)

    def part(self, first: int, last: int) -> Affine:
        """Outputs ``first`` to ``last - 1``, not copied."""
        rows = slice(first, last)
        return replace(self, packed=self.packed[rows], scales=self.scales[rows], biases=self.biases[rows])

    def as_blocks(self) -> Affine:
        """The weight as ggml's kernels see it: ``Centred`` if its biases say what Q4_0 and Q8_0 imply, else itself."""
        middle = {4: 8, 8: 128}.get(self.bits)
        if middle is None or self.group_size != 32:
            return self
        with np.errstate(over="ignore"):
            if not np.array_equal(self.biases, self.scales * np.float32(-middle)):
                return self
        return Centred(self.packed, self.scales, self.biases, self.bits, self.group_size)

    def unpacked(self) -> Unpacked:
        """The codes with their scales and biases."""
        return Unpacked(self.codes(), self.group_size, self.scales, self.biases)

    def codes(self) -> NDArray[np.uint8]:
        """The codes, uint8 (n, k)."""
        if self.bits in (2, 4, 8):
            return _small_codes(self.packed, self.bits)
        # 8 codes take `bits` whole bytes.
        octets = self.packed.view(np.uint8).reshape(self.n, -1, self.bits).astype(np.uint64)
        shifts = np.arange(self.bits, dtype=np.uint64) * np.uint64(8)
        joined = np.bitwise_or.reduce(octets << shifts, axis=2)
        places = np.arange(8, dtype=np.uint64) * np.uint64(self.bits)
        found = joined[:, :, None] >> places & np.uint64((1 << self.bits) - 1)
        codes: NDArray[np.uint8] = found.astype(np.uint8).reshape(self.n, self.k)
        return codes

    def floats(self) -> Float32:
        """scale * code + bias with one rounding to float32, (n, k)."""
        from .loops import affine_loop  # numba takes most of a second to import

        out = np.empty(self.n * self.k, np.float32)
        flat = (np.ascontiguousarray(array).reshape(-1) for array in (self.codes(), self.scales, self.biases))
        affine_loop()(*flat, out, self.group_size)
        return out.reshape(self.n, self.k)


@dataclass(frozen=True, eq=False)
class Centred(Affine):
    """An affine weight that is a Q4_0 or Q8_0 one: groups of 32, each bias -8 or -128 times the scale."""

    @property
    def format(self) -> str:
        return f"Q{self.bits}_0"

    def unpacked(self) -> Unpacked:
        """The codes as these formats have them, signed ones for Q8_0."""
        codes = self.codes()
        if self.bits == 8:
            return Unpacked((codes ^ np.uint8(0x80)).view(np.int8), 32, self.scales)
        return Unpacked(codes, 32, self.scales)


def _small_codes(packed: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    octets: NDArray[np.uint8] = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return octets
    places = np.arange(0, 8, bits, dtype=np.uint8)
    found: NDArray[np.uint8] = (octets[:, :, None] >> places & np.uint8((1 << bits) - 1)).reshape(
        len(octets), -1
    )
    return found


@dataclass(frozen=True, eq=False)
class Blocks:
    """Rows of GGUF blocks as they lie in the file: ``raw`` uint8 (n, bytes of a row).

    Raises UnsupportedFormat for a kind that is not in ``BLOCKS`` and BadOperand for rows that are not whole blocks.
    """

    kind: str
    raw: NDArray[np.uint8]

    def __post_init__(self) -> None:
        if self.kind not in BLOCKS:
            raise UnsupportedFormat(
                f"A weight has blocks of kind {self.kind!r}; expected one of {', '.join(BLOCKS)}. Dequantise it, or "
                "run it native."
            )
        size = BLOCKS[self.kind][1]
        if self.raw.dtype != np.uint8 or self.raw.ndim != 2 or not self.raw.size or self.raw.shape[1] % size:
            raise BadOperand(
                f"A {self.kind} weight was given {self.raw.dtype} of shape {self.raw.shape}; expected uint8 (n, bytes) "
                f"with rows of whole {size}-byte blocks. Cut the rows where the file does."
            )

    @property
    def format(self) -> str:
        return self.kind

    @property
    def bits(self) -> int:
        return int(self.kind[1])

    @property
    def group_size(self) -> int:
        return BLOCKS[self.kind][0]

    @property
    def n(self) -> int:
        return int(self.raw.shape[0])

    @property
    def k(self) -> int:
        items, size = BLOCKS[self.kind]
        return int(self.raw.shape[1] // size * items)

    def part(self, first: int, last: int) -> Blocks:
        """Outputs ``first`` to ``last - 1``, not copied."""
        return Blocks(self.kind, self.raw[first:last])

    def unpacked(self) -> Unpacked:
        """The codes with what multiplies them."""
        return unpacked(self.kind, self.raw)

    def floats(self) -> Float32:
        """The weight as float32 (n, k), each value rounded once."""
        return dequantised(self.kind, self.unpacked())


Weight = Dense | Affine | Blocks
