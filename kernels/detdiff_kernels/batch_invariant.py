"""Matmul in one fixed order for any number of rows, as batch-invariant engines do it."""

from __future__ import annotations

from .linear import Kernel, Shape
from .order import IN_ORDER, Order

# Tiles of K: bfloat16 and float16 64, float32 32.
_TILES = {dtype: Order(IN_ORDER, "add", "dtype", tile) for dtype, tile in (
    ("float32", 32), ("float16", 64), ("bfloat16", 64),
)}  # fmt: skip


def _mm(shape: Shape) -> Order | None:
    return _TILES[shape.dtype]


LINEAR = (
    Kernel(
        "batch-invariant/mm",
        _mm,
        "thinking-machines-lab/batch_invariant_ops f22b1fb batch_invariant_ops.py matmul_persistent: tiles of K (read); "
        "a tile is taken for a chain that is added to the sum, and quantised weights are dequantised first",
        "inferred",
    ),
)
