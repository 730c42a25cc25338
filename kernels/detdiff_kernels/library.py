"""The reference kernels by name. To add one, add it to the table of its backend; see docs/kernels.md."""

from __future__ import annotations

from . import ggml_kernels, mlx_kernels
from .attention import ATTENTION, Attention
from .errors import UnknownKernel, nearest
from .linear import Kernel, LinearShape
from .order import IN_ORDER, Order

# Tiles of K: bfloat16 and float16 64, float32 32.
_TILES = {dtype: Order(IN_ORDER, "add", "dtype", tile) for dtype, tile in (
    ("float32", 32), ("float16", 64), ("bfloat16", 64),
)}  # fmt: skip


def _mm(shape: LinearShape) -> Order | None:
    return _TILES[shape.dtype]


_BATCH_INVARIANT = (
    Kernel(
        "batch-invariant/mm",
        _mm,
        "thinking-machines-lab/batch_invariant_ops f22b1fb batch_invariant_ops.py matmul_persistent: tiles of K (read); "
        "a tile is taken for a chain that is added to the sum, and quantised weights are dequantised first",
        "inferred",
    ),
)

_TABLE: tuple[Kernel, ...] = (
    *mlx_kernels.LINEAR,
    *ggml_kernels.LINEAR,
    *_BATCH_INVARIANT,
)
_KERNELS: dict[str, Kernel | Attention] = {entry.name: entry for entry in _TABLE} | ATTENTION


def kernel_names() -> tuple[str, ...]:
    """The names of all reference kernels, ``backend/kernel``."""
    return tuple(_KERNELS)


def kernel(name: str) -> Kernel | Attention:
    """The reference kernel of that name; raises UnknownKernel."""
    if name not in _KERNELS:
        raise UnknownKernel(f"There is no reference kernel named {name!r}; {nearest(name, _KERNELS)}")
    return _KERNELS[name]
