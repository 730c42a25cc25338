"""The bound of attention, and the roundings of its paths: an error of the scores moves weights that sum to one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import OracleRefused
from detdiff_kernels import Call, kernel, kernel_names, profile
from detdiff_kernels.attention import Attention
from detdiff_kernels.attention_order import Dealt, Streams, Tiles, Unfused
from detdiff_kernels.rounding import rounded

from .bounds import BoundedOutputs, output_rounded
from .roundings import FLUSHED, LARGEST, SMALLEST, U32, UNIT, Arithmetic, Float64, growth

_DOUBLE = 2.0**-52
_CHUNK = 1 << 22  # float64 numbers that are looked at together


@dataclass(frozen=True, eq=False)
class AttentionOperation:
    """Attention of one request's rows: q (rows, heads, D), keys (kv heads, keys, D), values (kv heads, keys, Dv).

    ``bias`` (1 or heads, rows, keys) is added to the scores, -inf where a key is not attended; ``sinks`` (heads,).
    ``key_size`` and ``value_size`` are |scale| code + |bias| of a quantised cache, else None. ``roundings`` are those of the
    kernel where it is none that a path names. ``seen`` are the positions that a single row saw, where that is known.
    """

    q: Float64
    keys: Float64
    values: Float64
    scale: float
    bias: Float64
    sinks: Float64 | None = None
    key_size: Float64 | None = None
    value_size: Float64 | None = None
    roundings: AttentionRoundings | None = None
    seen: tuple[int, ...] | None = None

    def attends_as(self, other: AttentionOperation) -> bool:
        """Whether every head of another call's row sees the same keys."""
        return self._attended() == other._attended()

    def _attended(self) -> list[list[bytes]]:
        heads = np.broadcast_to(self.bias, (self.q.shape[1], *self.bias.shape[1:]))
        return [
            sorted(self.keys[:, key].tobytes() for key in np.flatnonzero((head > -np.inf).any(axis=0)))
            for head in heads
        ]

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        rows, heads, width = self.q.shape
        kv_heads, keys, value_width = self.values.shape
        quantised = self.key_size is not None
        own = self.roundings or attending(arithmetic, rows, keys, width, heads, kv_heads, quantised)
        plain = AttentionRoundings(
            score=((width + 3, "float32"),), apart=3, power=1, sums=((2 * keys + 4, "float32"),)
        )
        out = np.empty((4, rows, heads, value_width))
        empty = np.zeros((rows, heads, value_width), np.bool_)
        unbounded = np.zeros((rows, heads, value_width), np.bool_)
        step = max(1, _CHUNK // max(1, keys * value_width))
        for head in range(heads):
            for at in range(0, rows, step):
                part = slice(at, at + step)
                bias = self.bias[head if len(self.bias) > 1 else 0, part]
                found = _HeadRows(self, head, part, bias, arithmetic.dtype)
                out[0][part, head] = found.exact
                out[1][part, head], unbounded[part, head] = found.bound(own)
                out[2][part, head], _ = found.bound(plain)
                out[3][part, head] = found.scale
                empty[part, head] = found.empty[:, None]
        exact, error, yardstick, scale = out
        bound, over = output_rounded(exact, error, arithmetic)
        # A row that attends nothing is zeros in one kernel and an average in another; only its being finite is judged.
        bound[empty] = np.inf
        over &= ~empty
        yardstick = yardstick + arithmetic.unit * np.abs(exact) + arithmetic.smallest
        yardstick[empty] = np.inf
        text = (
            f"attention: sum pi |v - out| (exp(score error) - 1) + sums' roundings ({_words(own.sums)}) sum pi |v|, scores "
            f"{_words(own.score)}, output rounding"
        )
        return BoundedOutputs(exact, bound, yardstick, scale, unbounded | over, text)


def _words(counts: Iterable[Count]) -> str:
    return " and ".join(f"{count} to {dtype}" for count, dtype in counts) or "none"


def _grown(counts: Iterable[Count]) -> float:
    return growth(*((count, UNIT[dtype]) for count, dtype in counts))


def _tiny(counts: Iterable[Count]) -> float:
    return sum(count * SMALLEST[dtype] for count, dtype in counts)


class _HeadRows:
    """Some rows of one head: scores (rows, keys), weights that sum to one, outputs (rows, Dv)."""

    def __init__(
        self, op: AttentionOperation, head: int, rows: slice, bias: NDArray[np.float64], dtype: str
    ) -> None:
        kv = head // (op.q.shape[1] // len(op.keys))
        self.dtype = dtype
        self.op, self.head, self.kv = op, head, kv
        self.q, k, self.v = op.q[rows, head], op.keys[kv], op.values[kv]
        self.bias = bias
        with np.errstate(invalid="ignore", over="ignore"):
            plain = op.scale * (self.q @ k.T)
            self.plain = plain
            self.attended: NDArray[np.bool_] = np.asarray(bias > -np.inf)
            self.scores = np.where(self.attended, plain + np.where(self.attended, bias, 0), -np.inf)
            sink = -np.inf if op.sinks is None else op.sinks[head]
            self.most = np.maximum(self.scores.max(axis=1), sink)
            self.empty: NDArray[np.bool_] = np.asarray(~self.attended.any(axis=1), np.bool_)
            peak = np.where(np.isfinite(self.most), self.most, 0.0)
            powers = np.exp(self.scores - peak[:, None])
            total = powers.sum(axis=1) + np.exp(sink - peak)
            self.pi = powers / np.where(total > 0, total, 1.0)[:, None]
            self.sink = np.exp(sink - peak) / np.where(total > 0, total, 1.0)
            # A masked value never counts, whatever it holds; one that is attended does, NaN too.
            finite = np.isfinite(self.v)
            self.seen = np.where(finite & np.asarray(self.attended.any(axis=0)).reshape(-1, 1), self.v, 0.0)
            lost = np.where(self.attended, ~np.isfinite(plain), False).any(axis=1)
            self.not_finite: NDArray[np.bool_] = np.asarray(self.attended @ ~finite, np.bool_) | lost.reshape(
                -1, 1
            )
            self.exact = np.where(self.not_finite, np.nan, self.pi @ self.seen)
            self.scale = np.sqrt(np.square(self.pi) @ np.square(self.seen)) + np.abs(self.exact)

    def bound(self, own: AttentionRoundings) -> tuple[Float64, NDArray[np.bool_]]:
        """The error before the output is rounded, (rows, Dv), and where it may be infinite or NaN."""
        op = self.op
        with np.errstate(invalid="ignore", over="ignore"):
            error = self._score_error(own)
            peak = np.where(np.isfinite(self.most), self.most, 0.0)
            apart = np.where(self.attended, peak[:, None] - self.scores, 0.0)
            spread = np.where(self.attended, error, 0.0).max(axis=1, initial=0.0)[:, None]
            largest = np.abs(np.where(self.attended, self.scores, 0.0)).max(axis=1, initial=0.0)[:, None]
            if op.sinks is not None:
                largest = np.maximum(largest, abs(op.sinks[self.head]))
            exponent = own.apart * U32 * (apart + error + spread)
            exponent += own.whole * U32 * (largest + spread + np.log(max(self.attended.shape[1], 2)))
            factor = np.where(self.attended, np.exp(error + exponent) * (1 + growth((own.power, U32))) - 1, 0)
            weighed = self.pi * factor
            moved = weighed.sum(axis=1)
            sink_moved = np.zeros(len(moved))
            if op.sinks is not None:
                off = 3 * U32 * abs(op.sinks[self.head]) + own.apart * U32 * np.abs(
                    peak - op.sinks[self.head]
                )
                off = off + own.whole * U32 * largest[:, 0]
                sink_moved = self.sink * (np.exp(off) * (1 + growth((own.power, U32))) - 1)
            away = np.abs(self.seen[None] - self.exact[:, None])
            some = np.where(self.attended[:, :, None], away, 0.0)
            farthest = some.max(axis=1, initial=0.0)
            if op.sinks is not None:
                farthest = np.maximum(farthest, np.abs(self.exact))
            core = np.einsum("rk,rkd->rd", weighed, some) + sink_moved[:, None] * np.abs(self.exact)
            left = 1.0 - (moved + sink_moved)[:, None]
            # Weights that are positive and sum to one cannot leave the range of the values.
            moving = np.where(left > 0, np.minimum(core / np.where(left > 0, left, 1.0), farthest), farthest)
            values = self._values(own)
            size = np.abs(self.seen) if op.value_size is None else op.value_size[self.kv]
            biggest = np.where(self.attended[:, :, None], size[None], 0.0).max(axis=1, initial=0.0)
            carried = (self.pi * (1 + factor)) @ size
            sizes = np.where(left > 0, np.minimum(carried / np.where(left > 0, left, 1.0), biggest), biggest)
            grown = _grown((*own.sums, *own.weights, *own.held))
            counted: Float64 = self.attended.astype(np.float64) @ np.where(np.isfinite(size), size, 0.0)
            tiny = (2 * FLUSHED + _tiny(own.weights)) * counted + 4 * _tiny(own.held)
            tiny += 4 * _tiny(own.sums)
            bound = moving + (grown + _DOUBLE * (self.scores.shape[1] + 4)) * sizes + values + tiny
            if own.running:
                bound += self._running(own.running, weighed, 2 * spread)
        return bound, self._overflows(own, counted) | self.not_finite

    def _score_error(self, own: AttentionRoundings) -> Float64:
        """How far a score can be from the exact one, (rows, keys)."""
        op = self.op
        keys = np.abs(op.keys[self.kv]) if op.key_size is None else op.key_size[self.kv]
        size = abs(op.scale) * (np.abs(self.q) @ keys.T)
        error = (_grown((*own.query, *own.cached, *own.score)) + _DOUBLE * (self.q.shape[1] + 4)) * size
        error += (abs(op.scale) * _tiny(own.query) + _tiny(own.query)) * keys.sum(axis=1)
        error += abs(op.scale) * _tiny(own.cached) * np.abs(self.q).sum(axis=1)[:, None]
        error += _tiny(own.score) * self.q.shape[1]
        added = np.where(self.attended, np.abs(self.bias), 0.0)
        staged = self._staged(own)
        error += np.abs(staged)
        # The score itself is known up to what came before.
        own_size = np.where(self.attended, np.abs(self.plain), 0.0) + error
        error += _grown(own.scores) * (own_size + added) + _tiny(own.scores)
        # A mask is rounded to the dtype before it is added.
        return np.asarray(error + (_grown(own.scores) + 4 * U32) * added, np.float64)

    def _running(self, dtype: str, weighed: Float64, near: Float64) -> Float64:
        """What rounding the output to ``dtype`` after every key leads to, (rows, Dv), in whichever order keys come.

        Adding an addend to what is there is off by no more than the addend, as what is there needs no rounding, and by no more
        than a rounding of the sum. Where a key has the largest score so far, what is there is scaled and rounded once more:
        these are addends of smaller scores, or of ones that are ``near`` (rows, 1).
        """
        weights = self.pi + weighed
        addends = weights[:, :, None] * np.abs(self.seen)[None]
        whole = addends.sum(axis=1)
        above = np.argsort(np.argsort(-self.scores, axis=1, kind="stable"), axis=1)
        tied = (np.abs(self.scores[:, :, None] - self.scores[:, None]) <= near[:, None]).sum(axis=2)
        scaled = ((above + tied)[:, :, None] * addends).sum(axis=1)
        steps = np.count_nonzero(self.attended, axis=1)[:, None]
        unit, tiny = UNIT[dtype], SMALLEST[dtype]
        once = np.minimum(unit * whole[:, None], addends).sum(axis=1)
        found: Float64 = (1 + unit) ** (2 * steps) * (once + unit * scaled) + 2 * steps * tiny
        return found

    def _staged(self, own: AttentionRoundings) -> Float64:
        """What rounding the query, or its product with the scale to the dtype, does to scores, (rows, keys)."""
        if own.rounded:
            query = rounded(self.q.astype(np.float32), own.rounded).astype(np.float64)
            return np.asarray(self.op.scale * (query - self.q) @ np.nan_to_num(self.op.keys[self.kv]).T)
        if not own.multiplied:
            return np.zeros_like(self.plain)
        dtype = self.dtype
        factor = rounded(np.array([self.op.scale], np.float32), dtype)
        query = rounded(factor * self.q.astype(np.float32), dtype).astype(np.float64)
        staged: Float64 = (query - self.op.scale * self.q) @ np.nan_to_num(self.op.keys[self.kv]).T
        return np.asarray(np.nan_to_num(staged), np.float64)

    def _values(self, own: AttentionRoundings) -> Float64:
        """What staging the values leads to, at most that of the largest one."""
        if not own.cached:
            return np.zeros_like(self.exact)
        size = np.abs(self.seen) if self.op.value_size is None else self.op.value_size[self.kv]
        most = np.where(self.attended[:, :, None], size[None], 0.0).max(axis=1, initial=0.0)
        return np.asarray(_grown(own.cached) * most + _tiny(own.cached), np.float64)

    def _overflows(self, own: AttentionRoundings, counted: Float64) -> NDArray[np.bool_]:
        """Where a query, a score, a key or a sum may pass the largest number of the dtype that holds it."""
        op = self.op
        keys = np.abs(op.keys[self.kv]) if op.key_size is None else op.key_size[self.kv]
        narrow = {dtype for _, dtype in (*own.query, *own.cached, *own.scores)} | {"float32"}
        limit = min(LARGEST[dtype] for dtype in narrow)
        score = (abs(op.scale) * (np.abs(self.q) @ keys.T)).max(axis=1, initial=0.0)
        given = np.abs(self.q).max(axis=1, initial=0.0) * max(1.0, abs(op.scale))
        over = ~(np.maximum(score, given) < limit * 0.99)
        if own.cached:
            over |= ~(max(keys.max(initial=0.0), np.abs(self.seen).max(initial=0.0)) < limit * 0.99)
        held = min((LARGEST[dtype] for _, dtype in own.held), default=LARGEST["float32"])
        return np.asarray(over[:, None] | ~(counted < held * 0.99), np.bool_)


Count = tuple[int, str]
"""So many roundings to that dtype."""


@dataclass(frozen=True, kw_only=True)
class AttentionRoundings:
    """The roundings of one attention kernel.

    ``query`` and ``cached`` stage the operands: roundings of each item of the query, and of keys and values.
    ``multiplied``: the query is the product with the scale, both rounded to the dtype, which can be done again; ``rounded``: so
    can the query's own rounding to that dtype. ``score``
    are those that a product passes on its way to a score; ``scores`` those of the score itself, at its own size.
    ``apart`` and ``whole`` count float32 roundings of the exponent, relative to the distance to the largest score and to
    the largest score itself; ``power`` those of an exponential. ``sums`` are those of the weighted sum and of the
    weights' sum together, ``weights`` those of a weight that only the weighted sum sees, ``held`` those of an output
    that is held in another dtype on the way; ``running`` is the dtype of an output that every key is added to in turn.
    """

    query: tuple[Count, ...] = ()
    cached: tuple[Count, ...] = ()
    score: tuple[Count, ...]
    scores: tuple[Count, ...] = ()
    apart: int
    whole: int = 0
    power: int
    sums: tuple[Count, ...]
    weights: tuple[Count, ...] = ()
    held: tuple[Count, ...] = ()
    multiplied: bool = False
    rounded: str = ""
    running: str = ""


def attending(
    arithmetic: Arithmetic, rows: int, keys: int, width: int, heads: int, kv_heads: int, quantised: bool
) -> AttentionRoundings:
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


def _mlx_cpu(dtype: str, keys: int, width: int) -> AttentionRoundings:
    """Operations of their own, each result in the dtype, sums in float32 in any order.

    Read in ml-explore/mlx 0017d3c mlx/fast.cpp scaled_dot_product_attention, fallback, 027ef87 mlx/backend/cpu/softmax.cpp
    softmax and 2c5fe62 mlx/backend/cpu/simd/math.h exp: a factor log2 e, a floor, and a polynomial of six steps.
    """
    return AttentionRoundings(
        score=((width + 1, "float32"),),
        scores=((2, dtype),),
        apart=3,
        power=8,
        sums=((2 * keys + 6, "float32"),),
        weights=((1, dtype),),
        multiplied=True,
    )


def _quantised(dtype: str, keys: int, width: int) -> AttentionRoundings:
    """mlx-lm's attention over a quantised cache: both products are quantised ones, whose sums are in the dtype on a CPU.

    Read in mlx-lm 0.32.2 models/base.py quantized_scaled_dot_product_attention.
    """
    return AttentionRoundings(
        cached=((3, dtype),),
        score=((width + 1, dtype),),
        scores=((2, dtype),),
        apart=3,
        power=8,
        sums=((keys + 6, "float32"), (keys + 1, dtype)),
        weights=((1, dtype),),
        multiplied=True,
    )


def latent_roundings(dtype: str, keys: int, width: int, rank: int, quantised: bool) -> AttentionRoundings:
    """Attention on MLX's CPU over latents of ``rank`` numbers, whether the weights of keys and values (``quantised``: codes) make keys and
    values of them, or are multiplied by the query and by the output.

    Read in mlx-lm 0.32.2 models/deepseek_v3.py DeepseekV3Attention and models/mla.py; products of codes are summed in the dtype.
    """
    sums = dtype if quantised else "float32"
    product: tuple[Count, ...] = ((rank + 3, sums), (3, dtype))
    return AttentionRoundings(
        query=((width + 3, sums), (3, dtype)),
        cached=product,
        score=((max(width, rank) + 1, "float32"),),
        scores=((4, dtype),),
        apart=3,
        power=8,
        sums=((2 * keys + 6, "float32"),),
        weights=((1, dtype),),
    )


def _unfused(order: Unfused, dtype: str, keys: int, width: int) -> AttentionRoundings:
    threads = order.round // 4
    rounds = ceil((keys + 1) / order.round)
    # A thread's own sum (four a round, and a factor between rounds), two trees, and the evening out.
    sums = 4 * rounds + 2 * rounds + 10 + 6 + threads // 32 // 16
    return AttentionRoundings(
        score=((width + 1, "float32"),),
        scores=((2, dtype),),
        apart=3,
        power=1,
        sums=((keys + sums + 4, "float32"),),
        weights=((1, dtype),),
        multiplied=True,
    )


def _streams(order: Streams, dtype: str, keys: int, width: int) -> AttentionRoundings:
    # The fewest blocks there can be have the longest streams, the most the longest sum of blocks.
    fewest, most = (order.blocks, order.blocks) if order.blocks else (32, 1024)
    stream = ceil(keys / (fewest * order.in_block)) + 1
    joins = (order.in_block + 3 if order.in_block > 1 else 0) + 2 * ceil(most / 32) + 3 + 5 + 2
    # A key multiplies what is there by a power, and is added by an FMA; its own product rounds too. The sum of the
    # weights goes the same way.
    total = 2 * (3 * stream + joins)
    return AttentionRoundings(
        query=((4, "float32"),),
        score=((ceil(width / 32) + 7, "float32"),),
        scores=((2, "float32"),),
        apart=4,
        power=1,
        sums=((total, "float32"),),
        held=((1, dtype),) if order.partials == "dtype" else (),
    )


def _tiles(order: Tiles, dtype: str, keys: int, width: int) -> AttentionRoundings:
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
    return AttentionRoundings(
        query=query,
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


def _dealt(order: Dealt, dtype: str, keys: int, width: int) -> AttentionRoundings:
    teams = max(order.teams(width), 1)
    turns = ceil(ceil(keys / order.block) / order.workgroups) + 1
    # In a block: a chain of a team, the teams' halving, the product with the power and the sum with it.
    numerator = order.block // teams + 2 + 3 * turns
    denominator = 5 + 2 * turns
    joins = 2 * 3 + 2 + 5 + 2
    return AttentionRoundings(
        query=((1, "float16"),) if dtype != "float16" else (),
        cached=((1, "float16"),) if dtype == "bfloat16" else (),
        score=((width // 4 + 8, "float32"),),
        scores=((3, "float32"),),
        apart=4,
        power=1,
        sums=((numerator + denominator + 2 * joins + 6, "float32"),),
    )
