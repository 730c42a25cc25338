"""Attention over latents: keys and values that a layer's weights expand for several rows, and that these weights meet on the other side for one.

mlx-lm 0.32.2 (deepseek_v3 and the classes built like it) multiplies one row's query by the weights of the keys, and its output by those of
the values; several rows are given keys and values that were expanded. The sums are the same, and their order is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

EMBED: Final = "embed_q"
UNEMBED: Final = "unembed_out"
LATENT_CLASSES: Final = ("MultiLinear", "QuantizedMultiLinear")
Multiply = Callable[..., mx.array]
Given = Mapping[str, Any]


@dataclass(eq=False)
class LatentCall:
    """One call of attention over latents, as far as it has come.

    ``embed`` and ``unembed`` have the weights of keys and values, as modules and as calls. ``queries`` [slots, heads, rows, width] are those
    that have not met the keys' weights, ``latents`` [slots, 1, keys, rank]; ``given`` are attention's other arguments, and ``y``
    [slots, heads, rows, value width] is the output behind the values' weights. ``expanded``: the call has several rows.
    """

    embed: Module
    times_keys: Multiply
    expanded: bool
    queries: mx.array | None = None
    latents: mx.array | None = None
    unembed: Module | None = None
    times_values: Multiply | None = None
    given: Given | None = None
    y: mx.array | None = None

    def takes(self, given: Given) -> None:
        """What attention is called with."""
        self.given = given
        if self.expanded:
            self.queries = given["queries"]
        else:
            self.latents = given["keys"]

    def as_one_row(self) -> dict[str, Any]:
        """The arguments of a call of several rows over the latents themselves, as single rows are given them."""
        assert self.given is not None and self.queries is not None and self.latents is not None
        queries, rotated = self.parts()
        mask = self.given.get("mask") if rotated is None else self._scores(queries.shape[-1], rotated)
        queries = rows_alone(self.times_keys, queries)
        return {**self.given, "queries": queries, "keys": self.latents, "values": self.latents, "mask": mask}

    def parts(self) -> tuple[mx.array, mx.array | None]:
        """The queries that the keys' weights are for, and the rotated part of the keys [slots, 1, keys, rest] where these have one."""
        assert self.given is not None and self.queries is not None and self.latents is not None
        if not self.expanded:
            return self.queries, None
        width = int(self.times_keys(self.latents[:1, :, :1], transpose=False).shape[-1])
        if self.queries.shape[-1] == width:
            return self.queries, None
        return self.queries[..., :width], self.given["keys"][:, :1, :, width:]

    def _scores(self, width: int, rotated: mx.array) -> mx.array:
        """The scores of the rotated parts, as one row's call adds them."""
        assert self.given is not None and self.queries is not None
        queries, mask, scale = self.queries[..., width:], self.given.get("mask"), self.given["scale"]
        rows, keys = queries.shape[2], rotated.shape[2]
        parts = [(queries[:, :, row : row + 1] * scale) @ rotated.swapaxes(-1, -2) for row in range(rows)]
        scores = mx.concatenate(parts, axis=2)
        if isinstance(mask, str):
            mask = mx.arange(keys) <= mx.arange(keys - rows, keys)[:, None]
        if mask is None:
            return scores
        return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def rows_alone(native: Multiply, x: mx.array) -> mx.array:
    """``native`` of x [slots, heads, rows, width], each row of each slot by itself."""
    slots, _, rows, _ = x.shape
    parts = [
        mx.concatenate([native(x[slot : slot + 1, :, row : row + 1]) for row in range(rows)], axis=2)
        for slot in range(slots)
    ]
    return mx.concatenate(parts, axis=0)
