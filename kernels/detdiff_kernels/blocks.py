"""GGUF blocks taken apart: codes, scales and minima, and the numbers they stand for.

Layouts from https://github.com/ggml-org/ggml/blob/d99724f/src/ggml-common.h, values from ``dequantize_row_*`` of
src/ggml-quants.c there, and from ``dequantize_*`` of src/ggml-metal/ggml-metal.metal (all read).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rounding import Float32, rounded

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
