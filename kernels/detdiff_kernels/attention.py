"""Reference kernels of attention, by name. To add one, add a line to the table; see docs/kernels.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from . import attention_order as orders
from .attention_order import AttentionOrder, AttentionShape, Dealt, Operands, Streams, Tiles, Unfused
from .errors import BadOperand, UnsupportedFormat
from .rounding import DTYPES, rounded

Float32 = NDArray[np.float32]
Mask = str | NDArray[Any] | None


def shape_of(
    name: str, q: Float32, k: Float32, v: Float32, mask: Mask, dtype: str, offset: int
) -> AttentionShape:
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
    return AttentionShape(
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
    name: str, order: AttentionOrder, shape: AttentionShape, sinks: Float32 | None, blocks: int | None
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


_LOG2E = 1.4426950408889634
_LOWEST = {
    "float32": float(np.finfo(np.float32).min),
    "float16": -65504.0,
    "bfloat16": -3.3895313892515355e38,
}


@dataclass(frozen=True)
class Attention:
    """Attention whose every rounding is fixed. A row depends on its own query, keys and values only.

    ``source`` says where the order was found; ``tag`` is read, inferred or measured.
    """

    name: str
    order: AttentionOrder
    source: str
    tag: str
    op: ClassVar[str] = "attention"

    def __call__(
        self,
        q: Float32,
        k: Float32,
        v: Float32,
        scale: float,
        *,
        mask: Mask = None,
        dtype: str = "float32",
        offset: int = 0,
        sinks: Float32 | None = None,
        blocks: int | None = None,
    ) -> Float32:
        """The attention output (B, H, Lq, Dv), float32 that holds values of ``dtype``.

        q (B, H, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, Dv) and sinks (H,) are float32 that hold values of ``dtype``;
        query head h reads key head h // (H / Hk). ``mask`` is None, "causal" (row i attends the keys up to
        Lk - Lq + i), or an array broadcastable to (B, H, Lq, Lk): bool, True where attended, or float, rounded to
        ``dtype`` and added; below the dtype's lowest finite number, or NaN, it masks. A masked key never counts,
        whatever it holds, and a row without a key is +0.0: where the real kernel weighs a masked value by 0, or
        averages in such a row, this differs for values that are not finite, or for rows that nobody reads.

        ``offset`` p gives what p masked keys in front of k and v would give, which is nothing where the kernel knows
        no padding. ``blocks``: how many blocks the
        kernels of two passes use, a multiple of 32; without it, their own rule.

        Raises BadOperand for shapes, dtypes, masks or arguments that do not fit, and UnsupportedFormat for a head
        dimension that the kernel has no form for.
        """
        packed = isinstance(self.order, Tiles) and self.order.packed
        shape = shape_of(self.name, q, k, v, mask, dtype, 0 if packed else offset)
        check_order(self.name, self.order, shape, sinks, blocks)
        if packed and isinstance(mask, np.ndarray):
            leads = _leading(self._mask(mask, shape.keys, dtype), len(q))
            if any(leads):
                # Without its padding every entry of the batch is a call of its own.
                return np.concatenate(
                    [
                        self(
                            q[i : i + 1],
                            k[i : i + 1, :, lead:],
                            v[i : i + 1, :, lead:],
                            scale,
                            mask=_entry(mask, i, shape.keys)[..., lead:],
                            dtype=dtype,
                            sinks=sinks,
                        )
                        for i, lead in enumerate(leads)
                    ]
                )
        operands = Operands(
            q=_read_only(self._query(q.reshape(-1, shape.width), scale, dtype)),
            keys=_read_only(self._held(k, dtype).reshape(-1, shape.keys, shape.width).swapaxes(1, 2)),
            values=_read_only(self._held(v, dtype).reshape(-1, shape.keys, shape.value_width)),
            mask=_read_only(self._mask(mask, shape.keys, dtype)),
            sinks=_read_only(self._sinks(sinks)),
            out=np.empty((q.shape[0] * shape.heads * shape.rows, shape.value_width), np.float32),
        )
        if operands.out.size:
            self._attend(shape, operands, np.float32(scale), blocks)
        return operands.out.reshape(q.shape[0], shape.heads, shape.rows, shape.value_width)

    def _attend(
        self, shape: AttentionShape, operands: Operands, scale: np.float32, blocks: int | None
    ) -> None:
        # The loops are imported here because they bring numba.
        if isinstance(self.order, Streams):
            from . import attention_streams

            queries = shape.rows * (shape.heads // shape.kv_heads)
            rule = orders.blocks(self.order.letter, queries, shape.offset + shape.keys)
            attention_streams.attend(self.order, shape, operands, blocks or self.order.blocks or rule)
        elif isinstance(self.order, Tiles):
            from . import attention_tiles

            splits = 1
            if self.order.sms is not None:
                batch = operands.keys.shape[0] // shape.kv_heads
                splits = orders.num_splits(batch, shape, self.order.size(shape.width), self.order.sms)
            attention_tiles.attend(self.order, shape, operands, scale, splits)
        elif isinstance(self.order, Dealt):
            from . import attention_dealt

            attention_dealt.attend(self.order, shape, operands, scale)
        else:
            from . import attention_unfused

            attention_unfused.attend(self.order, shape, operands)

    def _query(self, q: Float32, scale: float, dtype: str) -> Float32:
        order, factor = self.order, np.float32(scale)
        with np.errstate(all="ignore"):
            if isinstance(order, Streams):
                if order.double_scale:
                    factor = np.float32(float(factor) * _LOG2E)
                elif order.base == "2":
                    factor = factor * np.float32(_LOG2E)
                q = factor * q
            elif isinstance(order, Unfused):
                q = rounded(rounded(np.array([factor]), dtype) * q, dtype)
            elif isinstance(order, Dealt):
                q = rounded(q, "float16")
            elif order.scale == "query":
                q = rounded(rounded(np.array([factor * np.float32(_LOG2E)]), dtype) * q, dtype)
            elif order.query != "dtype" and not (dtype == "bfloat16" and "bfloat16" in order.query):
                q = rounded(q, "float16")
        return q

    def _held(self, array: Float32, dtype: str) -> Float32:
        if isinstance(self.order, Dealt) and dtype == "bfloat16":
            return rounded(np.ascontiguousarray(array), "float16")
        return array

    def _mask(self, mask: Mask, keys: int, dtype: str) -> Float32:
        if mask is None or isinstance(mask, str):
            return np.empty((1, 1, 1, 0), np.float32)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if mask.dtype == np.bool_:
            added = np.where(mask, np.float32(0.0), np.float32(-np.inf))
        else:
            with np.errstate(all="ignore"):
                added = rounded(np.ascontiguousarray(mask, np.float32), dtype)
                added = np.where(added >= np.float32(_LOWEST[dtype]), added, np.float32(-np.inf))
        return np.broadcast_to(added, (*added.shape[:3], keys))

    def _sinks(self, sinks: Float32 | None) -> Float32:
        if sinks is None:
            return np.empty(0, np.float32)
        if isinstance(self.order, Streams) and self.order.base == "2":
            return (sinks.astype(np.float64) * _LOG2E).astype(np.float32)
        if isinstance(self.order, Tiles) and self.order.base == "2":
            return np.float32(_LOG2E) * sinks
        return sinks


def _leading(added: Float32, entries: int) -> list[int]:
    """How many keys in front no row of a batch entry attends, by entry; of ``added`` (B or 1, .., .., keys)."""
    attended: NDArray[np.bool_] = np.any(added > -np.inf, axis=(1, 2))
    found = np.where(attended.any(axis=1), attended.argmax(axis=1), 0)
    return [int(lead) for lead in np.broadcast_to(found, entries)]


def _entry(mask: NDArray[Any], entry: int, keys: int) -> NDArray[Any]:
    """The mask of one batch entry, with all its keys."""
    whole = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return np.broadcast_to(whole[min(entry, len(whole) - 1)], (*whole.shape[1:3], keys))[None]


def _read_only(array: Float32) -> Float32:
    """The array C-contiguous and read-only, which is the one type that the loops are compiled for."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


_NEGATIVE_INFINITY = float("-inf")
_ANY_WIDTH = 1 << 31
_STEEL_SIZES = ((127, 32), (_ANY_WIDTH, 16))
_FLASH_SIZES = ((64, 256), (128, 128), (_ANY_WIDTH, 64))

_MLX = "ml-explore/mlx mlx/backend/metal/kernels"
_MLX_CUDA = "ml-explore/mlx 08be80b mlx/backend/cuda/scaled_dot_product_attention.cu"
_CANDLE = "huggingface/candle 0cf516d candle-metal-kernels/src/metal_src/scaled_dot_product_attention.metal"
_GGML = "ggml-org/ggml 166c4e1 src/ggml-metal/ggml-metal.metal"
_FLASH = "Dao-AILab/flash-attention 0142ff0 csrc/flash_attn/src/flash_fwd_kernel.h and flash_api.cpp"
_SIMD = "inferred: the fast exponential, where FMAs contract, and the tree of a simdgroup's sum"
_MMA = "inferred: the fast exponential, where FMAs contract, and a chain for the order inside an MMA"
_LIBRARY = "inferred: an ascending chain for what a closed library does"


def _flash(sizes: tuple[tuple[int, int], ...], **more: Any) -> Tiles:
    """FlashAttention's arithmetic over tiles of these sizes."""
    return Tiles(
        sizes, scale="exponent", base="2", sums="quads", weights="dtype", divide="reciprocal",
        floor=_NEGATIVE_INFINITY, **more,
    )  # fmt: skip


_TABLE = (
    Attention(
        "mlx-metal/sdpa_vector",
        Streams(),
        f"{_MLX}/sdpa_vector.h sdpa_vector, the same from 0.29.4 to 0.32.4 (read); {_SIMD}",
        "inferred",
    ),
    Attention(
        "mlx-metal/sdpa_vector_2pass",
        Streams(blocks=None, partials="dtype", lanes="fma"),
        f"{_MLX}/sdpa_vector.h sdpa_vector_2pass_1 and _2, from 0.30.4 to 0.32.4 (read); {_SIMD}; stands for "
        "sdpa_vector_2pass_1_gqa too, which takes contiguous chunks",
        "inferred",
    ),
    Attention(
        "mlx-metal/sdpa_vector_2pass-0.30.3",
        Streams(in_block=8),
        f"{_MLX}/sdpa_vector.h sdpa_vector_2pass_1 and _2, up to 0.30.3: 32 blocks of 8 streams, float32 (read); "
        f"{_SIMD}",
        "inferred",
    ),
    Attention(
        "mlx-metal/sdpa_steel",
        Tiles(_STEEL_SIZES, scale="score", base="2", sums="eights", sinks="first"),
        f"{_MLX}/steel/attn/kernels/steel_attention.h attention and mma.h row_reduce, from 0.31.0 to 0.32.4 (read); "
        f"{_MMA}",
        "inferred",
    ),
    Attention(
        "mlx-metal/sdpa_steel-0.30.6",
        Tiles(_STEEL_SIZES, scale="query", base="2", sums="eights", sinks="first"),
        f"{_MLX}/steel/attn/kernels/steel_attention.h attention, TransformScale in the dtype up to 0.30.6 (read); "
        f"{_MMA}",
        "inferred",
    ),
    Attention(
        "mlx-metal/sdpa_unfused",
        Unfused(),
        "ml-explore/mlx 0017d3c mlx/fast.cpp scaled_dot_product_attention, fallback; "
        f"{_MLX}/softmax.h softmax_single_row and softmax_looped (read); {_MMA}, for every matrix product",
        "inferred",
    ),
    Attention(
        "mlx-cuda/sdpa_vector",
        Streams(base="2", double_scale=True, divide="reciprocal"),
        f"{_MLX_CUDA} kernel_sdpav_1pass (read); {_SIMD}",
        "inferred",
    ),
    Attention(
        "mlx-cuda/sdpa_vector_2pass",
        Streams(in_block=8, base="2", divide="reciprocal"),
        f"{_MLX_CUDA} kernel_sdpav_2pass_1 and _2: 32 blocks of 8 streams, float32 (read); {_SIMD}",
        "inferred",
    ),
    Attention(
        "mlx-cuda/sdpa_unfused",
        Unfused(),
        f"ml-explore/mlx 0017d3c mlx/fast.cpp scaled_dot_product_attention, fallback (read); {_LIBRARY}, and the "
        "softmax of Metal for that of CUDA",
        "inferred",
    ),
    Attention(
        "mlx-cuda/sdpa_cudnn",
        _flash(((_ANY_WIDTH, 128),), widest=128),
        f"cuDNN is closed: tiles of 128 keys that ascend and the arithmetic of FlashAttention stand for it; {_LIBRARY}",
        "inferred",
    ),
    Attention(
        "candle-metal/sdpa_vector",
        Streams(floor=_NEGATIVE_INFINITY, divide="quotient", sinks=False),
        f"{_CANDLE} sdpa_vector (read); {_SIMD}",
        "inferred",
    ),
    Attention(
        "candle-metal/sdpa_vector_2pass",
        Streams(in_block=8, floor=-1e9, divide="quotient", sinks=False),
        f"{_CANDLE} sdpa_vector_2pass_1 and _2: 32 blocks of 8 streams, float32 (read); the first pass lacks its end "
        f"there, that of the MLX kernel it was taken from stands for it; {_SIMD}",
        "inferred",
    ),
    Attention(
        "candle-metal/sdpa_full",
        Tiles(_STEEL_SIZES, scale="query", base="2", sums="eights"),
        "huggingface/candle candle-metal-kernels/src/kernels/sdpa.rs call_sdpa_full: tiles of 32 keys, 16 from a head "
        f"dimension of 128 on (read); the kernel is MLX's of that time; {_MMA}",
        "inferred",
    ),
    Attention(
        "ggml-metal/flash_attn_vec",
        Dealt(),
        f"{_GGML} kernel_flash_attn_ext_vec and _vec_reduce, ggml-metal-ops.cpp ggml_metal_op_flash_attn_ext (read); "
        f"{_SIMD}",
        "inferred",
    ),
    Attention(
        "ggml-metal/flash_attn",
        Tiles(
            ((_ANY_WIDTH, 64),),
            scale="fused",
            base="e",
            sums="pairs",
            query="bfloat16_or_float16",
            half_output=True,
            divide="reciprocal",
            floor=-1.7014117331926443e38,
            sinks="last",
        ),
        f"{_GGML} kernel_flash_attn_ext_impl (read); {_MMA}",
        "inferred",
    ),
    Attention(
        "flash-split-kv/attention",
        _flash(_FLASH_SIZES, descending=True, sms=108, widest=256),
        f"{_FLASH}: compute_attn_1rowblock_splitkv, combine_attn_seqk_parallel, num_splits_heuristic (read); {_MMA}",
        "inferred",
    ),
    Attention(
        "batch-invariant/attention",
        _flash(((_ANY_WIDTH, 256),), packed=True),
        "sgl-project/sglang and vllm-project/vllm fix the split of the keys, 256 in a tile, or make one split (read); "
        "FlashAttention's arithmetic and ascending tiles are inferred",
        "inferred",
    ),
)

ATTENTION = {entry.name: entry for entry in _TABLE}
