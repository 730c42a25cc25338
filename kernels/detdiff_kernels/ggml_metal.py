"""ggml's Metal matmul kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from .block_kernel import AFFINE_8_MV, HALF_CHAIN, Q4_K_MV, Q6_K_MV, Q8_0_MV, BlockKernel, affine_bits
from .grouped_walk import Grouped, grouped
from .linear import Shape
from .order import IN_ORDER, Order, Walk, lanes_of

_GGML = "ggml-org/ggml 166c4e1 src/ggml-metal/ggml-metal.metal"


def _nibbles(join: Literal["q4_0", "q4_1"]) -> Order:
    # Two lanes a block; four sums, of even and odd items of both halves.
    return Order(
        Walk((16, 2, 2, 4, 2), lane=(0, 2), terms=(1, 4, 3)), join, "codes", 4, 4,
        prescale=(1,) * 4 + (256,) * 4 + (16,) * 4 + (4096,) * 4, halve=32,
    )  # fmt: skip


# Four simdgroups share a row of Q8_0 blocks.
_FOUR = Grouped((4, 8, 4, 8), lane=(0, 1, 2), terms=(3,), groups=4)
_Q4_1 = _nibbles("q4_1")
_MV = {
    "Q4_0": _nibbles("q4_0"), "Q4_1": _Q4_1, "Q8_0": grouped(replace(Q8_0_MV, walk=_FOUR)), "Q4_K": Q4_K_MV,
    "Q6_K": Q6_K_MV,
}  # fmt: skip
_AFFINE = {4: _Q4_1, 8: grouped(replace(AFFINE_8_MV, walk=_FOUR))}


@lru_cache(maxsize=16)
def _dense(groups: int, fours: bool) -> Order:
    # Blocks of 32 items, two lanes a block with float4 and four without.
    unit = 16 if fours else 8
    axes = (groups, 16, 2, 16) if fours else (groups, 8, 4, 8)
    walk = Grouped(axes, (0, 1, 2), (3,), groups=groups, tail=32, unit=unit)
    order = Order(walk, "add", "float32", 4 if fours else 8, 4 if fours else 1)
    return replace(grouped(order), zeroed=True)


_SHORT = Order(IN_ORDER, weight="float32")


def _mv(shape: Shape) -> Order | None:
    if shape.format in _MV:
        return _MV[shape.format]
    if shape.format == "affine" and affine_bits(shape) in _AFFINE:
        return _AFFINE[affine_bits(shape) or 0]
    return _SHORT if shape.k < 32 else _dense(min(4, -(-shape.k // 128)), shape.k % 4 == 0)


@lru_cache(maxsize=8)
def _ext(lanes: int, values: int) -> Order:
    return Order(lanes_of(lanes, values), "add", "metal_float32", 4, values // 4, halve=lanes)


def _mv_ext(shape: Shape) -> Order | None:
    lanes = 16 if shape.k % 256 == 0 and shape.m < 3 else 8 if shape.k % 128 == 0 else 4
    return _ext(lanes, 16 if shape.format in ("Q4_K", "Q6_K") else 4)


_HALVES = replace(HALF_CHAIN, inputs="float16")
_BFLOATS = Order(IN_ORDER, weight="dtype")


def _mm(shape: Shape) -> Order | None:
    return _BFLOATS if shape.format == "dense" and shape.dtype == "bfloat16" else _HALVES


LINEAR = (
    BlockKernel(
        "ggml-metal/mv",
        _mv,
        f"{_GGML} mul_vec_q_n_f32_impl, block_q_n_dot_y, kernel_mul_mv_{{q8_0,q4_K,q6_K,t_t,t_t_4,t_t_short}}_f32_impl, "
        "helper_mv_reduce_and_write, ggml-metal-device.cpp ggml_metal_library_get_pipeline_mul_mv (read; which products "
        "are fused and the tree inside simd_sum inferred); an affine weight of 8 bits with any bias is Q8_0 with a "
        "minimum, of 2, 3, 5 and 6 bits dense (inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-metal/mv_ext",
        _mv_ext,
        f"{_GGML} kernel_mul_mv_ext_{{q4,q4x4}}_f32_impl, dequantize_*_t4, ggml-metal-ops.cpp ggml_metal_op_mul_mat (read; "
        "the order inside dot inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-metal/mm",
        _mm,
        f"{_GGML} kernel_mul_mm, dequantize_*: half weights and half inputs, of bfloat16 models bfloat16, float sums "
        "(read); the order inside an 8-wide simdgroup MMA is not visible, an ascending chain stands for it",
        "inferred",
    ),
)
