"""Calls of the attention kernels that several tests make."""

from __future__ import annotations

from typing import Any

import numpy as np
from attention_orders import Call
from numpy.typing import NDArray

from detdiff_kernels.attention import ATTENTION, Attention
from detdiff_kernels.attention_order import Dealt, Unfused
from detdiff_kernels.rounding import rounded

Float32 = NDArray[np.float32]


def takes_sinks(name: str) -> bool:
    order = ATTENTION[name].order
    return isinstance(order, Dealt | Unfused) or bool(order.sinks)


def attend(kernel: Attention, call: Call, **other: Any) -> Float32:
    return kernel(
        call.q,
        call.k,
        call.v,
        call.scale,
        mask=call.mask,
        dtype=call.dtype,
        offset=call.offset,
        sinks=call.sinks,
        **other,
    )


def same(a: Float32, b: Float32) -> bool:
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def normals(*shape: int, seed: int = 0, dtype: str = "float32") -> Float32:
    return rounded(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def plain(name: str, keys: int, dtype: str, rows: int = 1, batch: int = 1, seed: int = 0) -> Call:
    """Random operands of a width that the kernel has a form for."""
    width = 64 if isinstance(ATTENTION[name].order, Dealt) else 12
    shapes = [(batch, 4, rows, width), (batch, 2, keys, width), (batch, 2, keys, width)]
    q, k, v = (normals(*shape, seed=3 * seed + part, dtype=dtype) for part, shape in enumerate(shapes))
    return Call(q, k, v, 0.7, dtype=dtype)
