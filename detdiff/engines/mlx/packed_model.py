"""One model in the packed layout: its session, its requests' caches, and a forward over rows of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import RotatingKVCache

from detdiff.engines.mlx.instrument import Session
from detdiff.engines.mlx.instrument.buffers import handle
from detdiff.engines.mlx.instrument.forward import TARGET, Forward, Segment
from detdiff.scenario import CachePlan

from .caches import RequestCaches
from .packing import PackedCache, Splitter
from .pages import OnEvent, silent
from .shares import Share


class Clock:
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
        clock: Clock | None = None,
        plan: CachePlan | None = None,
        event: OnEvent = silent,
        rewinds: int = 0,
    ) -> None:
        self.session, self.name = session, name
        self.caches = RequestCaches(session.model, plan, event, name)
        self._model: Module = session.model
        self._clock = clock or Clock()
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
