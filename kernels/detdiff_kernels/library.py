"""The reference kernels by name. To add one, add it to the table of its backend; see docs/kernels.md."""

from __future__ import annotations

from . import batch_invariant, candle_metal, ggml_cpu, ggml_cuda, ggml_metal, mlx_cuda, mlx_metal
from .attention import ATTENTION, Attention
from .errors import UnknownKernel, nearest
from .linear import Kernel

_TABLE: tuple[Kernel, ...] = (
    *mlx_metal.LINEAR,
    *mlx_cuda.LINEAR,
    *candle_metal.LINEAR,
    *ggml_metal.LINEAR,
    *ggml_cuda.LINEAR,
    *ggml_cpu.LINEAR,
    *batch_invariant.LINEAR,
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
