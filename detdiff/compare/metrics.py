"""How far values are apart: exact in bits, ULPs counted in the common dtype, for one pair or many rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Shard, Trace

from .alignment import RowPairs
from .divergence import Magnitude, UlpBucket

_FLOAT_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64}


@dataclass(frozen=True)
class Values:
    """One value as recorded: ``data`` of any shape, ``dtype`` by its safetensors name (``BF16``, ``F32``, ...)."""

    data: NDArray[np.generic]
    dtype: str

    def bits(self) -> NDArray[np.unsignedinteger]:
        """The elements' bit patterns, flattened."""
        flat = self._real()
        return flat.view(np.dtype(f"u{flat.dtype.itemsize}"))

    def numbers(self) -> NDArray[np.float64]:
        """The elements as float64, flattened; exact for every float type up to 64 bits."""
        if self.dtype == "BF16":
            words = self.bits().astype(np.uint32) << np.uint32(16)
            return words.view(np.float32).astype(np.float64)
        return self._real().astype(np.float64)

    def _real(self) -> NDArray[np.generic]:
        """Flattened; a complex element counts as two."""
        flat = np.ascontiguousarray(self.data).reshape(-1)
        return flat.view(np.float32) if self.dtype == "C64" else flat


def ulp_distance(a: Values, b: Values) -> NDArray[np.uint64]:
    """Per element, how many representable numbers apart: uint64, flattened; -0.0 and 0.0 are 0 apart.

    Both must have the same dtype, one of BF16, F16, F32, F64, and the same size; else ValueError. NaN and Inf get
    the distance of their bit patterns: mask them before use.
    """
    if a.dtype != b.dtype or a.dtype not in _FLOAT_BITS:
        raise ValueError(f"ULPs need two arrays of one float dtype, got {a.dtype} and {b.dtype}")
    x, y = _ordered(a), _ordered(b)
    if x.size != y.size:
        raise ValueError(f"ULPs need arrays of one size, got {x.size} and {y.size}")
    return np.where(x > y, x - y, y - x)


def _ordered(values: Values) -> NDArray[np.uint64]:
    sign = np.uint64(1 << (_FLOAT_BITS[values.dtype] - 1))
    words = values.bits().astype(np.uint64)
    size = words & (sign - np.uint64(1))
    return np.where(words & sign, sign - size, sign + size)


def kl_divergence(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """KL(softmax(a) ‖ softmax(b)) in nats of two logit vectors [vocab], summed in float64."""
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    p = np.exp(log_p)
    seen = p > 0
    return max(0.0, float(np.sum(p[seen] * (log_p[seen] - log_q[seen]))))


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - np.max(x)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))), dtype=np.float64)


def measure(a: Values, b: Values, *, logits: bool = False) -> Magnitude:
    """All figures for two values. Different dtypes or sizes are no error: the figures that need equal ones are None."""
    xs, ys = a.numbers(), b.numbers()
    same_size = xs.size == ys.size
    same_type = a.dtype == b.dtype
    comparable = same_size and xs.size > 0
    finite = np.isfinite(xs) & np.isfinite(ys) if comparable else np.zeros(0, dtype=bool)
    if not same_size:
        differing = max(xs.size, ys.size)
    elif same_type:
        differing = int(np.count_nonzero(a.bits() != b.bits()))
    else:
        differing = int(np.count_nonzero(~((xs == ys) & (np.signbit(xs) == np.signbit(ys)))))
    max_ulp = mean_ulp = max_abs = max_rel = worst = cosine = kl = None
    histogram: tuple[UlpBucket, ...] = ()
    if comparable and finite.any():
        gap, relative = _gaps(xs, ys, finite)
        max_abs, max_rel, worst = float(gap.max()), float(relative.max()), int(gap.argmax())
        cosine = _cosine(xs[finite], ys[finite])
        if same_type and a.dtype in _FLOAT_BITS:
            ulps = ulp_distance(a, b)
            max_ulp, mean_ulp = int(ulps[finite].max()), float(ulps[finite].mean(dtype=np.float64))
            histogram = _histogram(ulps[finite & (a.bits() != b.bits())])
        if logits and finite.all():
            kl = kl_divergence(xs, ys)
    return Magnitude(
        dtype_a=a.dtype,
        dtype_b=b.dtype,
        shape_a=tuple(a.data.shape),
        shape_b=tuple(b.data.shape),
        elements=max(xs.size, ys.size),
        differing=differing,
        nan_a=int(np.isnan(xs).sum()),
        nan_b=int(np.isnan(ys).sum()),
        inf_a=int(np.isinf(xs).sum()),
        inf_b=int(np.isinf(ys).sum()),
        non_finite=int(np.count_nonzero(~finite)),
        max_ulp=max_ulp,
        mean_ulp=mean_ulp,
        ulp_histogram=histogram,
        max_abs=max_abs,
        max_rel=max_rel,
        worst=worst,
        cosine=cosine,
        kl=kl,
    )


def row_distances(a: Values, b: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest ULP distance and the largest relative difference of each row of two values [n, ...], float64 [n] each.

    Over elements that are finite in both; NaN where a row has none, where sizes differ, and for ULPs where dtypes do.
    """
    count = len(a.data)
    unknown = np.full(count, np.nan)
    xs, ys = a.numbers(), b.numbers()
    if not xs.size or xs.size != ys.size:
        return unknown, unknown
    finite = np.isfinite(xs) & np.isfinite(ys)
    some = finite.reshape(count, -1).any(axis=1)
    _, relative = _gaps(xs, ys, finite)
    ulp, rel = unknown, np.where(some, relative.reshape(count, -1).max(axis=1), np.nan)
    if a.dtype == b.dtype and a.dtype in _FLOAT_BITS:
        ulps = np.where(finite, ulp_distance(a, b), np.uint64(0)).reshape(count, -1)
        ulp = np.where(some, ulps.max(axis=1).astype(np.float64), np.nan)
    return ulp, rel


def _gaps(
    xs: NDArray[np.float64], ys: NDArray[np.float64], finite: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(absolute, relative) differences per element; 0 where not finite."""
    gap = np.where(finite, np.abs(np.where(finite, xs, 0.0) - np.where(finite, ys, 0.0)), 0.0)
    scale = np.maximum(np.abs(xs), np.abs(ys))
    return gap, np.divide(gap, scale, out=np.zeros_like(gap), where=finite & (scale > 0))


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    norm = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    if norm == 0.0 or not np.isfinite(norm):
        return None
    return float(np.dot(x, y)) / norm


def _histogram(ulps: NDArray[np.uint64]) -> tuple[UlpBucket, ...]:
    """Buckets 0, 1, 2, 3-4, 5-8, ... of the differing elements; empty buckets left out."""
    buckets = []
    first, last = 0, 0
    left = ulps
    while left.size:
        here = left <= np.uint64(last)
        count = int(np.count_nonzero(here))
        if count:
            buckets.append(UlpBucket(first, last, count))
        left = left[~here]
        first, last = last + 1, max(1, last * 2) if last else 1
    return tuple(buckets)


Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_LOW: Final = (1 << 32) - 1
_ELEMENTS: Final = (
    1 << 20
)  # of one trace at a time; as float64 with its intermediate results a few tens of MB


class Distances:
    """ULPs and relative differences of row pairs, column by column of their tables."""

    def __init__(self, a: Trace, b: Trace, pairs: RowPairs) -> None:
        self._sides = _SideValues(a, pairs.a), _SideValues(b, pairs.b)
        self.known = all(bool(side.holding.any()) for side in self._sides)
        """Whether both traces hold values at all."""

    def of(self, rows: Int64, column_a: int, column_b: int) -> tuple[Float64, Float64] | None:
        """(largest ULP distance, largest relative difference) of row pairs of one pair of tables, float64 [n] each.

        NaN where not both traces hold the value; None where that is so for all.
        """
        a, b = self._sides
        shards = (a.shard[rows] << 32) | b.shard[rows]
        ulp, rel = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        some = False
        for both in np.unique(shards).tolist():
            if not (a.holding[both >> 32] and b.holding[both & _LOW]):
                continue
            here = np.flatnonzero(shards == both)
            place_a, place_b = a.places(rows[here], column_a), b.places(rows[here], column_b)
            held = (place_a >= 0) & (place_b >= 0)
            here, place_a, place_b = here[held], place_a[held], place_b[held]
            if not len(here):
                continue
            some = True
            first = rows[here[0]]
            step = max(1, _ELEMENTS // max(a.width(first, column_a), b.width(first, column_b)))
            for start in range(0, len(here), step):
                part = slice(start, start + step)
                ulp[here[part]], rel[here[part]] = row_distances(
                    a.values(first, column_a, place_a[part]), b.values(first, column_b, place_b[part])
                )
        return (ulp, rel) if some else None


class _SideValues:
    """One run's half of the row pairs: ``shard``, ``row`` in it and ``table``, int64 [n] each.

    ``holding`` bool [shards] says which shards have values.
    """

    def __init__(self, trace: Trace, rows: Int64) -> None:
        self._shards = trace.shards
        index = trace.row_index()
        self.shard, self.row, self.table = (
            field[rows].astype(np.int64) for field in (index.shard, index.row, index.table)
        )
        self.holding = np.array(
            [any(name.startswith("value/") for name in shard.tensors) for shard in trace.shards], dtype=bool
        )

    def places(self, rows: Int64, column: int) -> Int64:
        """Where the values of row pairs of one shard and table lie in their column, int64 [n]; -1 where they are not."""
        shard, table = self._of(int(rows[0]))
        kept = shard.value_rows(table, column).astype(np.int64)
        wanted = self.row[rows]
        found = np.searchsorted(kept, wanted)
        inside = np.append(kept, -1)[found] == wanted
        return np.where(inside, found, -1)

    def width(self, row: int, column: int) -> int:
        """How many elements the value of a row pair has."""
        shard, table = self._of(row)
        tensor = shard.tensors[f"value/{table}/{column}"]
        return int(np.prod(tensor.shape[1:], dtype=np.int64))

    def values(self, row: int, column: int, places: Int64) -> Values:
        """Values by their places in the column of a row pair's shard and table."""
        shard, table = self._of(row)
        dtype = shard.tensors[f"value/{table}/{column}"].dtype
        return Values(shard.values_at(table, column, places), dtype)

    def _of(self, row: int) -> tuple[Shard, int]:
        return self._shards[int(self.shard[row])], int(self.table[row])
