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
    seed = mx.random.key(sampling.seed)
    index = 0

    def draw(logprobs: mx.array) -> mx.array:
        nonlocal index
        key = mx.random.split(seed, index + 2)[index + 1]
        index += 1
        if sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        return mx.random.categorical(logprobs / sampling.temperature, key=key)

    return draw
