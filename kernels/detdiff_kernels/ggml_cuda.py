"""ggml's CUDA matmul kernels, and cuBLAS as far as it can be said."""

from __future__ import annotations

from functools import lru_cache

from .block_kernel import BlockKernel, affine_bits
from .grouped_walk import Grouped, grouped
from .linear import Shape
from .order import IN_ORDER, Inputs, Join, Order, Walk, WeightForm

_LLAMA = "ggml-org/llama.cpp {} ggml/src/ggml-cuda/{}"


@lru_cache(maxsize=64)
def _vector(kind: str, warps: int) -> Order:
    # Threads of all warps take blocks in turn; a warp's lane adds its own of every warp in order.
    threads = 32 * warps
    if kind == "Q4_K":
        # 16 threads a superblock: (group of 64, four neighbours), of both sub-blocks and both their halves.
        walk = Walk((2 * warps, 4, 2, 2, 4, 4), lane=(0, 1, 4), terms=(2, 3, 5))
        return _eight_bit(walk, "q8_1_k", 8, 2)
    if kind == "Q6_K":
        walk = Walk((warps, 2, 2, 2, 8, 4), lane=(0, 1, 3, 4), terms=(2, 5))
        return _eight_bit(walk, "q8_1_scales", 4, 2)
    if kind in ("Q8_0", "wide"):
        join: Join = "q8_1_scale" if kind == "Q8_0" else "q8_1_min4"
        return _eight_bit(Walk((threads, 8)), join, 8)
    walk = Walk((threads // 2, 2, 2, 8), lane=(0, 2), terms=(1, 3))
    return _eight_bit(walk, "q8_1" if kind == "Q4_0" else "q8_1_min2", 16)


def _eight_bit(walk: Walk, join: Join, part: int, parts: int = 1) -> Order:
    return Order(walk, join, "codes", part, parts, fold=32, halve=32, inputs="q8_1")


def _kind(shape: Shape) -> str | None:
    """The format that says how a weight is walked; other affine weights are Q4_1, or wider codes with a minimum."""
    bits = affine_bits(shape)
    if bits is not None:
        return "Q4_1" if bits <= 4 else "wide"
    return None if shape.format in ("dense", "affine") else shape.format


def _mmvq(shape: Shape) -> Order | None:
    kind = _kind(shape)
    return None if kind is None else _vector(kind, 4 if shape.m <= 4 else 2 if shape.m <= 8 else 1)


def _tile(join: Join, weight: WeightForm, inputs: Inputs, part: int = 32, parts: int = 1) -> Order:
    return Order(IN_ORDER, join, weight, part, parts, inputs=inputs)


_MINIMA = _tile("tile_min", "codes", "q8_1_tile")
_TILES = {
    "Q4_0": _tile("tile", "signed", "q8_1_tile"),
    "Q8_0": _tile("tile", "codes", "q8_1_tile_float"),
    "Q6_K": _tile("tile_scales", "codes", "q8_1_tile_float", 16, 8),
    "Q4_1": _MINIMA, "Q4_K": _MINIMA, "wide": _MINIMA,
}  # fmt: skip


def _mmq(shape: Shape) -> Order | None:
    kind = _kind(shape)
    return None if kind is None else _TILES[kind]


def _warps(k: int) -> int:
    """Warps of the fewest that need the fewest turns for a row, two items a thread and turn."""
    return min(range(1, 9), key=lambda warps: (-(-k // (64 * warps)), warps))


@lru_cache(maxsize=64)
def _floats(warps: int, halves: bool) -> Order:
    if not halves:
        walk = Grouped((32 * warps, 2), groups=warps)
        return grouped(Order(walk, weight="float32"))
    # Both items of a thread's turn have a sum of their own in float16.
    walk = Grouped((32 * warps, 2), lane=(1, 0), terms=(), groups=warps, pairs=True)
    return grouped(Order(walk, weight="dtype", accumulate="dtype"))


def _mmvf(shape: Shape) -> Order | None:
    if shape.format != "dense" or shape.k % 2:
        return None
    return _floats(_warps(shape.k), shape.dtype == "float16")


_HALVES = Order(IN_ORDER, weight="float16", inputs="float16")
_CHAIN = Order(IN_ORDER, weight="dtype")


def _cublas(shape: Shape) -> Order | None:
    return _CHAIN if shape.format == "dense" else _HALVES


LINEAR = (
    BlockKernel(
        "ggml-cuda/mmvq",
        _mmvq,
        f"{_LLAMA.format('027ef87', 'vecdotq.cuh')} vec_dot_*_q8_1, ggml-org/ggml 7180759 src/ggml-cuda/mmvq.cu mul_mat_vec_q, "
        "calc_nwarps, generic table (read; which products are fused, and what fast math leaves of divisions, inferred); an "
        "affine weight is Q4_1, above 4 bits Q8_0 with a minimum as in vec_dot_q8_1_q8_1_impl (inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-cuda/mmq",
        _mmq,
        "ggml-org/ggml d99724f src/ggml-cuda/mmq.cuh vec_dot_{q8_0_q8_1,q8_1_q8_1,q6_K_q8_1}_mma, load_tiles_* of Turing and "
        "later (read); one walk over K, which stream-k may cut (inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-cuda/mmvf",
        _mmvf,
        f"{_LLAMA.format('009626c', 'mmvf.cu')} mul_mat_vec_f, launch_mul_mat_vec_f_cuda; float16 adds in float16 (read; what "
        "is fused inferred)",
        "inferred",
    ),
    BlockKernel(
        "ggml-cuda/cublas",
        _cublas,
        f"{_LLAMA.format('f6d77a1', 'ggml-cuda.cu')} ggml_cuda_op_mul_mat_cublas: float16 weights and inputs (read); cuBLAS is "
        "not visible, an ascending float32 chain stands for it",
        "inferred",
    ),
)
