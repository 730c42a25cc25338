"""Requests as an engine sees them: token ids, sampling, when to stop, and who gets how many rows in the next forward.

Teacher forcing: past the first token that differs two runs see different texts, so nothing can be compared there. Fed the tokens that
the other run generated, they can be compared to the end; what the model would choose is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_top_p, greedy_sampler

from detdiff.engines.mlx.taps.forward import Segment
from detdiff.engines.schedule import Work, forced_tokens
from detdiff.errors import ContextExceeded, TokenOutOfRange
from detdiff.scenario import Sampling, Scenario

from .model import LoadedModel, context_limit, encode
from .turns import Conversations

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
    return TokenDraw(sampling)


class TokenDraw:
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
    """Make every request be fed what the trace at ``path`` generated under its id. Raises what ``forced_tokens`` does."""
    for item, tokens in zip(work, forced_tokens(work, path), strict=True):
        item.max_tokens = min(item.max_tokens, len(tokens))
        # The other run's stop ends the answer, not this run's own choice.
        item.stop = frozenset()
        item.sampler = Forced(item.sampler, tokens)


def segment(work: Work, slot: int, start: int, count: int, column: int = 0) -> Segment:
    """Rows of a request in a forward; the phase is that of the first row."""
    phase = "prefill" if start < len(work.prompt) else "decode"
    return Segment(work.index, slot, start, count, phase, column)


def prepare(scenario: Scenario, loaded: LoadedModel) -> list[Work]:
    """The scenario's requests, tokenised and checked against the model.

    Raises ContextExceeded when prompt and answer do not fit the model's context, TokenOutOfRange for ids outside
    the vocabulary, and what ``force`` and ``detdiff.engines.mlx.model.encode`` raise.
    """
    limit = context_limit(loaded)
    vocabulary = loaded.identity.get("vocab_size")
    stop = frozenset(loaded.tokenizer.eos_token_ids)
    conversations = Conversations(scenario.requests, loaded)
    work: list[Work] = []
    for index, request in enumerate(scenario.requests):
        prompt: Sequence[int]
        if request.turn is not None:
            # Known once the turn before is over: `turns.Conversations` puts it together.
            prompt = ()
        elif request.tokens is not None:
            prompt = request.tokens
        else:
            assert request.prompt is not None
            prompt = encode(loaded, request.prompt, request.chat)
        if vocabulary is not None and max(prompt, default=0) >= vocabulary:
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
                cancel=request.cancel,
                before=work[-1] if request.turn is not None else None,
                conversation=conversations.said,
            )
        )
    if scenario.force_tokens is not None:
        force(work, scenario.force_tokens)
    return work
