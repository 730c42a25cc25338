"""Kernels that know ggml's block formats, and the orders that Candle's and ggml's Metal code share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .linear import Kernel, Shape
from .order import IN_ORDER, Order, Walk
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


def affine_bits(shape: Shape) -> int | None:
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
