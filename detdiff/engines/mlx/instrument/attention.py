"""Attention calls on the paths that a plan chooses; the key length is that of the keys given, padding included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from detdiff_kernels import BadOperand, Call, UnsupportedFormat

from .linear import Native
from .paths import Made, Path, PathChooser, Place, Span, Taken
from .weights import Kernels, floats, name_of

Given = dict[str, Any]
"""The arguments of a call by name."""

Attended = Callable[[Given], mx.array]

ROW_BY_ROW = "forced/rows"
"""An override's path: every query row as a call of its own."""

_NAMES = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


class AttentionCalls:
    """Runs mlx-lm's ``scaled_dot_product_attention``."""

    def __init__(self, chooser: PathChooser, kernels: Kernels) -> None:
        self._chooser, self._kernels = chooser, kernels

    def run(self, place: Place, native: Native, args: Any, kw: Any) -> tuple[mx.array, Taken]:
        """The output [B, heads, rows, D] of one call, and the path that gave it."""
        given = {**dict(zip(_NAMES, args, strict=False)), **kw}

        def attend(asked: Given) -> mx.array:
            # As the model called it, where that is what is asked for.
            y: mx.array = native(*args, **kw) if asked is given else native(**asked)
            return y

        call = call_of(given)
        override = self._chooser.override
        spans = self._chooser.choose(place, call)
        planned = spans if override is None else self._chooser.planned(place, call)
        path = spans[0].path
        if len(spans) > 1 and spans != planned:
            y = self._mixed(spans, place, attend, given)
        else:
            if len(spans) > 1:
                path = path.left_native("the path of attention cannot depend on the place of a row.")
            y, path = self._on_path(path, place, attend, given)
        made = None if override is None else Made(path, 0)
        return y, Taken(call.rows * call.batch, call.second_last, path.name, path.rule, made=made)

    def _on_path(self, path: Path, place: Place, attend: Attended, given: Given) -> tuple[mx.array, Path]:
        if path.name == ROW_BY_ROW:
            return self._row_by_row(place, attend, given), path
        if path.kernel is not None:
            try:
                return self._reference(path.kernel, given, dict(path.arguments)), path
            except (UnsupportedFormat, BadOperand) as error:
                path = path.left_native(str(error))
        return attend(given), path

    def _mixed(self, spans: tuple[Span, ...], place: Place, attend: Attended, given: Given) -> mx.array:
        """Each of the flat rows (slot after slot) as its path gives it; every path runs on all rows."""
        done: dict[Path, mx.array] = {}
        parts: list[mx.array] = []
        shape: tuple[int, ...] = ()
        for first, last, path in spans:
            if path not in done:
                y = self._on_path(path, place, attend, given)[0].transpose(0, 2, 1, 3)
                shape = y.shape
                done[path] = y.reshape(-1, *shape[2:])
            parts.append(done[path][first:last])
        return mx.concatenate(parts, axis=0).reshape(shape).transpose(0, 2, 1, 3)

    def _row_by_row(self, place: Place, attend: Attended, given: Given) -> mx.array:
        """Every row as a call of its own with the keys that it may see, on the path that the plan has for that."""
        batch, _, rows, _ = given["queries"].shape
        slots = []
        for slot in range(batch):
            done = []
            for row in range(rows):
                alone = _alone(given, slot, row)
                spans = self._chooser.planned(place, call_of(alone))
                done.append(self._on_path(spans[0].path, place, attend, alone)[0])
            slots.append(mx.concatenate(done, axis=2) if rows > 1 else done[0])
        return mx.concatenate(slots, axis=0) if batch > 1 else slots[0]

    def _reference(self, name: str, given: Given, arguments: dict[str, int]) -> mx.array:
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


def call_of(given: Given) -> Call:
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


def _alone(given: Given, slot: int, row: int) -> Given:
    """The call of one row of one slot: its keys end with the last one it may see, and begin with the first."""
    keys, mask = given["keys"], given.get("mask")
    held = keys if isinstance(keys, mx.array) else keys[0]
    rows, length = given["queries"].shape[2], held.shape[-2]
    first, last, own = 0, length, None
    if isinstance(mask, str):
        last = length - rows + row + 1
    elif mask is not None:
        heads = mask.shape[1] if mask.ndim == 4 else 1
        full = mx.broadcast_to(mask, (given["queries"].shape[0], heads, rows, length))
        first, last, own = _seen(full[slot : slot + 1, :, row : row + 1])

    def part(side: Any) -> Any:
        if isinstance(side, mx.array):
            return side[slot : slot + 1, :, first:last]
        return tuple(part(piece) for piece in side)

    return {
        **given,
        "queries": given["queries"][slot : slot + 1, :, row : row + 1],
        "keys": part(keys),
        "values": part(given["values"]),
        "mask": own,
    }


def _seen(mask: mx.array) -> tuple[int, int, mx.array | None]:
    """(first, last, mask) for a row's mask [1, heads, 1, keys]: no mask is needed where one run of keys is seen whole."""
    if mask.dtype != mx.bool_:
        return 0, mask.shape[-1], mask
    seen = np.asarray(mask).reshape(-1, mask.shape[-1])
    places = np.flatnonzero(seen[0])
    whole = len(places) and places[-1] - places[0] + 1 == len(places) and (seen == seen[0]).all()
    return (int(places[0]), int(places[-1]) + 1, None) if whole else (0, mask.shape[-1], mask)
