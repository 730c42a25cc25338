"""The padded layout: mlx-lm's own generators, told apart only by what they are given.

What is diagnosed is what users run, so nothing of mlx-lm is rewritten here. Its two batch classes are watched to
learn whose rows a model call holds; its ``speculative_generate_step`` runs one request at a time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.generate import (
    BatchGenerator,
    GenerationBatch,
    PromptProcessingBatch,
    StopSequences,
    generate_step,
    speculative_generate_step,
)
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from detdiff.engines.mlx.taps.forward import DRAFT, TARGET, Forward, Segment
from detdiff.engines.schedule import OnEvent, OnToken, Work, admitted, by_arrival, silent
from detdiff.engines.speculation import DraftCounts
from detdiff.scenario import GENERATE, CachePlan, Schedule

from .cache_events import CacheOwners, watched
from .caches import reused_cache
from .requests import segment
from .sampling import seed_state
from .turns import TurnCaches


class PaddedComposer:
    """Says whose rows each padded model call holds, from what mlx-lm's batches are about to run."""

    def __init__(self, work: list[Work]) -> None:
        self._work = work
        self._uids: dict[int, Work] = {}
        self._lanes: list[tuple[Work, int]] = []  # (request, rows it still has in this prompt call)
        self._column = 0
        self._starts: list[int] = []
        self._prompt = False
        self.forwards = 0

    def name(self, uids: list[int], work: list[Work]) -> None:
        """Which request each of the generator's uids is."""
        self._uids.update(zip(uids, work, strict=True))

    def work_of(self, uid: int) -> Work:
        return self._uids[uid]

    def serial(self, work: Work) -> None:
        """From now on every call holds rows of this one request."""
        self._lanes = [(work, 0)]
        self._prompt = False

    def prompt_call(self, uids: list[int], lengths: list[int]) -> None:
        """The next calls process prompts of these lengths, right-padded to the longest."""
        self._lanes = [(self._uids[u], n) for u, n in zip(uids, lengths, strict=True)]
        self._starts = [work.done for work, _ in self._lanes]
        self._column = 0
        self._prompt = True

    def whole_call(self, work: list[Work]) -> None:
        """The next calls process whole texts, right-padded to the longest; their logits are used."""
        self.name(list(range(len(work))), work)
        self.prompt_call(list(range(len(work))), [len(item.given) for item in work])

    def step_call(self, uids: list[int]) -> None:
        """The next call decodes one row of each."""
        self._lanes = [(self._uids[u], 1) for u in uids]
        self._prompt = False

    def compose(self, inputs: mx.array, cache: Any) -> Forward:
        slots, columns = inputs.shape
        segments: list[Segment] = []
        for slot, (work, length) in enumerate(self._lanes):
            if self._prompt:
                start = self._starts[slot] + self._column
                count = max(0, min(columns, length - self._column))
            else:
                start, count = work.done, columns
            if count:
                segments.append(segment(work, slot, start, count))
                work.done = start + count
        self._column += columns
        # generate_step keeps the logits of its last prompt token only; BatchGenerator keeps none of a prompt's.
        if any(work.task != GENERATE for work, _ in self._lanes):
            prompts = [len(self._lanes[s.slot][0].prompt) for s in segments]
            used = any(s.start + s.count >= prompt for s, prompt in zip(segments, prompts, strict=True))
        else:
            used = not self._prompt and not (
                len(self._lanes) == 1 and segments[0].start + columns < self._answer_from()
            )
        forward = Forward(self.forwards, "padded", (slots, columns), tuple(segments), inputs, None, used)
        self.forwards += 1
        return forward

    def _answer_from(self) -> int:
        return len(self._lanes[0][0].prompt)


@contextlib.contextmanager
def _batches_watched(composer: PaddedComposer) -> Iterator[None]:
    """mlx-lm's batch classes tell ``composer`` what they are about to run, while the block lasts."""
    native_prompt: Callable[..., Any] = PromptProcessingBatch.prompt
    native_step: Callable[..., Any] = GenerationBatch._step

    def prompt(self: Any, tokens: list[list[int]]) -> Any:
        if tokens:
            composer.prompt_call(list(self.uids), [len(t) for t in tokens])
        return native_prompt(self, tokens)

    def step(self: Any) -> Any:
        composer.step_call(list(self.uids))
        return native_step(self)

    PromptProcessingBatch.prompt, GenerationBatch._step = prompt, step
    try:
        yield
    finally:
        PromptProcessingBatch.prompt, GenerationBatch._step = native_prompt, native_step


OnChoice = Callable[[int, int, mx.array], None]
"""``on_choice(request, index, logprobs)``: the log-probabilities [V] that the sampler chose a token from."""


@contextlib.contextmanager
def padding_of(token: int | None) -> Iterator[None]:
    """While the block lasts, mlx-lm fills its batches of prompts with ``token`` instead of 0; None: with 0."""
    if token is None:
        yield
        return
    module: Any = sys.modules[BatchGenerator.__module__]  # mlx_lm.generate is a function, too
    native = module._right_pad_prompts

    def filled(prompts: list[list[int]], max_length: int | None = None) -> mx.array:
        longest = max_length or max(map(len, prompts))
        return mx.array([each + [token] * (longest - len(each)) for each in prompts])

    module._right_pad_prompts = filled
    try:
        yield
    finally:
        module._right_pad_prompts = native


@dataclass(frozen=True)
class PaddedRun:
    """What a padded run is done with: the model, how its caches are kept, and who hears of choices, tokens and cache events."""

    model: Module
    schedule: Schedule
    composer: PaddedComposer
    on_token: OnToken
    turns: TurnCaches
    cache: CachePlan = field(default_factory=CachePlan)
    event: OnEvent = silent
    on_choice: OnChoice | None = None

    def answer(self, work: Work, token: int, logprobs: mx.array) -> None:
        """Take a token that was chosen from log-probabilities [V]."""
        if self.on_choice is not None:
            self.on_choice(work.index, len(work.generated), logprobs)
        work.answer(token, self.on_token)


def run_padded(run: PaddedRun, work: list[Work]) -> None:
    """Run all requests; serial through ``generate_step``, else through ``BatchGenerator``."""
    with contextlib.ExitStack() as stack:
        owners = CacheOwners(of_uid=lambda uid: run.composer.work_of(uid).index)
        if run.event is not silent:
            stack.enter_context(watched(owners, run.event))
        if run.schedule.kind == "serial":
            for item in by_arrival(work):
                owners.serial = item.index
                _serial(run, item)
            return
        stack.enter_context(_batches_watched(run.composer))
        _batched(run, work, owners)


def _serial(run: PaddedRun, work: Work) -> None:
    run.turns.adapt(work)
    caches = run.turns.caches(work)
    run.composer.serial(work)
    plan = run.cache
    if plan.reuse_tokens is not None and work.before is None:
        caches = reused_cache(run.model, work, plan, run.event)
    seed_state([work])
    steps = generate_step(
        mx.array(work.prompt[work.done :]),
        run.model,
        max_tokens=work.max_tokens,
        sampler=work.sampler,
        logits_processors=list(work.processors) or None,
        max_kv_size=plan.max_kv_size,
        prompt_cache=caches,
        prefill_step_size=run.schedule.prefill_chunk,
        kv_bits=plan.kv_bits,
        kv_group_size=plan.kv_group_size,
        quantized_kv_start=plan.kv_start,
    )
    with contextlib.closing(steps):
        for token, logprobs in steps:
            run.answer(work, int(token), logprobs)
            if work.finished:
                break
    run.turns.keep(work, caches)


def run_whole(run: PaddedRun, work: list[Work]) -> None:
    """Run batches of right-padded texts to be scored or embedded, one after the other, as mlx-lm's own evaluation does."""
    size = 1 if run.schedule.kind == "serial" else run.schedule.active or len(work)
    for first in range(0, len(work), size):
        _run_whole_batch(run, work[first : first + size])


def _run_whole_batch(run: PaddedRun, batch: list[Work]) -> None:
    longest = max(len(item.given) for item in batch)
    module: Any = sys.modules[BatchGenerator.__module__]
    tokens = module._right_pad_prompts([list(item.given) for item in batch], max_length=longest)
    cache = make_prompt_cache(run.model)
    for state in _states(cache):
        # Or it would run on through the padding.
        state.prepare(lengths=[len(item.given) for item in batch])
    run.composer.whole_call(batch)
    for start in range(0, longest, run.schedule.prefill_chunk):
        before = [item.done for item in batch]
        mx.eval(run.model(tokens[:, start : start + run.schedule.prefill_chunk], cache=cache))
        for item, done in zip(batch, before, strict=True):
            first = max(done, len(item.prompt) - 1)
            item.score(max(0, item.done - first), run.on_token)


def _states(caches: Iterable[Any]) -> Iterator[ArraysCache]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _states(cache.caches)
        elif isinstance(cache, ArraysCache):
            yield cache


def _batched(run: PaddedRun, work: list[Work], owners: CacheOwners) -> None:
    schedule, composer = run.schedule, run.composer
    limit = len(work) if schedule.active is None else schedule.active
    generator = BatchGenerator(
        run.model,
        completion_batch_size=limit,
        prefill_batch_size=limit,
        prefill_step_size=schedule.prefill_chunk,
        max_kv_size=run.cache.max_kv_size,
    )
    waiting = by_arrival(work)
    seed_state(waiting)
    active: list[Work] = []
    try:
        while waiting or active:
            # Inserting only what fits keeps the limit: mlx-lm itself does not count prompts being processed.
            due = admitted(waiting, active, schedule, composer.forwards)
            if due:
                caches = []
                for item in due:
                    owners.serial = item.index
                    caches.append(run.turns.caches(item))
                _insert(generator, due, caches, composer)
                waiting = [item for item in waiting if item not in due]
                active += due
            _, answers = generator.next()
            for answer in answers:
                item = composer.work_of(answer.uid)
                run.answer(item, int(answer.token), answer.logprobs)
                item.ended = answer.finish_reason is not None
                if item.finished:
                    held = answer.prompt_cache
                    if answer.finish_reason is None:
                        held, _ = generator.remove([answer.uid], return_prompt_caches=True)[answer.uid]
                    run.turns.keep(item, held)
            active = [item for item in active if not item.finished]
    finally:
        generator.close()


def _insert(generator: BatchGenerator, work: list[Work], caches: list[Any], composer: PaddedComposer) -> None:
    uids = generator.insert(
        [list(item.prompt[item.done :]) for item in work],
        caches=caches,
        # The processors see the whole conversation, as in mlx-lm's server.
        all_tokens=[list(item.prompt[: item.done]) for item in work],
        max_tokens=[item.max_tokens for item in work],
        samplers=[item.sampler for item in work],
        logits_processors=[list(item.processors) for item in work],
        stop_sequences=[
            StopSequences([*([t] for t in sorted(item.stop)), *item.stop_sequences] or None) for item in work
        ],
    )
    composer.name(uids, work)


@dataclass
class _VerificationRound:
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
        self._round: _VerificationRound | None = None
        self.owners = CacheOwners(of_uid=lambda uid: uid)
        self.forwards = 0
        self.counts: dict[int, DraftCounts] = {}

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
            self._round = _VerificationRound(start, inputs, before=len(work.generated))
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
        self.counts.setdefault(self._work.index, DraftCounts()).accepted += from_draft

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
        self.counts.setdefault(work.index, DraftCounts()).proposed += len(proposals)
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
