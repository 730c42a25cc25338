"""Running an unmodified model over packed rows: cache, mask and position objects that carry the split.

All rows of all requests lie in one sequence axis, [1, rows]. Linear layers see them as they are; RoPE and attention
are run per request by the session's taps, which recognise these objects. A model that does anything else with them
fails at that place, and the session names the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from detdiff.engines.mlx.instrument import Session
from detdiff.engines.mlx.instrument.roles import Attend
from detdiff.errors import LayoutError


class _Opaque:
    """Answers no question, so that a model which asks one stops instead of taking one answer for all requests."""

    def __bool__(self) -> bool:
        raise TypeError(f"{type(self).__name__} was asked whether it is true")

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{type(self).__name__} was compared with {other!r}")

    __hash__ = object.__hash__


class PackedOffset(_Opaque):
    """Stands for the position of column 0; only RoPE may use it, request by request."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = tuple(offsets)


class PackedMask(_Opaque):
    """The masks of the requests, one each."""

    kind = "per request"

    def __init__(self, masks: Sequence[Any]) -> None:
        self.masks = tuple(masks)


class PackedEntries(_Opaque):
    """Keys or values of the requests, one array each; only attention may use them."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    def astype(self, dtype: Any) -> PackedEntries:
        """The entries in another dtype, as some models ask for before they attend."""
        return PackedEntries([part.astype(dtype) for part in self.parts])


class PackedCache:
    """One layer's caches of the requests in a forward, in the order of their rows."""

    def __init__(self, lanes: Sequence[Any], counts: Sequence[int], session: Session) -> None:
        self.lanes = tuple(lanes)
        self._counts = tuple(counts)
        self._session = session

    def __bool__(self) -> bool:
        return True

    @property
    def offset(self) -> PackedOffset:
        return PackedOffset([lane.offset for lane in self.lanes])

    def make_mask(self, rows: int, **options: Any) -> PackedMask:
        """Each request's own mask for its own rows; ``rows`` must be all of them."""
        if rows != sum(self._counts):
            raise ValueError(
                f"a mask for {rows} rows was asked for where the forward has {sum(self._counts)}"
            )
        options.setdefault("return_array", False)
        options.setdefault("window_size", None)
        pairs = zip(self.lanes, self._counts, strict=True)
        return PackedMask([lane.make_mask(n, **options) for lane, n in pairs])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PackedEntries, PackedEntries]:
        """Write each request's rows into its own cache; returns what each of them then holds."""
        results = []
        start = 0
        for lane, count in zip(self.lanes, self._counts, strict=True):
            part = slice(start, start + count)
            results.append(lane.update_and_fetch(keys[:, :, part], values[:, :, part]))
            start += count
        self._session.cache_call(keys, values, list(zip(self.lanes, results, strict=True)))
        return PackedEntries([r[0] for r in results]), PackedEntries([r[1] for r in results])


class Splitter:
    """RoPE and attention per request, for the session's taps."""

    def __init__(self) -> None:
        self.counts: tuple[int, ...] = ()

    def _split(self, array: mx.array, what: str) -> list[mx.array]:
        if array.ndim != 4 or array.shape[2] != sum(self.counts):
            raise ValueError(
                f"{what} has the shape {array.shape}; expected [1, heads, {sum(self.counts)}, width]"
            )
        result = []
        start = 0
        for count in self.counts:
            result.append(array[:, :, start : start + count])
            start += count
        return result

    def rope(self, native: Callable[..., Any], args: Any, kw: Any) -> mx.array:
        offset = kw.get("offset", args[1] if len(args) > 1 else None)
        if not isinstance(offset, PackedOffset):
            raise TypeError(f"RoPE was given the offset {offset!r} instead of the cache's")
        rest = {k: v for k, v in kw.items() if k != "offset"}
        parts = [
            native(x, *args[2:], offset=o, **rest)
            for x, o in zip(self._split(args[0], "RoPE's input"), offset.offsets, strict=True)
        ]
        return mx.concatenate(parts, axis=2)

    def attention(self, attend: Attend, args: Any, kw: Any) -> mx.array:
        names = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
        given = {**dict(zip(names, args, strict=False)), **kw}
        keys, values, cache = given["keys"], given["values"], given.get("cache")
        if not (isinstance(keys, PackedEntries) and isinstance(values, PackedEntries)):
            raise TypeError("attention was given keys or values that the cache did not return")
        masks = given.get("mask")
        if not isinstance(masks, PackedMask):
            raise TypeError("attention was given a mask that the cache did not make")
        lanes = cache.lanes if isinstance(cache, PackedCache) else (None,) * len(self.counts)
        rest = {k: v for k, v in given.items() if k not in ("queries", "keys", "values", "cache", "mask")}
        queries = self._split(given["queries"], "the query")
        parts = []
        column = 0
        for q, k, v, lane, mask in zip(queries, keys.parts, values.parts, lanes, masks.masks, strict=True):
            columns = range(column, column + q.shape[2])
            parts.append(attend(columns, (q, k, v), {"cache": lane, "mask": mask, **rest}))
            column = columns.stop
        return mx.concatenate(parts, axis=2)


def refuse_unpackable(model: Any) -> None:
    """Raises LayoutError, naming the module, for caches that hold more than keys and values."""
    for layer, cache in enumerate(make_prompt_cache(model)):
        if not hasattr(cache, "update_and_fetch") or not hasattr(cache, "make_mask"):
            children = model.layers[layer].children() if hasattr(model, "layers") else {}
            names = [
                f"layers.{layer}.{name}" for name in children if "norm" not in name and "mlp" not in name
            ]
            raise LayoutError(
                f"The module {', '.join(names) or f'layers.{layer}'} keeps its state in {type(cache).__name__}, "
                "which mixes the rows of a forward in order; only key and value caches can be split by request in the "
                'packed layout. Use layout = "padded" for this model.'
            )
