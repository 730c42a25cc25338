"""How far values are apart: exact in bits, ULPs counted in the common dtype, for one pair or many rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .flips import Magnitude, UlpBucket

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
