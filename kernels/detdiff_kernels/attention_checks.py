"""What an attention call is refused for, before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .attention_order import AttentionOrder, Dealt, Shape, Streams, Tiles, Unfused
from .errors import BadOperand, UnsupportedFormat
from .rounding import DTYPES

Float32 = NDArray[np.float32]
Mask = str | NDArray[Any] | None


def shape_of(name: str, q: Float32, k: Float32, v: Float32, mask: Mask, dtype: str, offset: int) -> Shape:
    """The sizes of a call of the kernel ``name``; raises BadOperand for arrays, masks or arguments that do not fit."""
    arrays = {"q": q, "k": k, "v": v}
    for what, array in arrays.items():
        if array.dtype != np.float32 or array.ndim != 4:
            raise BadOperand(
                f"{name} was given {what} of dtype {array.dtype} and shape {array.shape}; it takes float32 "
                "of shape (batch, heads, length, head dimension). Widen the values to float32 and name their "
                "dtype in dtype=."
            )
    if dtype not in DTYPES:
        raise BadOperand(f"{name} was given dtype {dtype!r}; it takes one of {', '.join(DTYPES)}.")
    fits = (
        q.shape[0] == k.shape[0]
        and k.shape[:3] == v.shape[:3]
        and q.shape[3] == k.shape[3]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and min(q.shape[3], k.shape[2], v.shape[3]) > 0
    )
    if not fits:
        raise BadOperand(
            f"{name} was given q {q.shape}, k {k.shape} and v {v.shape}; it takes (B, H, Lq, D), "
            "(B, Hk, Lk, D) and (B, Hk, Lk, Dv) with H a multiple of Hk, and at least one key, D and Dv. "
            "Check the order of the axes, and that k and v come from the same cache."
        )
    if offset < 0:
        raise BadOperand(f"{name} was given offset {offset}; masked keys in front are counted from 0.")
    causal = isinstance(mask, str)
    if causal and mask != "causal":
        raise BadOperand(f'{name} was given the mask {mask!r}; the only name of a mask is "causal".')
    if mask is not None and not isinstance(mask, str):
        _check_mask(name, mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    return Shape(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        rows=q.shape[2],
        keys=k.shape[2],
        width=q.shape[3],
        value_width=v.shape[3],
        offset=offset,
        causal=int(causal),
        dtype=DTYPES.index(dtype),
    )


def _check_mask(name: str, mask: NDArray[Any], full: tuple[int, ...]) -> None:
    fits = mask.ndim <= 4 and all(
        size in (1, whole) for size, whole in zip(mask.shape[::-1], full[::-1], strict=False)
    )
    if not fits or not (mask.dtype == np.bool_ or np.issubdtype(mask.dtype, np.floating)):
        raise BadOperand(
            f"{name} was given a mask of dtype {mask.dtype} and shape {mask.shape}; it takes bool, True where "
            f"a key is attended, or a float that is added, broadcastable to {full}. Slice or expand the mask."
        )


def check_order(
    name: str, order: AttentionOrder, shape: Shape, sinks: Float32 | None, blocks: int | None
) -> None:
    """Raises BadOperand for sinks or blocks, and UnsupportedFormat for widths, that the order has no use for."""
    takes_sinks = isinstance(order, Dealt | Unfused) or bool(order.sinks)
    if sinks is not None and not takes_sinks:
        raise BadOperand(f"{name} was given sinks; the kernel has none. Leave them out, or take another.")
    if sinks is not None and (sinks.dtype != np.float32 or sinks.shape != (shape.heads,)):
        raise BadOperand(
            f"{name} was given sinks of dtype {sinks.dtype} and shape {sinks.shape}; it takes float32 of "
            f"shape ({shape.heads},), one for each query head."
        )
    if blocks is not None and (
        not isinstance(order, Streams) or order.blocks is not None or blocks < 32 or blocks % 32
    ):
        raise BadOperand(
            f"{name} was given blocks={blocks}; only a kernel that chooses its number of blocks takes one, "
            "and it must be a multiple of 32. Leave it out."
        )
    if isinstance(order, Dealt):
        teams = order.teams(shape.width)
        if not teams or shape.value_width % (128 // teams):
            raise UnsupportedFormat(
                f"{name} was given heads of width {shape.width} and values of width {shape.value_width}; "
                "its lanes take 4 items each, so both must be multiples of 32, and the value width of 64 or 128 "
                "where the other is. Take a kernel of tiles, such as ggml-metal/flash_attn."
            )
    if isinstance(order, Tiles) and order.widest is not None:
        if max(shape.width, shape.value_width) > order.widest:
            raise UnsupportedFormat(
                f"{name} was given heads of width {shape.width} and values of width {shape.value_width}; "
                f"the kernel has forms up to {order.widest}. Take another kernel for such heads."
            )
