"""The order of one attention row as data: four shapes of kernel, and the rules by which they split the keys.

A *position* is a key's number plus the call's offset: keys in front that are masked move all others, and lanes,
streams, tiles and splits follow positions, never numbers. All sums are float32; every multiply-add is one FMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Base = Literal["e", "2"]

# A FlashAttention kernel works on 64 query rows at a time when it splits the keys.
_ROWS_OF_A_SPLIT = 64
_MOST_SPLITS = 128


@dataclass(frozen=True)
class Streams:
    """The key at position p belongs to stream p % (blocks * in_block); streams are softmaxes of their own.

    A score is the sum over 32 lanes, each with ceil(D / 32) consecutive items of the query times ``scale`` and of
    the key; lanes halve 16, 8, 4, 2, 1. A stream keeps its maximum m (from ``floor``), its sum s and its output o:
    with m' = max(m, score), f = exp(m - m') and e = exp(score - m') it becomes m', s f + e and o f + (e v).

    The ``in_block`` streams of a block are joined first: sums times exp(m - block's maximum) halve, outputs are
    added in turn. A block's output is rounded to ``partials``. Blocks are dealt over 32 lanes which halve; a lane
    adds its blocks' products in turn, by FMA from +0.0 if ``lanes`` is "fma", else it is one product. Last the
    output is divided by the sum: "quotient"; "guarded" leaves it alone where the sum is 0; "reciprocal" multiplies
    by one over the sum, or by 0.

    ``blocks`` None: the rule of ``blocks`` for the chip ``letter``. ``base`` "2": powers of two, and log2 e is a
    factor of the scale (``double_scale``: multiplied in float64), of float masks and of sinks.
    """

    blocks: int | None = 32
    in_block: int = 1
    base: Base = "e"
    double_scale: bool = False
    floor: float = float(np.finfo(np.float32).min)
    partials: Literal["float32", "dtype"] = "float32"
    lanes: Literal["product", "fma"] = "product"
    divide: Literal["quotient", "guarded", "reciprocal"] = "guarded"
    letter: str = "s"
    sinks: bool = True


@dataclass(frozen=True)
class Tiles:
    """Keys in tiles of consecutive positions; a tile's scores are chains over the head dimension.

    ``sizes``: the tile is the second number of the first pair whose first number is at least D. ``scale`` tells
    where the scale and log2 e go: into the "query", rounded to the dtype twice, as is their product; on the
    "score", float32; on the "exponent", exp2(score c - max c) by one FMA; or "fused" with the mask by one FMA.
    ``query`` rounds the query first.

    In a tile, with m' the maximum of m (from ``floor``) and the tile's scores, f = exp(m - m') and weights
    exp(score - m'): the sum becomes s f + the tile's, the output o f, then one chain goes on over the tile's keys,
    ascending, with weights rounded to ``weights``. ``sums`` is the order of the tile's: "eights" adds neighbours in
    every 8 (1, 2, 4 apart) and the eights in turn; "pairs" adds neighbours, then halves; "quads" instead keeps four
    sums for the whole row, position p in p % 8 // 2, joined 2 apart, then 1.

    ``half_output``: in a bfloat16 call the output is held in float16, rounded when scaled and after every 8 keys.
    ``divide``: by the sum, or times one over it. ``sinks`` join "first", "last" or are not supported. ``sms`` not
    None: the tiles are split over ``num_splits`` blocks, joined by their log-sum-exp. ``widest``: largest D.
    ``packed``: the kernel knows no padding, so tiles begin at the first key that any row of a batch entry attends.
    """

    sizes: tuple[tuple[int, int], ...]
    scale: Literal["query", "score", "exponent", "fused"]
    base: Base
    sums: Literal["eights", "pairs", "quads"]
    descending: bool = False
    query: Literal["dtype", "float16", "bfloat16_or_float16"] = "dtype"
    weights: Literal["float32", "dtype"] = "float32"
    half_output: bool = False
    divide: Literal["quotient", "reciprocal"] = "quotient"
    floor: float = float(np.finfo(np.float32).min)
    sinks: Literal["first", "last", ""] = ""
    sms: int | None = None
    widest: int | None = None
    packed: bool = False

    def size(self, width: int) -> int:
        """Keys in a tile for the head dimension ``width``."""
        return next(size for limit, size in self.sizes if width <= limit)


@dataclass(frozen=True)
class Dealt:
    """Blocks of 32 positions dealt over 32 workgroups of 1, 2 or 4 simdgroups, which join by halving.

    The query is rounded to float16, and so are bfloat16 keys and values. A simdgroup's 32 lanes make 1, 2 or 4
    teams (D a multiple of 128, of 64, of 32). A lane of a team takes four items at a time, their dot product (one
    product, three FMAs) is added to its total, and the team halves; score times scale plus mask is one FMA. Sums of
    a block's 32 weights halve 16 to 1. Team t chains the keys t, t + teams, ... of the block from +0.0, teams
    halve, and the output becomes (o f) + that, two roundings. Workgroups join as 32 lanes that halve, times one
    over the sum. A sink joins last, in the first simdgroup.
    """

    block: int = 32
    workgroups: int = 32

    def teams(self, width: int) -> int:
        """Teams of a simdgroup, or 0 where the kernel has no form for the head dimension ``width``."""
        return next((teams for teams in (1, 2, 4) if width % (128 // teams) == 0), 0)

    def simdgroups(self, positions: int) -> int:
        """Simdgroups of a workgroup for that many positions."""
        groups = 1
        while groups < 4 and 2 * self.workgroups * groups * self.block < positions:
            groups *= 2
        return groups


@dataclass(frozen=True)
class Unfused:
    """Scores, softmax and values as operations of their own, each result rounded to the dtype.

    The query is multiplied by the scale in the dtype; a score is a chain over D, a float mask is added in the
    dtype. The softmax is float32: thread t takes the positions 4 t to 4 t + 3 of every ``round`` (a sink is
    position 0 and moves the others), lanes of 32 threads halve, then the 32 groups. Beyond one round a thread keeps
    its own maximum, which is evened out lane by lane and group by group. Values are one chain over ascending keys.
    """

    round: int = 4096


AttentionOrder: TypeAlias = Streams | Tiles | Dealt | Unfused


class AttentionShape(NamedTuple):
    """The sizes of a call: q is (batch * heads * rows, width), ``dtype`` a number in ``rounding.DTYPES``."""

    heads: int
    kv_heads: int
    rows: int
    keys: int
    width: int
    value_width: int
    offset: int
    causal: int
    dtype: int


class Operands(NamedTuple):
    """The arrays of a call, C-contiguous float32.

    ``q`` (batch * heads * rows, width), ``keys`` (batch * kv_heads, width, keys), ``values`` (batch * kv_heads,
    keys, value_width), ``mask`` broadcastable to (batch, heads, rows, keys) with all its keys, -inf where a key is
    masked, or of no key at all; ``sinks`` (heads,) or empty; ``out`` (batch * heads * rows, value_width).
    """

    q: Float32
    keys: Float32
    values: Float32
    mask: Float32
    sinks: Float32
    out: Float32

    @property
    def cost(self) -> int:
        """Multiply-adds in all, about."""
        rows, width = self.out.shape
        return int(rows * self.keys.shape[2] * (self.q.shape[1] + width))


def blocks(letter: str, n: int, keys: int) -> int:
    """Blocks of MLX's two-pass kernel on the chip ``letter`` for n = query rows times query heads per key head.

    ``keys`` counts positions. Read in ml-explore/mlx mlx/backend/metal/scaled_dot_product_attention.cpp,
    sdpa_vector_2pass.
    """
    if letter == "s":
        if keys <= 1024 or n <= 4:
            return 64
        return next(
            (count for limit, count in ((8192, 128), (32768, 256), (65536, 512)) if keys <= limit), 1024
        )
    if letter == "d":
        if n <= 2 and keys > 8192:
            return 256
        if n >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 128
    return 64 if n >= 4 else 32


def num_splits(batch: int, shape: AttentionShape, tile: int, sms: int) -> int:
    """How many splits FlashAttention 2 makes of the positions: as many as fill the multiprocessors well.

    Read in Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp, num_splits_heuristic and its callers: one query
    row counts as the rows of the query heads that share a key head, multiprocessors count twice, and the arithmetic
    is float32.
    """
    heads, rows = shape.heads, shape.rows
    if rows == 1 and heads > shape.kv_heads and shape.width % 8 == 0:
        heads, rows = shape.kv_heads, heads // shape.kv_heads
    jobs = batch * heads * -(-rows // _ROWS_OF_A_SPLIT)
    units = 2 * sms
    tiles = -(-(shape.offset + shape.keys) // tile)
    if np.float32(jobs) >= np.float32(0.8) * np.float32(units):
        return 1
    eligible = [
        splits
        for splits in range(1, min(_MOST_SPLITS, units, tiles) + 1)
        if splits == 1 or -(-tiles // splits) != -(-tiles // (splits - 1))
    ]
    waves = [np.float32(jobs * splits) / np.float32(units) for splits in eligible]
    efficiency = [float(wave / np.ceil(wave)) for wave in waves]
    return next(
        splits
        for splits, reached in zip(eligible, efficiency, strict=True)
        if reached >= 0.85 * max(efficiency)
    )
