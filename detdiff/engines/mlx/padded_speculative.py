"""Padded speculation: mlx-lm's own ``speculative_generate_step``, one request at a time, watched and not rewritten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.generate import speculative_generate_step

from detdiff.engines.mlx.instrument.forward import DRAFT, TARGET, Forward, Segment
from detdiff.scenario import CachePlan, Schedule

from .lifecycle import Owners, watched
from .pages import OnEvent
from .speculation import Counts
from .work import OnToken, Work, by_arrival


@dataclass
class _Round:
    """One verification: its first row's position, the tokens it was fed, and what the target chose after each."""

    start: int
    fed: mx.array
    choices: mx.array | None = None
    before: int = 0


class SpeculativeComposer:
    """Says whose rows each model call holds, and what became of the proposals, from mlx-lm's calls and answers.

    A model's position is the one it should be at: what it ran less what it was asked to forget. A cache that did not
    forget then stands at another.
    """

    def __init__(self, event: OnEvent) -> None:
        self._event = event
        self._work: Work | None = None
        self._done = {TARGET: 0, DRAFT: 0}
        self._running = TARGET
        self._round: _Round | None = None
        self.owners = Owners(of_uid=lambda uid: uid)
        self.forwards = 0
        self.counts: dict[int, Counts] = {}

    def begin(self, work: Work) -> None:
        """From now on every call is for this request."""
        self._work, self._round = work, None
        self._done = {TARGET: 0, DRAFT: 0}
        self.owners.serial, self.owners.named = work.index, []

    def compose(self, model: str) -> Callable[[mx.array, Any], Forward]:
        """What a session of ``model`` asks at the start of its calls."""
        return lambda inputs, cache: self._composed(model, inputs, cache)

    def _composed(self, model: str, inputs: mx.array, cache: Any) -> Forward:
        work = self._work
        assert work is not None
        if model not in (name for name, _ in self.owners.named):
            self.owners.named.append((model, cache))
        start, count = self._done[model], inputs.shape[1]
        prompt = start + count < len(work.prompt)
        if not prompt:
            self.close()
        self._running = model
        self._done[model] = start + count
        phase = "prefill" if prompt else "verify"
        if model == TARGET and not prompt:
            self._round = _Round(start, inputs, before=len(work.generated))
        segment = Segment(work.index, 0, start, count, "draft" if model == DRAFT else phase)
        self.forwards += 1
        return Forward(self.forwards - 1, "padded", (1, count), (segment,), inputs, None, not prompt, model)

    def sampled(self, tokens: mx.array) -> mx.array:
        """Note the tokens that the model which runs has chosen."""
        if self._running == TARGET and self._round is not None:
            self._round.choices = tokens
        return tokens

    def answered(self, from_draft: bool) -> None:
        """mlx-lm gave one token, which the draft proposed or not."""
        assert self._work is not None
        self.counts.setdefault(self._work.index, Counts()).accepted += from_draft

    def event(self, kind: str, **fields: Any) -> None:
        """What mlx-lm did to a cache; a verification is over when its rejected rows are to be forgotten."""
        if kind == "trim":
            self.close()
            self._done[fields["model"]] -= fields["asked"]
        self._event(kind, **fields)

    def close(self) -> None:
        """Say what became of the last verification, once."""
        found, work, self._round = self._round, self._work, None
        if found is None or found.choices is None or work is None:
            return
        proposals = [int(token) for token in np.asarray(found.fed)[0, 1:]]
        choices = [int(token) for token in np.asarray(found.choices)]
        committed = work.generated[found.before :]
        accepted = 0
        for guess, token in zip(proposals, committed, strict=False):
            if guess != token:
                break
            accepted += 1
        self.counts.setdefault(work.index, Counts()).proposed += len(proposals)
        self._event(
            "verify",
            request=work.index,
            start=found.start,
            proposals=proposals,
            choices=choices,
            accepted=accepted,
            replacement=committed[accepted] if accepted < len(committed) else None,
            committed=committed,
        )


@dataclass(frozen=True)
class Pair:
    """The model that is asked and the one that proposes ``drafts`` tokens at a time."""

    target: Module
    draft: Module
    drafts: int


def run_speculative(
    pair: Pair,
    work: list[Work],
    settings: tuple[Schedule, CachePlan],
    composer: SpeculativeComposer,
    on_token: OnToken,
) -> None:
    """Run all requests, one after the other; the sessions of both models must ask ``composer``."""
    with watched(composer.owners, composer.event):
        for item in by_arrival(work):
            composer.begin(item)
            _run_one(pair, item, settings, composer, on_token)
            composer.close()


def _run_one(
    pair: Pair,
    work: Work,
    settings: tuple[Schedule, CachePlan],
    composer: SpeculativeComposer,
    on_token: OnToken,
) -> None:
    schedule, cache = settings
    steps = speculative_generate_step(
        mx.array(work.prompt),
        pair.target,
        pair.draft,
        num_draft_tokens=pair.drafts,
        max_tokens=work.max_tokens,
        sampler=lambda logprobs: composer.sampled(work.sampler(logprobs)),
        prefill_step_size=schedule.prefill_chunk,
        kv_bits=cache.kv_bits,
        kv_group_size=cache.kv_group_size,
        quantized_kv_start=cache.kv_start,
    )
    with contextlib.closing(steps):
        for token, _, from_draft in steps:
            composer.answered(bool(from_draft))
            work.answer(int(token), on_token)
            if work.finished:
                break
