"""How far two values are apart: frozen dataclasses, part of the answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UlpBucket:
    """``count`` differing elements with ``first`` <= ULP distance <= ``last``."""

    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Magnitude:
    """How far two arrays of values are apart.

    ULP, absolute and relative figures are over elements finite in both runs; ``non_finite`` counts the others, which
    are never called equal unless their bits are. ``differing`` counts elements whose bits differ, so -0.0 against
    0.0 is differing at 0 ULP. Figures are None where dtypes or shapes differ or nothing finite is left; ``kl`` is
    in nats and given for logits only.
    """

    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    elements: int
    differing: int
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int
    non_finite: int
    max_ulp: int | None
    mean_ulp: float | None
    ulp_histogram: tuple[UlpBucket, ...]
    max_abs: float | None
    max_rel: float | None
    worst: int | None
    cosine: float | None
    kl: float | None
