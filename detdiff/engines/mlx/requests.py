"""Requests as an engine sees them: token ids, sampling, when to stop, and who gets how many rows in the next forward.

Teacher forcing: past the first token that differs two runs see different texts, so nothing can be compared there. Fed the tokens that
the other run generated, they can be compared to the end; what the model would choose is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_top_p, greedy_sampler

from detdiff.engines.mlx.taps.forward import Segment
from detdiff.errors import ContextExceeded, ForcedTokensMissing, TokenOutOfRange
from detdiff.scenario import Sampling, Scenario, Schedule
from detdiff.trace import Trace

from .model import LoadedModel, context_limit, encode

Sampler = Callable[[mx.array], mx.array]


def sampler(sampling: Sampling) -> Sampler:
    """A function from log-probabilities [1, V] to a token id [1].

    mlx-lm calls a request's sampler once for each of its tokens, in order, so counting the calls gives the
    token's index whatever else is in the batch; the key of a draw is (seed, index).
    """
    if sampling.temperature == 0:
        # One object for all greedy requests: mlx-lm then samples the whole batch in one call.
        greedy: Sampler = greedy_sampler
        return greedy
    return Draw(sampling)


class Draw:
    """Draws of one request; ``index`` is that of the next token."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._seed, self.index = sampling, mx.random.key(sampling.seed), 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        key = mx.random.split(self._seed, self.index + 2)[self.index + 1]
        self.index += 1
        if self._sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, self._sampling.top_p)
        return mx.random.categorical(logprobs / self._sampling.temperature, key=key)


class Forced:
    """A sampler that answers with given tokens; ``chosen`` is what the native sampler chose for each, [1] each.

    Called once for each token in order, as every engine calls a request's sampler.
    """

    def __init__(self, native: Sampler, tokens: Sequence[int]) -> None:
        self._native, self._tokens = native, tuple(tokens)
        self.chosen: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Token id [1] of log-probabilities [1, V]."""
        own = self._native(logprobs)
        index = len(self.chosen)
        self.chosen.append(own)
        # mlx-lm runs one step ahead of what it answers, so it asks for one token more.
        return own if index >= len(self._tokens) else mx.full(own.shape, self._tokens[index], own.dtype)

    def own(self, index: int) -> int:
        """What the native sampler chose for a token."""
        return int(np.asarray(self.chosen[index]).ravel()[0])

    def fed(self, index: int, own: int) -> int:
        """Token ``index`` where an engine chooses without calling the sampler; notes its ``own`` choice."""
        del self.chosen[index:]
        self.chosen.append(mx.array([own]))
        return self._tokens[index] if index < len(self._tokens) else own


def force(work: Sequence[Work], path: str) -> None:
    """Make every request be fed what the trace at ``path`` generated under its id, to the end of those tokens.

    Raises ForcedTokensMissing where the trace has no such request, another prompt, or no token; and what opening a
    trace raises.
    """
    trace = Trace.open(path)
    numbers = {request["id"]: number for number, request in enumerate(trace.requests)}
    generated = trace.generated(lens=False)
    for item in work:
        number = numbers.get(item.id)
        if number is None:
            raise ForcedTokensMissing(
                f"force_tokens names {path}, which has no request {item.id!r}; expected one of each id. It has "
                f"{', '.join(map(repr, list(numbers)[:4]))}. Rename the requests, or force the tokens of another trace."
            )
        if tuple(trace.requests[number]["tokens"]) != item.prompt:
            raise ForcedTokensMissing(
                f"force_tokens names {path}, where request {item.id!r} has another prompt; expected the same tokens, since "
                "an answer only fits its own prompt. Force the tokens of a trace of this scenario's requests."
            )
        mine = np.flatnonzero(generated.request == number)
        order = np.argsort(generated.index[mine], kind="stable")
        tokens = generated.token[mine][order].tolist()
        if not tokens:
            raise ForcedTokensMissing(
                f"force_tokens names {path}, where request {item.id!r} generated nothing; expected at least one token to "
                "feed. Record that trace to its end first."
            )
        item.max_tokens = min(item.max_tokens, len(tokens))
        # The other run's stop ends the answer, not this run's own choice.
        item.stop = frozenset()
        item.sampler = Forced(item.sampler, tokens)


OnToken = Callable[[int, int, int], None]  # request index, token index, token id


@dataclass(eq=False)
class Work:
    """One request on its way: ``done`` rows are in the cache, ``generated`` are its answers so far."""

    index: int
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: int
    stop: frozenset[int]
    sampler: Sampler
    done: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.generated) and (
            len(self.generated) >= self.max_tokens or self.generated[-1] in self.stop
        )

    def segment(self, slot: int, start: int, count: int, column: int = 0) -> Segment:
        """Rows of this request in a forward; the phase is that of the first row."""
        phase = "prefill" if start < len(self.prompt) else "decode"
        return Segment(self.index, slot, start, count, phase, column)

    def answer(self, token: int, on_token: OnToken) -> None:
        """Take one token as the next input; what is told on is the model's own choice, where another is fed."""
        index = len(self.generated)
        on_token(self.index, index, self.sampler.own(index) if isinstance(self.sampler, Forced) else token)
        self.generated.append(token)


def prepare(scenario: Scenario, loaded: LoadedModel) -> list[Work]:
    """The scenario's requests, tokenised and checked against the model.

    Raises ContextExceeded when prompt and answer do not fit the model's context, TokenOutOfRange for ids outside
    the vocabulary, and what ``force`` and ``detdiff.engines.mlx.model.encode`` raise.
    """
    limit = context_limit(loaded)
    vocabulary = loaded.identity.get("vocab_size")
    stop = frozenset(loaded.tokenizer.eos_token_ids)
    work: list[Work] = []
    for index, request in enumerate(scenario.requests):
        if request.tokens is not None:
            prompt: Sequence[int] = request.tokens
        else:
            assert request.prompt is not None
            prompt = encode(loaded, request.prompt, request.chat)
        if vocabulary is not None and max(prompt) >= vocabulary:
            raise TokenOutOfRange(
                f"Request {request.id!r} has the token id {max(prompt)}; the model's vocabulary has {vocabulary} ids, "
                f"0 to {vocabulary - 1}. Correct the tokens, or name the model they are from."
            )
        if limit is not None and len(prompt) + request.max_tokens > limit:
            raise ContextExceeded(
                f"Request {request.id!r} has {len(prompt)} prompt tokens and asks for {request.max_tokens} more; the "
                f"model's context is {limit}. Shorten the prompt"
                + (f", or lower max_tokens to at most {limit - len(prompt)}." if limit > len(prompt) else ".")
            )
        work.append(
            Work(
                index,
                request.id,
                tuple(int(t) for t in prompt),
                request.max_tokens,
                0 if scenario.schedule.kind == "static" else request.arrival,
                frozenset() if request.ignore_stop else stop,
                sampler(request.sampling),
            )
        )
    if scenario.force_tokens is not None:
        force(work, scenario.force_tokens)
    return work


def by_arrival(work: Iterable[Work]) -> list[Work]:
    """In the order in which an engine sees them; equal arrivals in the order of the scenario."""
    return sorted(work, key=lambda w: (w.arrival, w.index))


@dataclass(frozen=True)
class Share:
    """Rows that one request gets in a forward: ``tokens`` at the positions from ``start`` on.

    The logits of the last ``answers`` of them are asked for.
    """

    work: Work
    start: int
    tokens: tuple[int, ...]
    answers: int
    phase: str


class Allotment(NamedTuple):
    """How many rows a request gets."""

    work: Work
    rows: int


def allot(active: Sequence[Work], schedule: Schedule, drafts: int | None = None) -> list[Allotment]:
    """Rows by request: decoding requests first, then prompts in order of arrival, within the budget.

    A decoding request gets one row, and under speculation as many as proposals of it can be verified: ``drafts``, or
    what is left of its answer or of the budget.
    """
    left = schedule.row_budget if schedule.row_budget is not None else 1 << 40
    found: list[Allotment] = []
    for work in active:
        if work.generated:
            rows = min(left, 1 if drafts is None else min(drafts, work.max_tokens - len(work.generated)))
            found += [Allotment(work, rows)] if rows else []
            left -= rows
    for work in active:
        if not work.generated:
            rows = min(left, schedule.prefill_chunk, len(work.prompt) - work.done)
            found += [Allotment(work, rows)] if rows else []
            left -= rows
    return found


def prompt_share(work: Work, rows: int) -> Share:
    """The next ``rows`` of a prompt; its last row answers."""
    end = work.done + rows
    return Share(work, work.done, work.prompt[work.done : end], int(end == len(work.prompt)), "prefill")
