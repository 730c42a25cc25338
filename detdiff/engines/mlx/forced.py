"""Teacher forcing: a request is fed the tokens that another run generated; what the model would choose is kept.

Past the first token that differs two runs see different texts, so nothing can be compared there. Fed the same tokens,
they can be compared to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from detdiff.errors import ForcedTokensMissing
from detdiff.trace import Trace

from .sampling import Sampler

if TYPE_CHECKING:
    from .work import Work


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
