"""What an order multiplies: the numbers or codes of a weight, and the coefficients of its units."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import Unpacked, metal_dequantised, signed
from .joins import JOINS
from .order import Order
from .rounding import Float32, narrow, rounded
from .weights import Affine, Blocks, Dense, Weight

# Joins whose coefficients are whole numbers of the K formats first, and how many of them are scales.
_INNER = {"q4_k": 4, "q6_k": 4, "q8_1_k": 2, "q8_1_scales": 2, "tile_scales": 8}


def terms_of(weight: Weight, order: Order, dtype: str) -> tuple[NDArray[Any], str]:
    """What the terms of ``order`` multiply, (n, k), and its kind: uint8 or int8 codes, or a dtype."""
    if order.weight in ("codes", "signed", "places"):
        return _codes_of(weight, order.weight)
    if order.weight in ("dtype_twice", "dtype_in_place"):
        return narrow(_twice_rounded(weight, dtype, order.weight == "dtype_in_place"), dtype), dtype
    kind = dtype if order.weight == "dtype" else order.weight.removeprefix("metal_")
    if isinstance(weight, Dense) and weight.dtype == kind:
        return weight.data, kind
    if isinstance(weight, Blocks) and order.weight.startswith("metal_"):
        return narrow(metal_dequantised(weight.kind, weight.unpacked()), kind), kind
    return narrow(weight.floats(), kind), kind


def _codes_of(weight: Weight, form: str) -> tuple[NDArray[Any], str]:
    assert not isinstance(weight, Dense)
    codes = weight.unpacked().codes
    if form == "signed":
        codes = signed(weight.format, weight.unpacked())
    elif form == "places":
        # Four neighbours of 16 bits: the low nibbles of two bytes, and the high ones 32 items further on.
        item = np.arange(weight.k)
        places = np.array([1, 256, 16, 4096], np.float16)[item % 2 + item // 32 % 2 * 2]
        return codes * places, "float16"
    return codes, str(codes.dtype)


def _twice_rounded(weight: Weight, dtype: str, in_place: bool) -> Float32:
    """scale * code rounded to ``dtype``, plus the bias rounded again; one rounding in float32.

    ``in_place``: a code of 2 or 4 bits is not shifted down, and its scale is divided for it first, in ``dtype``.
    """
    if not isinstance(weight, Affine) or dtype == "float32":
        return weight.floats()
    shape = (weight.n, -1, weight.group_size)
    scales = weight.scales[:, :, None]
    # Infinite scales are ordinary operands here.
    with np.errstate(all="ignore"):
        if in_place and weight.bits in (2, 4):
            places = np.exp2(np.arange(weight.group_size) * weight.bits % 8).astype(np.float32)
            scales = rounded(scales / places, dtype) * places
        products = rounded(weight.codes().reshape(shape) * scales, dtype)
        return rounded(products + weight.biases[:, :, None], dtype).reshape(weight.n, weight.k)


def coefficients_of(weight: Weight, join: str, firsts: NDArray[np.int64]) -> Float32:
    """The coefficients of units whose accumulators begin with the items ``firsts`` (units, accumulators), -1 where there
    is none: (n, units, coefficients). A unit without items gets such that leave a total as it is, -0.0 too."""
    assert not isinstance(weight, Dense)
    parts = weight.unpacked()
    item = np.maximum(firsts, 0)
    block = item[:, 0] // parts.size
    if join == "tile_min" and parts.scales is not None:
        found = _half_products(parts, item[:, 0])
    else:
        found = [parts.scale[:, block]]
        if parts.minimum is not None:
            found.append(parts.minimum[:, block])
        if join in _INNER and parts.scales is not None:
            sub = item[:, :: JOINS[join].accumulators // _INNER[join]] // parts.inner
            inner = [parts.scales] if parts.minima is None else [parts.scales, parts.minima]
            found = [array[:, sub[:, nth]] for array in inner for nth in range(sub.shape[1])] + found
    stacked: Float32 = np.stack(found[: JOINS[join].coefficients], axis=2)
    return np.where(firsts[:, :1] >= 0, stacked, _neutral(join))


def _half_products(parts: Unpacked, item: NDArray[np.int64]) -> list[Float32]:
    """Scale and minimum of Q4_K's sub-blocks as CUDA's tiles hold them, in float16."""
    assert parts.scales is not None and parts.minima is not None and parts.minimum is not None
    block, sub = item // parts.size, item // parts.inner
    with np.errstate(over="ignore", invalid="ignore"):
        scale = parts.scale[:, block] * parts.scales[:, sub]
        minimum = -parts.minimum[:, block] * parts.minima[:, sub]
    return [rounded(scale, "float16"), rounded(minimum, "float16")]


def _neutral(join: str) -> Float32:
    count = JOINS[join].coefficients
    if join == "affine":
        # Kernels that run over a row's end add zeros there.
        return np.zeros(count, np.float32)
    if join in _INNER:
        scale = count - (2 if join in ("q4_k", "q8_1_k") else 1)
        return np.where(np.arange(count) == scale, np.float32(-0.0), np.float32(0))
    return np.full(count, -0.0, np.float32)
