"""Which sizes of a call give rows the same bits: the same drawn rows in calls of every size, enough of them for narrow layers.

Two kernels round most outputs of a 16 bit type alike, so that few outputs show nothing. Rows whose products cancel show
a different order of the sums far more often, and whoever names kernels by size needs no sample to tell these apart. Rows of
zeros, of products below the normal numbers and of large ones show kernels that treat such values otherwise. What is rarer than
the sample is not seen, and `SampledSizes.outputs` says how rare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from detdiff.probe.operation import ProbedOperation
from detdiff_kernels.rounding import Float32, rounded

OUTPUTS = 20_000
"""Ordinary outputs that each two sizes are compared by, at least."""
_UNSEEN = 3
"""Of n outputs that agree, less than 3 in n differ elsewhere, at 95 %: (1 - 3 / n) ** n is about 0.05."""
_FEWEST = 5
_CANCELLING = 16
_LOUD = 8


@dataclass(frozen=True)
class SampledSizes:
    """``sets`` of sizes that gave all rows the same bits, that of one row first where it is steady; ``steady``: no size
    gave a row other bits at another place beside other rows. ``outputs`` is how many were compared for each size."""

    sets: tuple[frozenset[int], ...]
    steady: bool
    outputs: int

    @property
    def whole(self) -> bool:
        """Whether nothing but the row mattered."""
        return self.steady and len(self.sets) == 1

    @property
    def rarest(self) -> int:
        """A kernel that differs in one of so many outputs would probably have been seen, in fewer not."""
        return self.outputs // _UNSEEN


def sample(operation: ProbedOperation, sizes: Sequence[int], outputs: int) -> SampledSizes:
    """Rows in calls of each of ``sizes``, in order and moved on by one, for a layer of so many ``outputs``."""
    rows = _drawn(operation, max(_FEWEST, -(-OUTPUTS // outputs)))
    found: dict[tuple[Any, ...], list[int]] = {}
    steady = True
    for size in sizes:
        bits = _bits(operation, rows, size)
        # Moved on, each row has another place in its call and other rows beside it.
        if bits is None or _bits(operation, np.roll(rows, 1, axis=0), size, turned=True) != bits:
            steady = False
            continue
        found.setdefault((bits, _kernel(operation.routes, size)), []).append(size)
    return SampledSizes(tuple(map(frozenset, found.values())), steady, len(rows) * outputs)


def _kernel(routes: Callable[[int], tuple[Any, ...]] | None, size: int) -> tuple[str, ...]:
    return () if routes is None else tuple(sorted({route.path for route in routes(size)}))


def _drawn(operation: ProbedOperation, count: int) -> Float32:
    """Normals (rows, k), every fifth louder, rows of rare values, and rows whose products with some weights cancel, where
    these are known."""
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((count, operation.k), dtype=np.float32)
    rows[::5] *= _LOUD
    small, large = (-22, 8) if operation.dtype == "float16" else (-132, 60)
    rare = np.stack([np.ldexp(rows[1], small), np.ldexp(rows[2], large), np.where(rows[3] > 1, rows[3], 0)])
    rows = np.concatenate([rows, rare])
    if operation.weights is not None and operation.k > 1:
        with np.errstate(all="ignore"):  # a model's weights may hold anything
            cancelling = [
                operation.weights.cancelling(draw.standard_normal(operation.k), int(draw.integers(1 << 30)))
                for _ in range(min(count, _CANCELLING))
            ]
        rows = np.concatenate([rows, np.array(cancelling, np.float32)])
    return rounded(rows, operation.dtype)


def _bits(operation: ProbedOperation, rows: Float32, size: int, turned: bool = False) -> bytes | None:
    """A digest of what all rows came out as in calls of ``size``, the last one filled up from the first rows; None where these
    came out otherwise there."""
    at = np.arange(-(-len(rows) // size) * size) % len(rows)
    made = []
    for first in range(0, len(at), size):
        made.append(operation.read(operation.run(operation.given(rows[at[first : first + size]])), size).data)
    every = np.ascontiguousarray(np.concatenate(made))
    whole = every[: len(rows)]
    if every.tobytes() != np.ascontiguousarray(whole[at]).tobytes():
        return None
    if turned:
        whole = np.roll(whole, -1, axis=0)
    return blake2b(np.ascontiguousarray(whole).tobytes(), digest_size=16).digest()
