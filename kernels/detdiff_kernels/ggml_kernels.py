"""ggml's matmul kernels on Metal, CUDA (cuBLAS as far as it can be said) and the CPU, and Candle's, whose Metal code is
made from ggml's. All know ggml's block formats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from .linear import Kernel, LinearShape
from .order import IN_ORDER, Grouped, Inputs, Join, Order, Walk, WeightForm, grouped, lanes_of
from .rounding import Float32
from .staging import Staged
from .weights import Affine, Weight


@dataclass(frozen=True)
class BlockKernel(Kernel):
    """A kernel to which an affine weight that is Q4_0 or Q8_0 in disguise is one of these."""

    def stage(self, weight: Weight | Float32, dtype: str = "float32") -> Staged:
        held = (
            weight if isinstance(weight, np.ndarray) or not isinstance(weight, Affine) else weight.as_blocks()
        )
        return super().stage(held, dtype)


def affine_bits(shape: LinearShape) -> int | None:
    """The bits of an affine weight whose groups are whole blocks of 32; None for any other weight."""
    if shape.format != "affine" or shape.group_size is None or shape.group_size % 32:
        return None
    return shape.bits


# Superblocks of 256: lanes (superblock, iq, ir), of four sub-blocks each four neighbouring pairs; even items first.
Q4_K_MV = Order(
    Walk((4, 2, 2, 2, 4, 4, 2), lane=(0, 2, 4), terms=(1, 3, 6, 5)), "q4_k", "places", 4, 8, halve=32
)
# Lanes (ip, il, superblock); of four quarters of 128 items four neighbours each.
Q6_K_MV = Order(Walk((2, 2, 4, 8, 4), lane=(1, 3, 0), terms=(2, 4)), "q6_k", "codes", 4, 4, halve=32)
# Four lanes a block of 32, eight neighbours each.
Q8_0_MV = Order(Walk((32, 8)), "scale", "codes", 8, halve=32)
AFFINE_8_MV = Order(Walk((32, 8)), "affine", "codes", 8, sums=1, halve=32)
HALF_CHAIN = Order(IN_ORDER, weight="metal_float16")


_CANDLE_SOURCE = "huggingface/candle 072f607 candle-metal-kernels/src/metal_src/"
_CANDLE_GEMV = Order(lanes_of(32, 4), halve=32, weight="float32")


def _candle_nibbles(join: Literal["q4_0_pairs", "q4_1_pairs"]) -> Order:
    # Two lanes a block; both halves of a block's items in pairs. Inputs are divided by what the place of a code in its
    # 16 bits multiplies it with.
    return Order(
        Walk((16, 2, 2, 4, 2), lane=(0, 2), terms=(1, 3, 4)), join, "codes", 2, 8,
        prescale=(1, 256) * 4 + (16, 4096) * 4, halve=32,
    )  # fmt: skip


_CANDLE_Q4_1 = _candle_nibbles("q4_1_pairs")
_CANDLE_MV = {
    "dense": _CANDLE_GEMV,
    "Q4_0": _candle_nibbles("q4_0_pairs"),
    "Q4_1": _CANDLE_Q4_1,
    "Q8_0": Q8_0_MV,
    "Q4_K": Q4_K_MV,
    "Q6_K": Q6_K_MV,
}


def _candle_mv(shape: LinearShape) -> Order | None:
    if shape.format == "affine":
        # No block format has other widths: their numbers go through the dense kernel.
        return {4: _CANDLE_Q4_1, 8: AFFINE_8_MV}.get(affine_bits(shape) or 0, _CANDLE_GEMV)
    return _CANDLE_MV[shape.format]


def _candle_mm(shape: LinearShape) -> Order | None:
    return HALF_CHAIN


_CANDLE = (
    BlockKernel(
        "candle-metal/mv",
        _candle_mv,
        f"{_CANDLE_SOURCE}quantized.metal mul_vec_q_n_f32_impl, block_q_n_dot_y, kernel_mul_mv_{{q8_0,q4_K,q6_K}}_f32_impl (lanes, "
        "order and scales read; which products are fused and the tree inside simd_sum inferred); dense: gemv.metal "
        "GEMVKernel::run with 32 lanes of 4 values; an affine weight of 8 bits with any bias is Q8_0 with a minimum, of "
        "2, 3, 5 and 6 bits dense (inferred)",
        "inferred",
    ),
    BlockKernel(
        "candle-metal/mm",
        _candle_mm,
        f"{_CANDLE_SOURCE}quantized.metal kernel_mul_mm, dequantize_*: half weights, float inputs, float sums (read); the order "
        "inside an 8-wide simdgroup MMA is not visible, an ascending chain stands for it; dense weights are rounded as "
        "quantised ones are, where Candle has a kernel of its own that leaves them in their dtype",
        "inferred",
    ),
)


_METAL_SOURCE = "ggml-org/ggml 166c4e1 src/ggml-metal/ggml-metal.metal"


def _metal_nibbles(join: Literal["q4_0", "q4_1"]) -> Order:
    # Two lanes a block; four sums, of even and odd items of both halves.
    return Order(
        Walk((16, 2, 2, 4, 2), lane=(0, 2), terms=(1, 4, 3)), join, "codes", 4, 4,
        prescale=(1,) * 4 + (256,) * 4 + (16,) * 4 + (4096,) * 4, halve=32,
    )  # fmt: skip


# Four simdgroups share a row of Q8_0 blocks.
_METAL_FOUR = Grouped((4, 8, 4, 8), lane=(0, 1, 2), terms=(3,), groups=4)
_METAL_Q4_1 = _metal_nibbles("q4_1")
_METAL_MV = {
    "Q4_0": _metal_nibbles("q4_0"), "Q4_1": _METAL_Q4_1, "Q8_0": grouped(replace(Q8_0_MV, walk=_METAL_FOUR)), "Q4_K": Q4_K_MV,
    "Q6_K": Q6_K_MV,
}  # fmt: skip
_METAL_AFFINE = {4: _METAL_Q4_1, 8: grouped(replace(AFFINE_8_MV, walk=_METAL_FOUR))}


@lru_cache(maxsize=16)
def _metal_dense(groups: int, fours: bool) -> Order:
    # Blocks of 32 items, two lanes a block with float4 and four without.
    unit = 16 if fours else 8
    axes = (groups, 16, 2, 16) if fours else (groups, 8, 4, 8)
    walk = Grouped(axes, (0, 1, 2), (3,), groups=groups, tail=32, unit=unit)
    order = Order(walk, "add", "float32", 4 if fours else 8, 4 if fours else 1)
    return replace(grouped(order), zeroed=True)


_METAL_SHORT = Order(IN_ORDER, weight="float32")


def _metal_mv(shape: LinearShape) -> Order | None:
    if shape.format in _METAL_MV:
        return _METAL_MV[shape.format]
    if shape.format == "affine" and affine_bits(shape) in _METAL_AFFINE:
        return _METAL_AFFINE[affine_bits(shape) or 0]
    return _METAL_SHORT if shape.k < 32 else _metal_dense(min(4, -(-shape.k // 128)), shape.k % 4 == 0)


@lru_cache(maxsize=8)
def _metal_ext(lanes: int, values: int) -> Order:
    return Order(lanes_of(lanes, values), "add", "metal_float32", 4, values // 4, halve=lanes)


def _metal_mv_ext(shape: LinearShape) -> Order | None:
    lanes = 16 if shape.k % 256 == 0 and shape.m < 3 else 8 if shape.k % 128 == 0 else 4
    return _metal_ext(lanes, 16 if shape.format in ("Q4_K", "Q6_K") else 4)


_METAL_HALVES = replace(HALF_CHAIN, inputs="float16")
_METAL_BFLOATS = Order(IN_ORDER, weight="dtype")


def _metal_mm(shape: LinearShape) -> Order | None:
    return _METAL_BFLOATS if shape.format == "dense" and shape.dtype == "bfloat16" else _METAL_HALVES


_METAL = (
    BlockKernel(
        "ggml-metal/mv",
        _metal_mv,
        f"{_METAL_SOURCE} mul_vec_q_n_f32_impl, block_q_n_dot_y, kernel_mul_mv_{{q8_0,q4_K,q6_K,t_t,t_t_4,t_t_short}}_f32_impl, "
        "helper_mv_reduce_and_write, ggml-metal-device.cpp ggml_metal_library_get_pipeline_mul_mv (read; which products "
        "are fused and the tree inside simd_sum inferred); an affine weight of 8 bits with any bias is Q8_0 with a "
        "minimum, of 2, 3, 5 and 6 bits dense (inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-metal/mv_ext",
        _metal_mv_ext,
        f"{_METAL_SOURCE} kernel_mul_mv_ext_{{q4,q4x4}}_f32_impl, dequantize_*_t4, ggml-metal-ops.cpp ggml_metal_op_mul_mat (read; "
        "the order inside dot inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-metal/mm",
        _metal_mm,
        f"{_METAL_SOURCE} kernel_mul_mm, dequantize_*: half weights and half inputs, of bfloat16 models bfloat16, float sums "
        "(read); the order inside an 8-wide simdgroup MMA is not visible, an ascending chain stands for it",
        "inferred",
    ),
)


_CUDA_SOURCE = "ggml-org/llama.cpp {} ggml/src/ggml-cuda/{}"


@lru_cache(maxsize=64)
def _cuda_vector(kind: str, warps: int) -> Order:
    # Threads of all warps take blocks in turn; a warp's lane adds its own of every warp in order.
    threads = 32 * warps
    if kind == "Q4_K":
        # 16 threads a superblock: (group of 64, four neighbours), of both sub-blocks and both their halves.
        walk = Walk((2 * warps, 4, 2, 2, 4, 4), lane=(0, 1, 4), terms=(2, 3, 5))
        return _cuda_eight_bit(walk, "q8_1_k", 8, 2)
    if kind == "Q6_K":
        walk = Walk((warps, 2, 2, 2, 8, 4), lane=(0, 1, 3, 4), terms=(2, 5))
        return _cuda_eight_bit(walk, "q8_1_scales", 4, 2)
    if kind in ("Q8_0", "wide"):
        join: Join = "q8_1_scale" if kind == "Q8_0" else "q8_1_min4"
        return _cuda_eight_bit(Walk((threads, 8)), join, 8)
    walk = Walk((threads // 2, 2, 2, 8), lane=(0, 2), terms=(1, 3))
    return _cuda_eight_bit(walk, "q8_1" if kind == "Q4_0" else "q8_1_min2", 16)


def _cuda_eight_bit(walk: Walk, join: Join, part: int, parts: int = 1) -> Order:
    return Order(walk, join, "codes", part, parts, fold=32, halve=32, inputs="q8_1")


def _cuda_kind(shape: LinearShape) -> str | None:
    """The format that says how a weight is walked; other affine weights are Q4_1, or wider codes with a minimum."""
    bits = affine_bits(shape)
    if bits is not None:
        return "Q4_1" if bits <= 4 else "wide"
    return None if shape.format in ("dense", "affine") else shape.format


def _cuda_mmvq(shape: LinearShape) -> Order | None:
    kind = _cuda_kind(shape)
    return None if kind is None else _cuda_vector(kind, 4 if shape.m <= 4 else 2 if shape.m <= 8 else 1)


def _cuda_tile(join: Join, weight: WeightForm, inputs: Inputs, part: int = 32, parts: int = 1) -> Order:
    return Order(IN_ORDER, join, weight, part, parts, inputs=inputs)


_CUDA_MINIMA = _cuda_tile("tile_min", "codes", "q8_1_tile")
_CUDA_TILES = {
    "Q4_0": _cuda_tile("tile", "signed", "q8_1_tile"),
    "Q8_0": _cuda_tile("tile", "codes", "q8_1_tile_float"),
    "Q6_K": _cuda_tile("tile_scales", "codes", "q8_1_tile_float", 16, 8),
    "Q4_1": _CUDA_MINIMA, "Q4_K": _CUDA_MINIMA, "wide": _CUDA_MINIMA,
}  # fmt: skip


def _cuda_mmq(shape: LinearShape) -> Order | None:
    kind = _cuda_kind(shape)
    return None if kind is None else _CUDA_TILES[kind]


def _cuda_warps(k: int) -> int:
    """Warps of the fewest that need the fewest turns for a row, two items a thread and turn."""
    return min(range(1, 9), key=lambda warps: (-(-k // (64 * warps)), warps))


@lru_cache(maxsize=64)
def _cuda_floats(warps: int, halves: bool) -> Order:
    if not halves:
        walk = Grouped((32 * warps, 2), groups=warps)
        return grouped(Order(walk, weight="float32"))
    # Both items of a thread's turn have a sum of their own in float16.
    walk = Grouped((32 * warps, 2), lane=(1, 0), terms=(), groups=warps, pairs=True)
    return grouped(Order(walk, weight="dtype", accumulate="dtype"))


def _cuda_mmvf(shape: LinearShape) -> Order | None:
    if shape.format != "dense" or shape.k % 2:
        return None
    return _cuda_floats(_cuda_warps(shape.k), shape.dtype == "float16")


_CUDA_HALVES = Order(IN_ORDER, weight="float16", inputs="float16")
_CUDA_CHAIN = Order(IN_ORDER, weight="dtype")


def _cuda_cublas(shape: LinearShape) -> Order | None:
    return _CUDA_CHAIN if shape.format == "dense" else _CUDA_HALVES


_CUDA = (
    BlockKernel(
        "ggml-cuda/mmvq",
        _cuda_mmvq,
        f"{_CUDA_SOURCE.format('027ef87', 'vecdotq.cuh')} vec_dot_*_q8_1, ggml-org/ggml 7180759 src/ggml-cuda/mmvq.cu mul_mat_vec_q, "
        "calc_nwarps, generic table (read; which products are fused, and what fast math leaves of divisions, inferred); an "
        "affine weight is Q4_1, above 4 bits Q8_0 with a minimum as in vec_dot_q8_1_q8_1_impl (inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-cuda/mmq",
        _cuda_mmq,
        "ggml-org/ggml d99724f src/ggml-cuda/mmq.cuh vec_dot_{q8_0_q8_1,q8_1_q8_1,q6_K_q8_1}_mma, load_tiles_* of Turing and "
        "later (read); one walk over K, which stream-k may cut (inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-cuda/mmvf",
        _cuda_mmvf,
        f"{_CUDA_SOURCE.format('009626c', 'mmvf.cu')} mul_mat_vec_f, launch_mul_mat_vec_f_cuda; float16 adds in float16 (read; what "
        "is fused inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-cuda/cublas",
        _cuda_cublas,
        f"{_CUDA_SOURCE.format('f6d77a1', 'ggml-cuda.cu')} ggml_cuda_op_mul_mat_cublas: float16 weights and inputs (read); cuBLAS is "
        "not visible, an ascending float32 chain stands for it",
        "inferred",
    ),
)


_CPU_SOURCE = "ggml-org/llama.cpp 0f2d806 ggml/src/ggml-cpu/arch/x86/repack.cpp"
_CPU_SCALE = Order(IN_ORDER, "q8_1_scale", "signed", 32, inputs="q8_0")
_CPU_MINIMUM = Order(IN_ORDER, "tile_min", "codes", 32, inputs="q8_0")


def _cpu_blocks(shape: LinearShape) -> Order | None:
    """One walk over blocks of 32, for a row alone and for four rows alike."""
    if shape.format in ("Q4_0", "Q8_0"):
        return _CPU_SCALE
    return _CPU_MINIMUM if shape.format == "Q4_1" or affine_bits(shape) else None


_CPU_NOTE = (
    "one FMA a block of a whole number with the product of both scales; Q8_0 as Q4_0, and other affine weights and Q4_1 as "
    "Q4_1 with Q8_1 inputs (inferred)"
)

_CPU = (
    BlockKernel(
        "ggml-cpu-repack/gemv",
        _cpu_blocks,
        f"{_CPU_SOURCE} gemv_q4_b32_8x8_q8_0_lut_avx, quants.c quantize_row_q8_0 with AVX2 and FMA (read): {_CPU_NOTE}",
        "inferred",
    ),
    BlockKernel(
        "ggml-cpu-repack/gemm",
        _cpu_blocks,
        f"{_CPU_SOURCE} gemm_q4_b32_8x8_q8_0_lut_avx, ggml_quantize_mat_q8_0_4x8 with AVX2 and FMA, which give the bits of gemv "
        f"(read): {_CPU_NOTE}",
        "inferred",
    ),
)


LINEAR = (*_CANDLE, *_METAL, *_CUDA, *_CPU)
