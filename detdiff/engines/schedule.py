"""Requests on their way through an engine, and who gets how many rows in its next forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from detdiff.errors import ContextExceeded, ForcedTokensMissing, NothingToCheck, TokenOutOfRange
from detdiff.scenario import EMBED, GENERATE, SCORE, Request, Scenario, Schedule
from detdiff.trace import Trace

OnToken = Callable[[int, int, int], None]  # request index, token index, token id
OnEvent = Callable[..., None]
"""``event(kind, **fields)``: puts a line into the trace."""


def silent(kind: str, **fields: Any) -> None:
    """An ``OnEvent`` that nobody hears."""


@dataclass(frozen=True)
class Said:
    """The tokens of a conversation up to an answer. The first ``told`` are those of the turn before, as far as they are
    not taken back; ``closing`` are those with which the chat template ends the answer before, None without a template."""

    tokens: tuple[int, ...]
    told: int
    closing: tuple[int, ...] | None = None


@dataclass(eq=False)
class Work:
    """One request on its way: ``done`` rows are in the cache, ``generated`` are its answers so far.

    ``before`` is the turn that it goes on from; ``prompt``, the conversation up to its own answer, is then what ``conversation``
    gives once that is over. ``cancel`` is after how many tokens it is cancelled.

    ``scored`` are given tokens after the prompt, whose log-probabilities are asked for. Nothing is generated then, nor where
    prompts are embedded. ``came`` is when its arrival was there, by time.perf_counter(), None for the start of the run.
    """

    index: int
    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: int
    stop: frozenset[int]
    sampler: Any
    done: int = 0
    generated: list[int] = field(default_factory=list)
    cancel: int | None = None
    before: Work | None = None
    adapter: bool = True
    conversation: Callable[[Work], Said] | None = None
    processors: tuple[Any, ...] = ()
    """Functions that change the logits before the sampler chooses."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that end the answer, beside the single ones of ``stop``."""
    ended: bool | None = None
    """Whether a library that looks for stops itself has said that the answer ends here; None: nobody but this looks for them."""
    scored: tuple[int, ...] = ()
    task: str = GENERATE
    came: float | None = None

    @property
    def given(self) -> tuple[int, ...]:
        """The tokens of the rows that are known beforehand. No row is needed for the last scored token."""
        return self.prompt + self.scored[:-1]

    @property
    def decoding(self) -> bool:
        """Whether the next row's token is one that was generated."""
        return bool(self.generated) and self.task == GENERATE

    @property
    def finished(self) -> bool:
        if self.task == EMBED:
            return self.done >= len(self.prompt)
        if not self.generated:
            return False
        stops = self._stops if self.ended is None else self.ended
        return stops or len(self.generated) >= self.max_tokens or self.cancelled

    @property
    def _stops(self) -> bool:
        return self.generated[-1] in self.stop or any(
            tuple(self.generated[-len(ends) :]) == ends for ends in self.stop_sequences
        )

    @property
    def cancelled(self) -> bool:
        return self.cancel is not None and len(self.generated) >= self.cancel

    @property
    def ready(self) -> bool:
        """Whether it may begin: the turn before is over."""
        return self.before is None or self.before.finished

    @property
    def rows(self) -> tuple[int, ...]:
        """The tokens whose rows its cache holds."""
        return (*self.prompt, *self.generated)[: self.done]

    def answer(self, token: int, on_token: OnToken) -> None:
        """Take one token as the next input; what is told on is the model's own choice, where a sampler feeds another."""
        index = len(self.generated)
        own = getattr(self.sampler, "own", None)
        on_token(self.index, index, token if own is None else own(index))
        self.generated.append(token)

    def score(self, rows: int, on_token: OnToken) -> None:
        """So many rows more have answered: the next scored tokens are done."""
        for token in self.scored[len(self.generated) : len(self.generated) + rows]:
            self.answer(token, on_token)


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


def admitted(
    waiting: Sequence[Work], active: Sequence[Work], schedule: Schedule, clock: int, most: int | None = None
) -> list[Work]:
    """Those of ``waiting``, in order of arrival, that begin before the forward ``clock``; ``most`` is an engine's own limit.

    A static batch of fewer than all waits until its longest request is through. An idle engine has no forwards to wait for: its
    next arrival comes at once.
    """
    limit = 1 if schedule.kind == "serial" else schedule.active or len(waiting) + len(active)
    limit = min(limit, most or limit)
    now = clock if active or not waiting else max(clock, waiting[0].arrival)
    due = [item for item in waiting if item.arrival <= now and item.ready]
    for item in due:
        if item.arrival and item.came is None:
            item.came = time.perf_counter()
    if schedule.kind == "static" and schedule.active is not None and active:
        return []
    return due[: max(0, limit - len(active))]


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
        if work.decoding:
            rows = min(left, 1 if drafts is None else min(drafts, work.max_tokens - len(work.generated)))
            found += [Allotment(work, rows)] if rows else []
            left -= rows
    for work in active:
        if not work.decoding:
            rows = min(left, schedule.prefill_chunk, len(work.given) - work.done)
            found += [Allotment(work, rows)] if rows else []
            left -= rows
    return found


def prompt_share(work: Work, rows: int) -> Share:
    """The next ``rows`` of a prompt; its last row answers, and each row before a scored token does."""
    end = work.done + rows
    answers = min(rows, max(0, end - len(work.prompt) + 1))
    return Share(work, work.done, work.given[work.done : end], answers, "prefill")


def forced_tokens(work: Sequence[Work], path: str) -> list[list[int]]:
    """What the trace at ``path`` generated under each request's id.

    Raises ForcedTokensMissing where the trace has no such request, another prompt, or no token; and what opening a
    trace raises.
    """
    trace = Trace.open(path)
    numbers = {request["id"]: number for number, request in enumerate(trace.requests)}
    generated = trace.generated(lens=False)
    found: list[list[int]] = []
    for item in work:
        number = numbers.get(item.id)
        if number is None:
            raise ForcedTokensMissing(
                f"force_tokens names {path}, which has no request {item.id!r}; expected one of each id. It has "
                f"{', '.join(map(repr, list(numbers)[:4]))}. Rename the requests, or force the tokens of another trace."
            )
        if item.before is None and tuple(trace.requests[number]["tokens"]) != item.prompt:
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
        found.append(tokens)
    return found


def prompt_tokens(
    scenario: Scenario, encode: Callable[[str, bool], list[int]], vocabulary: int | None, context: int | None
) -> list[tuple[int, ...]]:
    """Each request's prompt as token ids. Raises what ``request_tokens`` raises."""

    def ids(request: Request, text: str) -> list[int]:
        return encode(text, request.chat)

    return [prompt for prompt, _ in request_tokens(scenario, ids, vocabulary, context)]


def request_tokens(
    scenario: Scenario,
    encode: Callable[[Request, str], list[int]],
    vocabulary: int | None,
    context: int | None,
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each request's prompt as token ids, and those that are scored after it; a later turn has none yet.

    They are ids of a vocabulary of so many and, with the answer, fit a context. Raises NothingToCheck, TokenOutOfRange,
    ContextExceeded, and what ``encode(request, text)`` raises.
    """
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for request in scenario.requests:
        if request.turn is not None:
            # A later turn's prompt is known once the turn before is over.
            found.append(((), ()))
            continue
        tokens, first = _encoded(request, encode)
        if not tokens:
            raise NothingToCheck(
                f"The prompt of request {request.id!r} becomes no token at all; expected one at least. Give it some text."
            )
        if vocabulary is not None and max(tokens) >= vocabulary:
            raise TokenOutOfRange(
                f"Request {request.id!r} has the token id {max(tokens)}; the model's vocabulary has {vocabulary} ids, "
                f"0 to {vocabulary - 1}. Correct the tokens, or name the model they are from."
            )
        if scenario.task == SCORE and first >= len(tokens):
            raise NothingToCheck(
                f"Request {request.id!r} has {len(tokens)} tokens, and those from position {first} on are to be scored; expected "
                "one at least. Give it a longer text, or lower score_from."
            )
        more = request.max_tokens if scenario.task == GENERATE else 0
        if context is not None and len(tokens) + more > context:
            raise ContextExceeded(
                f"Request {request.id!r} has {len(tokens)} prompt tokens and asks for {more} more; the "
                f"model's context is {context}. Shorten the prompt"
                + (
                    f", or lower max_tokens to at most {context - len(tokens)}."
                    if context > len(tokens)
                    else "."
                )
            )
        scored = tokens[first:] if scenario.task == SCORE else ()
        found.append((tokens[: len(tokens) - len(scored)], scored))
    return found


def _encoded(request: Request, encode: Callable[[Request, str], list[int]]) -> tuple[tuple[int, ...], int]:
    """A request's tokens, and the position of the first that could be scored.

    A continuation is tokenised together with its prompt, as a model would be given it; what the prompt alone has otherwise
    at its end counts as the continuation's.
    """
    if request.tokens is not None:
        return request.tokens, request.score_from
    prompt = tuple(encode(request, request.prompt or ""))
    if request.continuation is None:
        return prompt, request.score_from
    tokens = tuple(encode(request, (request.prompt or "") + request.continuation))
    same = next(
        (n for n, (x, y) in enumerate(zip(prompt, tokens, strict=False)) if x != y),
        min(len(prompt), len(tokens)),
    )
    return tokens, max(1, same)
