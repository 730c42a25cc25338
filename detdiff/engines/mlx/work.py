"""Requests as an engine sees them: token ids, positions, when to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from detdiff.engines.mlx.instrument.forward import Segment
from detdiff.engines.mlx.model import LoadedModel, context_limit, encode
from detdiff.errors import ContextExceeded, TokenOutOfRange
from detdiff.scenario import Scenario

from .forced import Forced, force
from .sampling import Sampler, sampler

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
