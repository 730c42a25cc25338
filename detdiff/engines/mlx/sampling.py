"""How a request's tokens are chosen: by mlx-lm's own logits processors and then its sampler, or a keyed draw of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
    make_sampler,
)

from detdiff.engines.schedule import Work
from detdiff.scenario import Sampling
from detdiff.scenario.sampling import MLX_LM

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


def sampler(sampling: Sampling, special: Sequence[int] = ()) -> Sampler:
    """A function from log-probabilities [1, V] to a token id [1]; ``special`` are the ids that XTC leaves in.

    mlx-lm calls a request's sampler once for each of its tokens, in order, so counting the calls gives the
    token's index whatever else is in the batch; the key of a keyed draw is (seed, index).
    """
    if not sampling.draws:
        # One object for all greedy requests: mlx-lm then samples the whole batch in one call.
        greedy: Sampler = greedy_sampler
        return greedy
    return StateDraw(sampling, special) if sampling.sampler == MLX_LM else TokenDraw(sampling)


def processors(sampling: Sampling) -> tuple[Processor, ...]:
    """mlx-lm's processors: functions of the request's token ids so far [n] and its logits [1, V] to logits [1, V], which may
    be changed in place."""
    if not sampling.processed:
        return ()
    made = make_logits_processors(
        dict(sampling.logit_bias),
        sampling.repetition_penalty,
        sampling.repetition_context_size,
        sampling.presence_penalty,
        sampling.presence_context_size,
        sampling.frequency_penalty,
        sampling.frequency_context_size,
    )
    return tuple(made)


class TokenDraw:
    """Draws of one request, each by its own key; ``index`` is that of the next token."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._seed, self.index = sampling, mx.random.key(sampling.seed), 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        key = mx.random.split(self._seed, self.index + 2)[self.index + 1]
        self.index += 1
        return mx.random.categorical(self._filtered(logprobs) / self._sampling.temperature, key=key)

    def _filtered(self, logprobs: mx.array) -> mx.array:
        # In the order of mlx-lm's make_sampler.
        asked = self._sampling
        if asked.top_p < 1:
            logprobs = apply_top_p(logprobs, asked.top_p)
        if asked.min_p:
            logprobs = apply_min_p(logprobs, asked.min_p, asked.min_tokens_to_keep)
        return logprobs if asked.top_k is None else apply_top_k(logprobs, asked.top_k)


class StateDraw:
    """mlx-lm's own sampler of one request, which draws from MLX's one random state."""

    def __init__(self, sampling: Sampling, special: Sequence[int]) -> None:
        self.seed, self.special = sampling.seed, tuple(special)
        given = sampling.xtc_special_tokens
        self._native: Sampler = make_sampler(
            temp=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            min_tokens_to_keep=sampling.min_tokens_to_keep,
            top_k=sampling.top_k or 0,
            xtc_probability=sampling.xtc_probability,
            xtc_threshold=sampling.xtc_threshold,
            xtc_special_tokens=list(special if given is None else given),
        )

    def __call__(self, logprobs: mx.array) -> mx.array:
        return self._native(logprobs)


def native_sampler(work: Work) -> Any:
    """The sampler that chooses for a request, even where another token is fed."""
    return getattr(work.sampler, "native", work.sampler)


def seed_state(work: Iterable[Work]) -> None:
    """Set MLX's random state to the seed of the first of these requests that draws from it, as mlx-lm's commands and its
    server do before they generate."""
    for item in work:
        drawn = native_sampler(item)
        if isinstance(drawn, StateDraw):
            mx.random.seed(drawn.seed)
            return


def random_state() -> int:
    """MLX's random state, as the seed that gives it again."""
    state: Any = mx.random.state
    high, low = (int(part) for part in np.asarray(state[0]))
    return high << 32 | low


def processed(work: Work, logits: mx.array) -> mx.array:
    """Logits [1, V] of a request's next token after its processors, as mlx-lm calls them."""
    if work.processors:
        history = mx.array([*work.prompt, *work.generated])
        for processor in work.processors:
            logits = processor(history, logits)
    return logits
