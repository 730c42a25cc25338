"""Expert layers: mlx-lm sorts many rows by expert, and a trace wants them as the model's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .sites import Arrays


@dataclass(frozen=True)
class ExpertOrder:
    """One sorting by expert, as ``_gather_sort`` of mlx-lm's switch layers did it.

    ``given`` [slots, columns, 1, 1, D] is what the layer got and ``gathered`` what it made of that, a copy for each
    of a row's experts, in expert order; ``indices`` are the experts in that order and ``back`` undoes it;
    ``shape`` is (slots, columns, experts a row).
    """

    given: mx.array
    gathered: mx.array
    indices: mx.array
    back: mx.array
    shape: tuple[int, ...]

    @classmethod
    def of(cls, args: Any, result: Any) -> ExpertOrder:
        """From the arguments (x, experts [slots, columns, k]) and the result of ``_gather_sort``."""
        return cls(args[0], result[0], result[1], result[2], tuple(args[1].shape))

    def rows(self, array: mx.array) -> mx.array:
        """``array`` [n, ...] in expert order as [slots, columns, k, ...]."""
        return array[self.back].reshape(*self.shape, *array.shape[1:])

    def sorted(self, rows: mx.array) -> mx.array:
        """``rows`` [slots, columns, k, ...] in expert order again."""
        flat = rows.reshape(-1, *rows.shape[len(self.shape) :])
        return flat[mx.argsort(self.back)]

    def ports(self, x: Any, y: mx.array) -> tuple[Arrays, Arrays]:
        """The ports of an expert linear that was called with ``x`` and answered ``y``."""
        # Before the first expert layer a row has one value for all its experts, and that is what it is recorded as
        # when mlx-lm does not sort.
        given = self.given if x is self.gathered else self.rows(x)
        return [("in", given), ("experts", self.rows(self.indices))], [("out", self.rows(y))]
