"""Choosing a token: greedy, or a draw that depends on the request's seed and the token's index alone."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p, greedy_sampler

from detdiff.scenario import Sampling

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
