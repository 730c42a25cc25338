"""Candle's Metal matmul kernels."""

from __future__ import annotations

from typing import Literal

from .block_kernel import (
    AFFINE_8_MV,
    HALF_CHAIN,
    Q4_K_MV,
    Q6_K_MV,
    Q8_0_MV,
    BlockKernel,
    affine_bits,
)
from .linear import Shape
from .order import Order, Walk, lanes_of

_CANDLE = "huggingface/candle 072f607 candle-metal-kernels/src/metal_src/"
_GEMV = Order(lanes_of(32, 4), halve=32, weight="float32")


def _nibbles(join: Literal["q4_0_pairs", "q4_1_pairs"]) -> Order:
    # Two lanes a block; both halves of a block's items in pairs. Inputs are divided by what the place of a code in its
    # 16 bits multiplies it with.
    return Order(
        Walk((16, 2, 2, 4, 2), lane=(0, 2), terms=(1, 3, 4)), join, "codes", 2, 8,
        prescale=(1, 256) * 4 + (16, 4096) * 4, halve=32,
    )  # fmt: skip


_Q4_1 = _nibbles("q4_1_pairs")
_MV = {
    "dense": _GEMV,
    "Q4_0": _nibbles("q4_0_pairs"),
    "Q4_1": _Q4_1,
    "Q8_0": Q8_0_MV,
    "Q4_K": Q4_K_MV,
    "Q6_K": Q6_K_MV,
}


def _mv(shape: Shape) -> Order | None:
    if shape.format == "affine":
        # No block format has other widths: their numbers go through the dense kernel.
        return {4: _Q4_1, 8: AFFINE_8_MV}.get(affine_bits(shape) or 0, _GEMV)
    return _MV[shape.format]


def _mm(shape: Shape) -> Order | None:
    return HALF_CHAIN


LINEAR = (
    BlockKernel(
        "candle-metal/mv",
        _mv,
        f"{_CANDLE}quantized.metal mul_vec_q_n_f32_impl, block_q_n_dot_y, kernel_mul_mv_{{q8_0,q4_K,q6_K}}_f32_impl (lanes, "
        "order and scales read; which products are fused and the tree inside simd_sum inferred); dense: gemv.metal "
        "GEMVKernel::run with 32 lanes of 4 values; an affine weight of 8 bits with any bias is Q8_0 with a minimum, of "
        "2, 3, 5 and 6 bits dense (inferred)",
        "inferred",
    ),
    BlockKernel(
        "candle-metal/mm",
        _mm,
        f"{_CANDLE}quantized.metal kernel_mul_mm, dequantize_*: half weights, float inputs, float sums (read); the order "
        "inside an 8-wide simdgroup MMA is not visible, an ascending chain stands for it; dense weights are rounded as "
        "quantised ones are, where Candle has a kernel of its own that leaves them in their dtype",
        "inferred",
    ),
)
