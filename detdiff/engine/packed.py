"""The packed layout: iteration-level scheduling of prefill chunks and decode rows in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from detdiff.instrument import Session
from detdiff.instrument.forward import Forward, Segment
from detdiff.scenario import Schedule

from .packing import PackedCache, Splitter
from .work import OnToken, Work, by_arrival


@dataclass(frozen=True)
class Share:
    """Rows that one request gets in the next forward; ``answers``: its last row's logits choose a token."""

    work: Work
    tokens: tuple[int, ...]
    answers: bool


def share_rows(active: Sequence[Work], schedule: Schedule) -> list[Share]:
    """Who gets how many rows: decoding requests one each, then prompts in order of arrival, within the budget."""
    budget = schedule.row_budget
    left = budget if budget is not None else 1 << 40
    shares: list[Share] = []
    for work in [w for w in active if w.generated]:
        if left > 0:
            shares.append(Share(work, (work.generated[-1],), True))
            left -= 1
    for work in [w for w in active if not w.generated]:
        count = min(schedule.prefill_chunk, left, len(work.prompt) - work.done)
        if count > 0:
            end = work.done + count
            shares.append(Share(work, work.prompt[work.done : end], end == len(work.prompt)))
            left -= count
    return shares


class PackedEngine:
    """Runs requests packed over one session; ``forwards`` counts the model calls."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._model: Module = session.model
        self._splitter = Splitter()
        self._caches: dict[int, list[Any]] = {}
        self._next: Forward | None = None
        self.forwards = 0

    def compose(self, inputs: mx.array, cache: Any) -> Forward:
        assert self._next is not None
        return self._next

    def run(self, work: list[Work], schedule: Schedule, on_token: OnToken) -> None:
        """Serve all requests: admit, share rows, run one forward, take the answers, until none is left."""
        limit = 1 if schedule.kind == "serial" else (schedule.active or len(work))
        waiting = by_arrival(work)
        active: list[Work] = []
        while waiting or active:
            clock = self.forwards if active else max(self.forwards, waiting[0].arrival)
            due = [item for item in waiting if item.arrival <= clock][: limit - len(active)]
            waiting = waiting[len(due) :]
            active += due
            shares = share_rows(active, schedule)
            for share, token in zip([s for s in shares if s.answers], self.forward(shares), strict=True):
                share.work.answer(token, on_token)
            for item in [item for item in active if item.finished]:
                self._caches.pop(item.index, None)
            active = [item for item in active if not item.finished]

    def forward(self, shares: Sequence[Share]) -> list[int]:
        """One model call over ``shares``; the tokens of those that answer, in order."""
        logits = self.logits(shares)
        answering = [s for s in shares if s.answers]
        if not answering:
            mx.eval([c.state for s in shares for c in self._caches[s.work.index]])
            return []
        tokens = []
        for row, share in enumerate(answering):
            scores = logits[:, row]
            logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
            tokens.append(share.work.sampler(logprobs))
        mx.eval(tokens)
        return [token for sampled in tokens for token in _ids(sampled)]

    def logits(self, shares: Sequence[Share]) -> mx.array:
        """Logits [1, answering shares, V] of one forward; the caches then hold its rows (lazily)."""
        for share in shares:
            if share.work.index not in self._caches:
                self._caches[share.work.index] = make_prompt_cache(self._model)
        counts = [len(share.tokens) for share in shares]
        lanes = [self._caches[share.work.index] for share in shares]
        packed = [PackedCache(layer, counts, self._session) for layer in zip(*lanes, strict=True)]
        tokens = mx.array([[t for share in shares for t in share.tokens]])
        self._next = self._describe(shares, tokens)
        self._splitter.counts = tuple(counts)
        self._session.packing = self._splitter
        self._session.compose = self.compose
        try:
            logits: mx.array = self._model(tokens, cache=packed)
        finally:
            self._session.packing = None
        self.forwards += 1
        answering = [end - 1 for end, share in zip(accumulate(counts), shares, strict=True) if share.answers]
        if self._next.selected is None and answering:
            logits = logits[:, mx.array(answering, mx.uint32)]
        return logits

    def _describe(self, shares: Sequence[Share], tokens: mx.array) -> Forward:
        segments: list[Segment] = []
        selected: list[int] = []
        column = 0
        for share in shares:
            count = len(share.tokens)
            segments.append(share.work.segment(0, share.work.done, count, column))
            share.work.done += count
            column += count
            if share.answers:
                selected.append(column - 1)
        chosen = tuple(selected) if selected and self._session.sites.head is not None else None
        return Forward(self.forwards, "packed", (1, column), tuple(segments), tokens, chosen, bool(selected))


def _ids(sampled: mx.array) -> list[int]:
    return [int(token) for token in np.asarray(sampled)]
