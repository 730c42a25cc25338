"""A linear reference kernel: ``x @ weight.T`` in an order that is known to the last rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .errors import BadOperand, UnsupportedFormat, nearest
from .order import Order
from .rounding import DTYPES, Float32
from .staging import Staged, summed
from .weights import Dense, Weight


@dataclass(frozen=True)
class LinearShape:
    """What a family looks at: rows M, outputs N, inputs K, the activation's dtype T and the weight's format."""

    m: int
    n: int
    k: int
    dtype: str
    format: str
    bits: int | None
    group_size: int | None


@dataclass(frozen=True)
class Kernel:
    """A family of orders: ``order`` gives the one for a shape, or None where the real kernel takes no such weight.

    Every rounding is fixed, and a row's result depends on that row only. ``source`` says where the order was found;
    ``tag`` is read, inferred or measured.
    """

    name: str
    order: Callable[[LinearShape], Order | None]
    source: str
    tag: str

    op = "linear"

    def order_for(self, weight: Weight, dtype: str, rows: int) -> Order:
        """The order in which ``rows`` rows are summed over ``weight``; raises UnsupportedFormat."""
        shape = LinearShape(rows, weight.n, weight.k, dtype, weight.format, weight.bits, weight.group_size)
        order = self.order(shape)
        if order is None:
            width = "dense" if weight.bits is None else f"{weight.bits}-bit {weight.format}"
            raise UnsupportedFormat(
                f"{self.name} was given a {width} weight of shape ({weight.n}, {weight.k}) and {dtype} inputs; no "
                "order of the real kernel is known for such a weight. Choose another kernel for it, or run it native."
            )
        return order

    def stage(self, weight: Weight | Float32, dtype: str = "float32") -> Staged:
        """Prepares a weight (n, k) for many calls with activations of ``dtype``; it is referred to, do not change it.

        A float32 array is a dense weight. Raises BadOperand for an array or dtype that is none of these, and
        UnsupportedFormat for a weight that the kernel does not take.
        """
        if dtype not in DTYPES:
            raise BadOperand(
                f"{self.name} was given activations of dtype {dtype!r}; {nearest(dtype, DTYPES)}"
            )
        held = Dense(weight) if isinstance(weight, np.ndarray) else weight
        staged = Staged(self.name, held, dtype)
        staged.layout(self.order_for(held, dtype, 1))
        return staged

    def __call__(self, x: Float32, staged: Staged, out: Float32 | None = None) -> Float32:
        """The product (m, n), float32 rounded once to the activations' dtype, of C-contiguous float32 ``x`` (m, k),
        which holds values of that dtype, and a weight that this kernel has staged.

        ``out`` (m, n), if given, is C-contiguous float32, shares no memory with x, and is filled and
        returned. Raises BadOperand for another shape, dtype or memory order, and for a weight of another kernel.
        """
        if staged.kernel != self.name:
            raise BadOperand(
                f"{self.name} was given a weight staged for {staged.kernel}. Stage the weight with the kernel that "
                "is called."
            )
        self._check("x", x, x.shape[0] if x.ndim == 2 else 1, staged.k)
        if out is None:
            out = np.empty((x.shape[0], staged.n), dtype=np.float32)
        self._check("out", out, x.shape[0], staged.n)
        if not out.flags.writeable:
            raise BadOperand(f"{self.name} was given an out that is read-only; pass an array it may fill.")
        if x.shape[0]:
            summed(x, staged, self.order_for(staged.weight, staged.dtype, x.shape[0]), out)
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
