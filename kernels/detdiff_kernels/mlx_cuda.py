"""MLX's CUDA matmul kernels, and cuBLAS as far as it can be said."""

from __future__ import annotations

from functools import lru_cache

from .linear import Kernel, Shape
from .order import IN_ORDER, Order, Walk, lanes_of

_MLX = "ml-explore/mlx 846d176 mlx/backend/cuda/"


@lru_cache(maxsize=8)
def _slots(values: int, narrow: bool) -> Order:
    # Every thread keeps one sum for each of its `values` items of a step; these are added in order, then the warp's.
    return Order(
        Walk((32, values), lane=(1, 0), terms=()),
        weight="dtype_twice",
        fold=32,
        halve=32,
        zeroed=True,
        accumulate="dtype" if narrow else "float32",
    )


def _qmv(shape: Shape) -> Order | None:
    if shape.format != "affine" or shape.bits is None:
        return None
    values = 16 if shape.dtype != "float32" and shape.bits <= 4 else 8
    return _slots(values, shape.bits < 8)


_CHAIN = Order(IN_ORDER, weight="dtype")
_CHAIN_TWICE = Order(IN_ORDER, weight="dtype_twice")


def _qmm(shape: Shape) -> Order | None:
    return _CHAIN_TWICE if shape.format == "affine" else None


def _gemm(shape: Shape) -> Order | None:
    return _CHAIN if shape.format == "dense" else None


_GEMV = {values: Order(lanes_of(32, values), weight="dtype", halve=32) for values in (1, 2, 4)}


def _gemv(shape: Shape) -> Order | None:
    if shape.format != "dense" or shape.k % 32:
        return None
    return _GEMV[4 if shape.k % 128 == 0 else 2 if shape.k % 64 == 0 else 1]


LINEAR = (
    Kernel(
        "mlx-cuda/qmv",
        _qmv,
        f"{_MLX}quantized/qmm/qmv.cu qmv_kernel_impl; the order of cg::reduce",
        "inferred",
    ),
    Kernel("mlx-cuda/qmm", _qmm, f"{_MLX}quantized/qmm; a chain stands for tensor cores", "inferred"),
    Kernel("mlx-cuda/gemv", _gemv, f"{_MLX}gemms/gemv.cu gemv_impl; the order of cg::reduce", "inferred"),
    Kernel(
        "mlx-cuda/gemm",
        _gemm,
        f"{_MLX}gemms/cublas_gemm.cpp; cuBLAS is not visible, a chain stands",
        "inferred",
    ),
)
