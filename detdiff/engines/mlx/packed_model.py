"""One unmodified model in the packed layout: its session, its requests' caches, and a forward over rows of several requests.

All rows of all requests lie in one sequence axis, [1, rows]. Linear layers see them as they are; RoPE and attention
are run per request by the session's taps, which recognise the cache, mask and position objects that carry the split. A model that
does anything else with them fails at that place, and the session names the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from detdiff.engines.mlx.taps.forward import TARGET, Attend, Forward, Segment, handle
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.schedule import OnEvent, Share, silent
from detdiff.errors import LayoutError
from detdiff.scenario import CachePlan

from .caches import RequestCaches


def greedy(logits: mx.array) -> list[int]:
    """The token of every row of logits [rows, V], as a greedy request's sampler chooses it."""
    return ids(greedy_sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))


def ids(sampled: mx.array) -> list[int]:
    """Token ids out of an array."""
    return [int(token) for token in np.asarray(sampled).ravel()]


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
        updates = map(self._session.update_of, self.lanes, results)
        self._session.cache_call(keys, values, list(updates))
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


class ForwardClock:
    """Counts the forwards of a run, those of all models and those of the target."""

    def __init__(self) -> None:
        self.forwards = 0
        self.steps = 0


class PackedModel:
    """Runs shares of requests through one model; ``clock`` counts its forwards together with those of other models.

    So many of a request's newest rows as ``rewinds`` says can be taken back in every layer, also after a window has
    wrapped.
    """

    def __init__(
        self,
        session: Session,
        *,
        name: str = TARGET,
        clock: ForwardClock | None = None,
        plan: CachePlan | None = None,
        event: OnEvent = silent,
        rewinds: int = 0,
    ) -> None:
        self.session, self.name = session, name
        self.caches = RequestCaches(session.model, plan, event, name)
        self._model: Module = session.model
        self._clock = clock or ForwardClock()
        self._rewinds = rewinds
        self._splitter = Splitter()
        self._next: Forward | None = None

    def begin(self, request: int, prompt: Sequence[int], at_most: int) -> int:
        """Make a request's caches; how many rows of its prompt they hold already."""
        return self.caches.begin(request, prompt, at_most)

    def logits(self, shares: Sequence[Share]) -> mx.array:
        """Logits [1, answering rows, V] of one forward; the caches then hold its rows (lazily)."""
        counts = [len(share.tokens) for share in shares]
        lanes = [self._lanes(share.work.index) for share in shares]
        packed = [PackedCache(layer, counts, self.session) for layer in zip(*lanes, strict=True)]
        tokens = mx.array([[t for share in shares for t in share.tokens]])
        self._next = self._describe(shares, tokens)
        self._splitter.counts = tuple(counts)
        self.session.packing = self._splitter
        self.session.compose = self._compose
        try:
            logits: mx.array = self._model(tokens, cache=packed)
        finally:
            self.session.packing = None
        for share in shares:
            self.caches.wrote(share.work.index, share.tokens)
        self._clock.forwards += 1
        self._clock.steps += self.name == TARGET
        answering = self._answering(shares)
        if self._next.selected is None and answering:
            logits = logits[:, mx.array(answering, mx.uint32)]
        return logits

    def evaluate(self, shares: Sequence[Share]) -> None:
        """Compute what a forward without an answer wrote."""
        mx.eval([cache.state for share in shares for cache in self.caches.of(share.work.index)])

    def choices(self, shares: Sequence[Share]) -> list[int]:
        """The token that a greedy request takes after each answering row, from one forward over these rows."""
        return greedy(self.logits(shares)[0])

    def write(self, shares: Sequence[Share]) -> None:
        """One forward over these rows, for what it leaves in the caches."""
        self.logits(shares)
        self.evaluate(shares)

    def rewind(self, request: int, rows: int) -> None:
        """Take the newest rows of a request out of its caches."""
        self.caches.trim(request, rows)

    def _compose(self, inputs: mx.array, cache: Any) -> Forward:
        assert self._next is not None
        return self._next

    def _lanes(self, request: int) -> list[Any]:
        lanes = self.caches.of(request)
        if self._rewinds:
            for layer, lane in enumerate(lanes):
                if type(lane) is RotatingKVCache and lane.empty():
                    lanes[layer] = _Rewindable(lane.max_size, lane.keep, self._rewinds)
        return lanes

    def _answering(self, shares: Sequence[Share]) -> list[int]:
        """The columns whose logits are asked for."""
        ends = accumulate(len(share.tokens) for share in shares)
        return [
            column
            for end, share in zip(ends, shares, strict=True)
            for column in range(end - share.answers, end)
        ]

    def _describe(self, shares: Sequence[Share], tokens: mx.array) -> Forward:
        segments: list[Segment] = []
        column = 0
        for share in shares:
            count = len(share.tokens)
            segments.append(Segment(share.work.index, 0, share.start, count, share.phase, column))
            column += count
        selected = self._answering(shares)
        chosen = tuple(selected) if selected and self.session.sites.head is not None else None
        return Forward(
            self._clock.forwards,
            "packed",
            (1, column),
            tuple(segments),
            tokens,
            chosen,
            bool(selected),
            self.name,
        )


class _Rewindable(RotatingKVCache):  # type: ignore[misc]
    """mlx-lm's cache with a window, which forgets no rows once the window has wrapped; this one does.

    Newest rows can be taken back, up to ``most`` of them: what was there before each update is kept, and the rows of
    it that stay are written anew.
    """

    def __init__(self, max_size: int, keep: int, most: int) -> None:
        super().__init__(max_size, keep)
        self._most = most
        self._updates: list[
            tuple[Any, mx.array, mx.array]
        ] = []  # (state before, keys, values), the last one last

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        state = [handle(one) if isinstance(one, mx.array) else one for one in self.state]
        self._updates.append((state, keys, values))
        while sum(_rows(update) for update in self._updates[1:]) >= self._most:
            del self._updates[0]
        return super().update_and_fetch(keys, values)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        left = n
        while left and self._updates:
            update = self._updates.pop()
            kept = max(0, _rows(update) - left)
            left -= _rows(update) - kept
            # Setting the state is mlx-lm's own way of putting back all that a cache is.
            self.state, keys, values = update
            if kept:
                self.update_and_fetch(keys[:, :, :kept], values[:, :, :kept])
        return n - left


def _rows(update: tuple[Any, mx.array, mx.array]) -> int:
    return int(update[1].shape[2])


# Recordings and reports name a cache by its class, and to a model it is mlx-lm's own.
_Rewindable.__name__ = RotatingKVCache.__name__
