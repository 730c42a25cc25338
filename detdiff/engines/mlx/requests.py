"""Requests as an engine sees them: token ids, sampling, when to stop, and who gets how many rows in the next forward.

Teacher forcing: past the first token that differs two runs see different texts, so nothing can be compared there. Fed the tokens that
the other run generated, they can be compared to the end; what the model would choose is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.taps.forward import Segment
from detdiff.engines.schedule import Work, forced_tokens, request_tokens
from detdiff.errors import EngineRefuses, StopUnusable, TokenOutOfRange
from detdiff.scenario import Request, Scenario

from .model import LoadedModel, context_limit, encode, encode_messages
from .sampling import Sampler, processors, sampler
from .turns import Conversations


class Forced:
    """A sampler that answers with given tokens; ``chosen`` is what the native sampler chose for each, [1] each.

    Called once for each token in order, as every engine calls a request's sampler.
    """

    def __init__(self, native: Sampler, tokens: Sequence[int]) -> None:
        self.native, self._tokens = native, tuple(tokens)
        self.chosen: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Token id [1] of log-probabilities [1, V]."""
        own = self.native(logprobs)
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
        item.stop, item.stop_sequences = frozenset(), ()
        item.sampler = Forced(item.sampler, tokens)


def segment(work: Work, slot: int, start: int, count: int, column: int = 0) -> Segment:
    """Rows of a request in a forward; the phase is that of the first row."""
    phase = "prefill" if start < len(work.given) else "decode"
    return Segment(work.index, slot, start, count, phase, column)


def prepare(scenario: Scenario, loaded: LoadedModel) -> list[Work]:
    """The scenario's requests, tokenised and checked against the model.

    Raises what ``request_tokens`` raises, TokenOutOfRange for a sampler's ids outside the vocabulary, EngineRefuses for a
    ``top_k`` of no fewer, StopUnusable, and what ``force`` and ``detdiff.engines.mlx.model.encode`` raise.
    """
    vocabulary = loaded.identity.get("vocab_size")
    stop = frozenset(loaded.tokenizer.eos_token_ids)
    special = _special(loaded) if any(r.sampling.xtc_probability for r in scenario.requests) else ()
    conversations = Conversations(scenario.requests, loaded)

    def text_ids(request: Request, text: str) -> list[int]:
        if request.messages is not None:
            return encode_messages(loaded, request.messages, arguments=request.chat_template_args)
        return encode(loaded, text, request.chat, request.chat_template_args)

    tokens = request_tokens(scenario, text_ids, vocabulary, context_limit(loaded))
    work: list[Work] = []
    for index, (request, (prompt, scored)) in enumerate(zip(scenario.requests, tokens, strict=True)):
        if vocabulary is not None:
            _check_sampling(request, vocabulary)
        work.append(
            Work(
                index,
                request.id,
                prompt,
                len(scored) or request.max_tokens,
                0 if scenario.schedule.kind == "static" else request.arrival,
                frozenset() if request.ignore_stop or scored else stop,
                sampler(request.sampling, special),
                cancel=request.cancel,
                before=work[-1] if request.turn is not None else None,
                adapter=request.use_adapter,
                conversation=conversations.said,
                processors=processors(request.sampling),
                stop_sequences=tuple(_stop_tokens(loaded, request.id, text) for text in request.stop),
                scored=scored,
                task=scenario.task,
            )
        )
    if scenario.force_tokens is not None:
        force(work, scenario.force_tokens)
    return work


def _check_sampling(request: Request, vocabulary: int) -> None:
    asked = request.sampling
    ids = [token for token, _ in asked.logit_bias] + list(asked.xtc_special_tokens or ())
    if ids and max(ids) >= vocabulary:
        raise TokenOutOfRange(
            f"Request {request.id!r} asks for a bias or an exception for the token id {max(ids)}; the model's vocabulary has "
            f"{vocabulary} ids, 0 to {vocabulary - 1}. Correct logit_bias or xtc_special_tokens."
        )
    if asked.top_k is not None and asked.top_k >= vocabulary:
        raise EngineRefuses(
            f"Request {request.id!r} has top_k {asked.top_k}; expected fewer than the {vocabulary} ids of the model's vocabulary, as "
            "mlx-lm does. Lower it, or leave it out to keep all tokens."
        )


def _special(loaded: LoadedModel) -> tuple[int, ...]:
    """What mlx-lm's commands tell XTC to leave in."""
    encoder = getattr(loaded.tokenizer, "encode", None)
    line_end = [] if encoder is None or not loaded.reads_text else encoder("\n")
    return tuple(int(token) for token in (*line_end, *loaded.tokenizer.eos_token_ids))


def _stop_tokens(loaded: LoadedModel, id: str, text: str) -> tuple[int, ...]:
    """The tokens of a stop text, made as mlx-lm's ``make_stop_sequences`` does. Raises StopUnusable."""
    tokens = loaded.tokenizer.encode(text, add_special_tokens=False) if loaded.reads_text else ()
    if not tokens:
        raise StopUnusable(
            f"The stop text {text!r} of request {id!r} becomes no token with this model's tokenizer; expected one at least, since "
            "mlx-lm ends an answer at a text's tokens. Give another text, or a model with a tokenizer."
        )
    return tuple(int(token) for token in tokens)
