"""Which roundings an attention path does, read off its order."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from detdiff.errors import OracleRefused
from detdiff_kernels import Call, kernel, kernel_names, profile
from detdiff_kernels.attention import Attention
from detdiff_kernels.attention_order import Dealt, Streams, Tiles, Unfused

from .arithmetic import Arithmetic

Count = tuple[int, str]
"""So many roundings to that dtype."""


@dataclass(frozen=True)
class Attending:
    """The roundings of one attention kernel.

    ``query`` and ``cached`` stage the operands: roundings of each item of the query, and of keys and values.
    ``multiplied``: the query is the product with the scale, both rounded to the dtype, which can be done again. ``score``
    are those that a product passes on its way to a score; ``scores`` those of the score itself, at its own size.
    ``apart`` and ``whole`` count float32 roundings of the exponent, relative to the distance to the largest score and to
    the largest score itself; ``power`` those of an exponential. ``sums`` are those of the weighted sum and of the
    weights' sum together, ``weights`` those of a weight that only the weighted sum sees, ``held`` those of an output
    that is held in another dtype on the way.
    """

    query: tuple[Count, ...]
    cached: tuple[Count, ...]
    score: tuple[Count, ...]
    scores: tuple[Count, ...]
    apart: int
    whole: int
    power: int
    sums: tuple[Count, ...]
    weights: tuple[Count, ...] = ()
    held: tuple[Count, ...] = ()
    multiplied: bool = False


def attending(
    arithmetic: Arithmetic, rows: int, keys: int, width: int, heads: int, kv_heads: int, quantised: bool
) -> Attending:
    """The roundings of ``rows`` query rows over ``keys`` positions; ``quantised``: keys and values are codes.

    Raises OracleRefused where the kernel of a native path is not known.
    """
    if quantised:
        return _quantised(arithmetic.dtype, keys, width)
    name = arithmetic.reference
    if name is None and arithmetic.backend == "cpu":
        return _mlx_cpu(arithmetic.dtype, keys, width)
    if name is None:
        name = _native_kernel(arithmetic, arithmetic.rows or rows, keys, width, heads, kv_heads)
    found = kernel(name)
    if not isinstance(found, Attention):
        raise OracleRefused(
            f"The path {arithmetic.path} is a linear kernel, and the site is attention. Give the site's own path."
        )
    order, dtype = found.order, arithmetic.dtype
    if isinstance(order, Streams):
        return _streams(order, dtype, keys, width)
    if isinstance(order, Tiles):
        return _tiles(order, dtype, keys, width)
    if isinstance(order, Dealt):
        return _dealt(order, dtype, keys, width)
    return _unfused(order, dtype, keys, width)


def _native_kernel(
    arithmetic: Arithmetic, rows: int, keys: int, width: int, heads: int, kv_heads: int
) -> str:
    call = Call(
        "attention", rows, second_last=rows, dtype=arithmetic.dtype, query=rows, keys=keys, head_dim=width,
        heads=heads, kv_heads=kv_heads,
    )  # fmt: skip
    chosen = profile(f"mlx-{arithmetic.backend}").choose(call)
    if chosen.kernel not in kernel_names():
        raise OracleRefused(
            f"MLX's own attention kernel for {rows} rows and {keys} keys on {arithmetic.backend} is not among the reference "
            f"kernels, so its roundings are not known ({chosen.rule}). Judge a reference path instead."
        )
    return chosen.kernel


def _mlx_cpu(dtype: str, keys: int, width: int) -> Attending:
    """Operations of their own, each result in the dtype, sums in float32 in any order.

    Read in ml-explore/mlx 0017d3c mlx/fast.cpp scaled_dot_product_attention, fallback, 027ef87 mlx/backend/cpu/softmax.cpp
    softmax and 2c5fe62 mlx/backend/cpu/simd/math.h exp: a factor log2 e, a floor, and a polynomial of six steps.
    """
    return Attending(
        query=(),
        cached=(),
        score=((width + 1, "float32"),),
        scores=((2, dtype),),
        apart=3,
        whole=0,
        power=8,
        sums=((2 * keys + 6, "float32"),),
        weights=((1, dtype),),
        multiplied=True,
    )


def _quantised(dtype: str, keys: int, width: int) -> Attending:
    """mlx-lm's attention over a quantised cache: both products are quantised ones, whose sums are in the dtype on a CPU.

    Read in mlx-lm 0.32.2 models/base.py quantized_scaled_dot_product_attention.
    """
    return Attending(
        query=(),
        cached=((3, dtype),),
        score=((width + 1, dtype),),
        scores=((2, dtype),),
        apart=3,
        whole=0,
        power=8,
        sums=((keys + 6, "float32"), (keys + 1, dtype)),
        weights=((1, dtype),),
        multiplied=True,
    )


def _unfused(order: Unfused, dtype: str, keys: int, width: int) -> Attending:
    threads = order.round // 4
    rounds = ceil((keys + 1) / order.round)
    # A thread's own sum (four a round, and a factor between rounds), two trees, and the evening out.
    sums = 4 * rounds + 2 * rounds + 10 + 6 + threads // 32 // 16
    return Attending(
        query=(),
        cached=(),
        score=((width + 1, "float32"),),
        scores=((2, dtype),),
        apart=3,
        whole=0,
        power=1,
        sums=((keys + sums + 4, "float32"),),
        weights=((1, dtype),),
        multiplied=True,
    )


def _streams(order: Streams, dtype: str, keys: int, width: int) -> Attending:
    # The fewest blocks there can be have the longest streams, the most the longest sum of blocks.
    fewest, most = (order.blocks, order.blocks) if order.blocks else (32, 1024)
    stream = ceil(keys / (fewest * order.in_block)) + 1
    joins = (order.in_block + 3 if order.in_block > 1 else 0) + 2 * ceil(most / 32) + 3 + 5 + 2
    # A key multiplies what is there by a power, and is added by an FMA; its own product rounds too. The sum of the
    # weights goes the same way.
    total = 2 * (3 * stream + joins)
    return Attending(
        query=((4, "float32"),),
        cached=(),
        score=((ceil(width / 32) + 7, "float32"),),
        scores=((2, "float32"),),
        apart=4,
        whole=0,
        power=1,
        sums=((total, "float32"),),
        held=((1, dtype),) if order.partials == "dtype" else (),
    )


def _tiles(order: Tiles, dtype: str, keys: int, width: int) -> Attending:
    size = order.size(width)
    tiles = ceil(keys / size) + 1
    query: tuple[Count, ...] = ()
    if order.scale == "query":
        query = ((2, "float32"), (2, dtype))
    elif order.query == "float16" or (order.query == "bfloat16_or_float16" and dtype != "bfloat16"):
        query = ((1, "float16"),) if dtype == "float32" else ()
    splits = 128 if order.sms is not None else 0
    weights_sum = keys // 4 + size if order.sums == "quads" else tiles + size // 8 + 3
    half = order.half_output and dtype == "bfloat16"
    return Attending(
        query=query,
        cached=(),
        score=((width + 3, "float32"),),
        scores=((3, "float32"),),
        apart=5,
        # Shifts are rounded where the scale is in the exponent, and the logarithms of splits are added to maxima.
        whole=(3 if order.scale == "exponent" else 0) + (8 if splits else 0),
        power=1,
        sums=((keys + 3 * tiles + weights_sum + 3 * tiles + 3 + 2 * (splits and splits + 12), "float32"),),
        weights=((1, dtype),) if order.weights == "dtype" else (),
        held=((ceil(keys / 8) + 3 * tiles + 2, "float16"),) if half else (),
    )


def _dealt(order: Dealt, dtype: str, keys: int, width: int) -> Attending:
    teams = max(order.teams(width), 1)
    turns = ceil(ceil(keys / order.block) / order.workgroups) + 1
    # In a block: a chain of a team, the teams' halving, the product with the power and the sum with it.
    numerator = order.block // teams + 2 + 3 * turns
    denominator = 5 + 2 * turns
    joins = 2 * 3 + 2 + 5 + 2
    return Attending(
        query=((1, "float16"),) if dtype != "float16" else (),
        cached=((1, "float16"),) if dtype == "bfloat16" else (),
        score=((width // 4 + 8, "float32"),),
        scores=((3, "float32"),),
        apart=4,
        whole=0,
        power=1,
        sums=((numerator + denominator + 2 * joins + 6, "float32"),),
    )
