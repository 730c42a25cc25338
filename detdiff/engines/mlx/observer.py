"""The observer check: the first forwards again without recording, logits compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.instrument.buffers import handle, memory
from detdiff.engines.mlx.instrument.forward import Forward


class Enough(Exception):
    """Ends a run whose logits have all been seen."""


class FirstLogits:
    """Keeps the logits of the first ``limit`` forwards whose logits an engine uses."""

    def __init__(self, limit: int, *, stop: bool = False) -> None:
        self.limit = limit
        self._stop = stop
        self.kept: list[mx.array] = []

    def __call__(self, forward: Forward, logits: mx.array) -> None:
        if len(self.kept) < self.limit:
            # Only the last column is used by mlx-lm; the rest may never be computed.
            self.kept.append(handle(logits))
        if self._stop and len(self.kept) >= self.limit:
            raise Enough


def compare_logits(traced: FirstLogits, again: Callable[[FirstLogits], None]) -> dict[str, Any]:
    """The observer block of a trace: how many forwards were run again and whether all bits were equal."""
    count = len(traced.kept)
    if count == 0:
        return {"forwards": 0, "equal": None}
    untraced = FirstLogits(count, stop=True)
    try:
        again(untraced)
    except Enough:
        pass
    equal = len(untraced.kept) == count and all(
        _same_bits(a, b) for a, b in zip(traced.kept, untraced.kept, strict=True)
    )
    return {"forwards": count, "equal": equal}


def _same_bits(a: mx.array, b: mx.array) -> bool:
    x, y = memory(a), memory(b)
    return x.dtype == y.dtype and np.array_equal(x.numpy(), y.numpy())
