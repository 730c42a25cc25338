"""Attention calls on the paths that a plan chooses; the key length is that of the keys given, padding included."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from detdiff_kernels import BadOperand, Call, UnsupportedFormat

from .linear import Native
from .paths import PathChooser, Place, Taken
from .weights import Kernels, floats, name_of

_NAMES = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


class AttentionCalls:
    """Runs mlx-lm's ``scaled_dot_product_attention``."""

    def __init__(self, chooser: PathChooser, kernels: Kernels) -> None:
        self._chooser, self._kernels = chooser, kernels

    def run(self, place: Place, native: Native, args: Any, kw: Any) -> tuple[mx.array, Taken]:
        """The output [B, heads, rows, D] of one call, and the path that gave it."""
        given = {**dict(zip(_NAMES, args, strict=False)), **kw}
        call = call_of(given)
        spans = self._chooser.choose(place, call)
        path = spans[0].path
        y: mx.array | None = None
        if len(spans) > 1:
            path = path.left_native("the path of attention cannot depend on the place of a row.")
        elif path.kernel is not None:
            try:
                y = self._reference(path.kernel, given, dict(path.arguments))
            except (UnsupportedFormat, BadOperand) as error:
                path = path.left_native(str(error))
        if y is None:
            y = native(*args, **kw)
        return y, Taken(call.rows * call.batch, call.second_last, path.name, path.rule)

    def _reference(self, name: str, given: dict[str, Any], arguments: dict[str, int]) -> mx.array:
        queries, keys, values = (given[key] for key in _NAMES[:3])
        if not (isinstance(keys, mx.array) and isinstance(values, mx.array)):
            raise UnsupportedFormat(
                "the keys and values are quantised, and reference kernels take plain ones."
            )
        dtype = mx.result_type(mx.result_type(queries, keys), values)
        q, k, v = (
            floats(array if array.dtype == dtype else array.astype(dtype))
            for array in (queries, keys, values)
        )
        mask, sinks = given.get("mask"), given.get("sinks")
        if isinstance(mask, mx.array):
            mask = np.asarray(mask) if mask.dtype == mx.bool_ else floats(mask)
        y = self._kernels.attention(name)(
            q,
            k,
            v,
            float(given["scale"]),
            mask=mask,
            dtype=name_of(dtype),
            sinks=None if sinks is None else floats(sinks),
            **arguments,
        )
        return mx.array(y).astype(dtype)


def call_of(given: dict[str, Any]) -> Call:
    """The dispatch facts of an attention call by its arguments' names; keys may be a quantised cache's triple."""
    queries, keys, mask = given["queries"], given["keys"], given.get("mask")
    batch, heads, rows, width = queries.shape
    held = keys if isinstance(keys, mx.array) else keys[0]
    kind: Any = "none" if mask is None else mask if isinstance(mask, str) else "array"
    return Call(
        "attention",
        rows,
        second_last=rows,
        dtype=name_of(queries.dtype),
        query=rows,
        keys=int(held.shape[-2]),
        head_dim=width,
        heads=heads,
        kv_heads=int(held.shape[1]),
        batch=batch,
        mask=kind,
    )
