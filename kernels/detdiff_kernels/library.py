"""The reference kernels by name. To add one, add a line to the table; see docs/kernels.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import BadOperand, UnknownKernel, nearest
from .order import Float32, Order, Staged, accumulate, stage


@dataclass(frozen=True)
class Kernel:
    """A linear operation ``x @ weight.T`` whose every rounding is fixed. Each row depends on itself only.

    ``source`` says where the order was found; ``tag`` is read, inferred or measured.
    """

    name: str
    order: Order
    source: str
    tag: str

    def stage(self, weight: Float32) -> Staged:
        """Prepares a float32 weight (n, k) for many calls. It may be referred to: do not change it after.

        Raises BadOperand for another dtype, rank or an empty weight.
        """
        if weight.dtype != np.float32 or weight.ndim != 2 or not weight.size:
            raise BadOperand(
                f"{self.name} was given a weight of dtype {weight.dtype} and shape {weight.shape}; it takes "
                "float32 of shape (outputs, inputs), both at least 1. Dequantise or convert the weight first."
            )
        return stage(self.order, weight)

    def __call__(self, x: Float32, staged: Staged, out: Float32 | None = None) -> Float32:
        """The float32 product (m, n) of C-contiguous float32 ``x`` (m, k) and a weight staged by this kernel.

        ``out`` (m, n), if given, is C-contiguous float32, shares no memory with x, and is filled and
        returned. Raises BadOperand for another shape, dtype or memory order, and for a weight staged in
        another order.
        """
        if staged.order != self.order:
            raise BadOperand(
                f"{self.name} was given a weight staged as {staged.order}; it sums as {self.order}. "
                "Stage the weight with the kernel that is called."
            )
        self._check("x", x, x.shape[0] if x.ndim == 2 else 1, staged.k)
        if out is None:
            out = np.empty((x.shape[0], staged.n), dtype=np.float32)
        self._check("out", out, x.shape[0], staged.n)
        if not out.flags.writeable:
            raise BadOperand(f"{self.name} was given an out that is read-only; pass an array it may fill.")
        if x.shape[0]:
            accumulate(x, staged, out)
        return out

    def _check(self, name: str, array: Float32, rows: int, columns: int) -> None:
        plain = array.flags.c_contiguous and array.flags.aligned
        if array.dtype == np.float32 and array.shape == (rows, columns) and plain:
            return
        order = "C-contiguous" if plain else "not C-contiguous or not aligned"
        raise BadOperand(
            f"{self.name} was given {name} of dtype {array.dtype} and shape {array.shape}, {order}; it takes "
            f"C-contiguous float32 of shape ({rows}, {columns}) here. "
            "numpy.require(array, numpy.float32, 'CA') makes it so."
        )


_TABLE = (
    Kernel(
        "candle-metal/mv",
        Order(lanes=32, values=4, staging="float32"),
        "huggingface/candle 866deb8 candle-metal-kernels/src/metal_src/gemv.metal GEMVKernel::run with 32 "
        "lanes of 4 values (read); stands for the quantised mv kernels too, each with its own block format",
        "inferred",
    ),
    Kernel(
        "candle-metal/mm",
        Order(lanes=1, values=1, staging="float16"),
        "huggingface/candle 2a13b0f candle-metal-kernels/src/metal_src/quantized.metal kernel_mul_mm: half "
        "weights, float inputs, float sums (read); the order inside an 8-wide simdgroup MMA is not visible, "
        "an ascending chain stands for it",
        "inferred",
    ),
)
_KERNELS = {entry.name: entry for entry in _TABLE}


def kernel_names() -> tuple[str, ...]:
    """The names of all reference kernels, ``backend/kernel``."""
    return tuple(_KERNELS)


def kernel(name: str) -> Kernel:
    """The reference kernel of that name; raises UnknownKernel."""
    if name not in _KERNELS:
        raise UnknownKernel(f"There is no reference kernel named {name!r}; {nearest(name, _KERNELS)}")
    return _KERNELS[name]
