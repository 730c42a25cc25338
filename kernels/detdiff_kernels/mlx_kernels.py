"""MLX's matmul kernels: the quantised ones and the dense ones of Metal, those of CUDA, and cuBLAS as far as it can be said."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from .linear import Kernel, LinearShape
from .order import IN_ORDER, LooseTail, Order, TailFirst, Walk, WeightForm, lanes_of

_MLX = "ml-explore/mlx 846d176 mlx/backend/metal/"
_QUANTISED = f"{_MLX}kernels/quantized.h"

# A code whose bits lie in two bytes is multiplied in two terms; numbers are item and mask, of every `first` codes.
_SPLIT = {
    3: (8, ((0, 7), (1, 7), (2, 3), (2, 4), (3, 7), (4, 7), (5, 1), (5, 6), (6, 7), (7, 7))),
    5: (
        8,
        (
            (0, 31),
            (1, 7),
            (1, 24),
            (2, 31),
            (3, 1),
            (3, 30),
            (4, 15),
            (4, 16),
            (5, 31),
            (6, 3),
            (6, 28),
            (7, 31),
        ),
    ),
    6: (4, ((0, 63), (1, 3), (1, 60), (2, 15), (2, 48), (3, 63))),
}
# Inputs are divided by what their code's place in a byte (16 bits for 4-bit codes) multiplies it with.
_PRESCALE = {
    2: (1, 4, 16, 64),
    3: (1, 8, 64, 2, 16, 128, 4, 32),
    4: (1, 16, 256, 4096),
    5: (1, 32, 4, 128, 16, 2, 64, 8),
    6: (1, 64, 16, 4),
    8: (),
}
_FAST_VALUES = {2: 16, 3: 16, 4: 16, 5: 16, 6: 8, 8: 8}
_VALUES = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}


@lru_cache(maxsize=256)
def _vector(bits: int, lanes: int, values: int) -> Order:
    fields = _SPLIT.get(bits)
    run = 1 if bits == 8 else 8 if bits in (3, 5) else 4
    terms = values if fields is None else values // fields[0] * len(fields[1])
    # Codes of 2 and 4 bits are multiplied in fours that are added to the rest; others one by one.
    part = 4 if bits in (2, 4) else terms
    return Order(
        Walk((lanes, values), fields=fields), "affine", "codes", part, terms // part, sums=run,
        prescale=_PRESCALE[bits], halve=lanes,
    )  # fmt: skip


def _qmv_fast(shape: LinearShape) -> Order | None:
    if shape.format != "affine" or shape.bits is None:
        return None
    return _vector(shape.bits, 32, _FAST_VALUES[shape.bits])


def _qmv(shape: LinearShape) -> Order | None:
    if shape.format != "affine" or shape.bits is None:
        return None
    return _vector(shape.bits, 32, _VALUES[shape.bits])


def _qmv_quad(shape: LinearShape) -> Order | None:
    if shape.format != "affine" or shape.bits not in (2, 4, 8) or shape.k not in (64, 128):
        return None
    return _vector(shape.bits, 4, shape.k // 4)


def _qmv_wide(shape: LinearShape) -> Order | None:
    if shape.format != "affine" or shape.group_size is None:
        return None
    return _wide(shape.group_size)


@lru_cache(maxsize=16)
def _wide(group: int) -> Order:
    return Order(lanes_of(8, group), "add", "float32", 8, halve=8)


_TILES: dict[WeightForm, Order] = {
    "dtype": Order(IN_ORDER, weight="dtype"),
    "dtype_in_place": Order(IN_ORDER, weight="dtype_in_place"),
}


def _qmm_t(shape: LinearShape) -> Order | None:
    return _TILES["dtype"] if shape.format == "affine" else None


def _qmm_t_old(shape: LinearShape) -> Order | None:
    return _TILES["dtype_in_place"] if shape.format == "affine" else None


def quantised_splits(m: int, n: int, k: int, group_size: int) -> int:
    """In how many ranges ``qmm_splitk`` cuts K; 1 means that it does not."""
    unit = max(group_size, 32)
    splits = min(max(1, 512 // (ceil(n / 32) * ceil(m / 32))), max(1, k // unit))
    while k % (splits * unit) and splits > 1:
        splits -= 1
    return splits


@lru_cache(maxsize=64)
def _split(k: int, splits: int, form: WeightForm) -> Order:
    # Partials are added in the activation's dtype: fewer than 32 in min(8, S) interleaved rows and the rows in order
    # (reduce_col.h col_reduce_small), more in 32 rows that simd_sum adds, for bfloat16 in float32 (col_reduce_looped).
    many = splits >= 32
    return Order(
        Walk((splits, k // splits)),
        weight=form,
        fold=32 if many else min(8, splits),
        halve=32 if many else 1,
        zeroed=True,
        partial="dtype",
    )


def _qmm_splitk(shape: LinearShape, form: WeightForm = "dtype") -> Order | None:
    if shape.format != "affine" or shape.group_size is None:
        return None
    splits = quantised_splits(shape.m, shape.n, shape.k, shape.group_size)
    return _TILES[form] if splits == 1 else _split(shape.k, splits, form)


def _qmm_splitk_old(shape: LinearShape) -> Order | None:
    return _qmm_splitk(shape, "dtype_in_place")


_GEMV = Order(lanes_of(32, 4), halve=32, weight="dtype")
_GEMV_NARROW = Order(lanes_of(4, 4), halve=4, weight="dtype")
_GEMV_LONG = Order(lanes_of(256, 4), halve=32, weight="dtype")


def _gemv(shape: LinearShape) -> Order | None:
    if shape.format != "dense":
        return None
    if shape.k <= 64:
        return _GEMV_NARROW
    # Eight simdgroups share a long row: every 1024 items, 128 each; their sums are added in order.
    # A single output makes the rows the matrix.
    outputs = shape.n if shape.n > 1 else shape.m
    return _GEMV_LONG if shape.k >= 16 * outputs else _GEMV


# Eight fours of a lane are added before they reach its total, those behind the last whole eight one by one.
_GEMV_WIDE = {
    lanes: Order(LooseTail((8, lanes, 4), (1,), (0, 2), loose=4), "add", "dtype", 4, 8, halve=lanes)
    for lanes in (16, 32)
}
_GEMV_WIDE_SHORT = {lanes: Order(lanes_of(lanes, 4), "add", "dtype", 4, halve=lanes) for lanes in (16, 32)}


def _gemv_wide(shape: LinearShape) -> Order | None:
    if shape.format != "dense" or shape.k % 4:
        return None
    lanes = 32 if shape.m <= 5 or shape.n <= 64 else 16
    return (_GEMV_WIDE_SHORT if shape.k < 32 * lanes else _GEMV_WIDE)[lanes]


def npow2(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def dense_splits(m: int, n: int, k: int) -> int:
    """In how many ranges steel's split-K cuts K."""
    tiles = ceil(m / 32) * ceil(n / 32)
    return min(max(2, npow2(k // 16 // tiles)), 32)


_ONE_RANGE = Order(IN_ORDER, weight="dtype", zeroed=True)


@lru_cache(maxsize=64)
def _ranges(size: int, count: int) -> Order:
    return Order(Walk((count, size), ranges=size), weight="dtype", zeroed=True)


def _splitk(shape: LinearShape) -> Order | None:
    if shape.format != "dense":
        return None
    return _tiled_ranges(shape.k, dense_splits(shape.m, shape.n, shape.k))


def _splitk_old(shape: LinearShape) -> Order | None:
    if shape.format != "dense":
        return None
    # Up to 0.30.0 K alone decides.
    return _tiled_ranges(shape.k, next((many for many in (2, 4, 8) if shape.k // 16 < 8 * many), 16))


def _tiled_ranges(k: int, splits: int) -> Order:
    size = k // 16 // splits * 16
    # What the last whole range leaves is the last one's too; ranges of nothing leave all to it.
    return _ranges(size, splits) if size else _ONE_RANGE


def _splitk_nax(shape: LinearShape) -> Order | None:
    if shape.format != "dense":
        return None
    size = shape.k // 2 if shape.k <= 1024 else 1024 if shape.k <= 2048 else 2048 if shape.k <= 4096 else 4096
    return _ranges(size, ceil(shape.k / size)) if 0 < size < shape.k else _STEEL


_STEEL = Order(TailFirst((1, 1), tile=16), weight="dtype")


def _steel(shape: LinearShape) -> Order | None:
    return _STEEL if shape.format == "dense" else None


_FUSED = "(read); which products are fused inferred"
_TREE = "(read); which products are fused and the tree inside simd_sum inferred"

_METAL = (
    Kernel(
        "mlx-metal/qmv_fast", _qmv_fast, f"{_QUANTISED} qmv_fast_impl, load_vector, qdot {_TREE}", "inferred"
    ),
    Kernel("mlx-metal/qmv", _qmv, f"{_QUANTISED} qmv_impl, load_vector_safe, qdot_safe {_TREE}", "inferred"),
    Kernel("mlx-metal/qmv_quad", _qmv_quad, f"{_QUANTISED} qmv_quad_impl {_TREE}", "inferred"),
    Kernel("mlx-metal/qmv_wide", _qmv_wide, f"{_QUANTISED} qmv_wide_impl {_FUSED}", "inferred"),
    Kernel(
        "mlx-metal/qmm_t", _qmm_t, f"{_QUANTISED} qmm_t_impl; a chain stands for an 8-wide MMA", "inferred"
    ),
    Kernel(
        "mlx-metal/qmm_splitk",
        _qmm_splitk,
        f"{_QUANTISED} qmm_t_splitk, {_MLX}quantized.cpp qmm_splitk",
        "inferred",
    ),
    Kernel(
        "mlx-metal/qmm_t-0.32.0",
        _qmm_t_old,
        "ml-explore/mlx v0.32.0 kernels/quantized.h dequantize in T",
        "inferred",
    ),
    Kernel(
        "mlx-metal/qmm_splitk-0.32.0",
        _qmm_splitk_old,
        "ml-explore/mlx v0.32.0 kernels/quantized.h",
        "inferred",
    ),
    Kernel("mlx-metal/gemv", _gemv, f"{_MLX}kernels/gemv.h GEMVKernel, matmul.cpp gemv {_FUSED}", "inferred"),
    Kernel(
        "mlx-metal/gemv_wide", _gemv_wide, f"{_MLX}kernels/gemv.h GemvWide, matmul.cpp {_FUSED}", "inferred"
    ),
    Kernel(
        "mlx-metal/splitk",
        _splitk,
        f"{_MLX}kernels/steel/gemm splitk, matmul.cpp steel_gemm_splitk",
        "inferred",
    ),
    Kernel(
        "mlx-metal/splitk-0.30.0",
        _splitk_old,
        "ml-explore/mlx v0.30.0 mlx/backend/metal/matmul.cpp steel_gemm_splitk_axpby",
        "inferred",
    ),
    Kernel("mlx-metal/splitk_nax", _splitk_nax, f"{_MLX}matmul.cpp steel_gemm_splitk_axpby NAX", "inferred"),
    Kernel(
        "mlx-metal/steel", _steel, f"{_MLX}kernels/steel/gemm; a chain stands for an 8-wide MMA", "inferred"
    ),
)


_CUDA_SOURCE = "ml-explore/mlx 846d176 mlx/backend/cuda/"


@lru_cache(maxsize=8)
def _cuda_slots(values: int, narrow: bool) -> Order:
    # Every thread keeps one sum for each of its `values` items of a step; these are added in order, then the warp's.
    return Order(
        Walk((32, values), lane=(1, 0), terms=()),
        weight="dtype_twice",
        fold=32,
        halve=32,
        zeroed=True,
        accumulate="dtype" if narrow else "float32",
    )


def _cuda_qmv(shape: LinearShape) -> Order | None:
    if shape.format != "affine" or shape.bits is None:
        return None
    values = 16 if shape.dtype != "float32" and shape.bits <= 4 else 8
    return _cuda_slots(values, shape.bits < 8)


_CUDA_CHAIN = Order(IN_ORDER, weight="dtype")
_CUDA_CHAIN_TWICE = Order(IN_ORDER, weight="dtype_twice")


def _cuda_qmm(shape: LinearShape) -> Order | None:
    return _CUDA_CHAIN_TWICE if shape.format == "affine" else None


def _cuda_gemm(shape: LinearShape) -> Order | None:
    return _CUDA_CHAIN if shape.format == "dense" else None


_CUDA_GEMV = {values: Order(lanes_of(32, values), weight="dtype", halve=32) for values in (1, 2, 4)}


def _cuda_gemv(shape: LinearShape) -> Order | None:
    if shape.format != "dense" or shape.k % 32:
        return None
    return _CUDA_GEMV[4 if shape.k % 128 == 0 else 2 if shape.k % 64 == 0 else 1]


_CUDA = (
    Kernel(
        "mlx-cuda/qmv",
        _cuda_qmv,
        f"{_CUDA_SOURCE}quantized/qmm/qmv.cu qmv_kernel_impl; the order of cg::reduce",
        "inferred",
    ),
    Kernel(
        "mlx-cuda/qmm", _cuda_qmm, f"{_CUDA_SOURCE}quantized/qmm; a chain stands for tensor cores", "inferred"
    ),
    Kernel(
        "mlx-cuda/gemv",
        _cuda_gemv,
        f"{_CUDA_SOURCE}gemms/gemv.cu gemv_impl; the order of cg::reduce",
        "inferred",
    ),
    Kernel(
        "mlx-cuda/gemm",
        _cuda_gemm,
        f"{_CUDA_SOURCE}gemms/cublas_gemm.cpp; cuBLAS is not visible, a chain stands",
        "inferred",
    ),
)

LINEAR = (*_METAL, *_CUDA)
