"""The search: phase by phase, each cutting one sort of thing down, until nothing more goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from detdiff.errors import ScenarioError
from detdiff.explain.control import smallest

from .pair import Candidate, Twin, lowered, plainer
from .result import DivergenceKind, TrialOutcome
from .trials import CandidateTrials, ReductionBudgetSpent


def least_number(low: int, high: int, works: Callable[[int], bool]) -> int:
    """A number from ``low`` to ``high`` that works; ``high`` is taken to work and is not tried.

    Distances from ``low`` double until one works, and then halve down to it, so the answer is the least one where larger
    numbers always work. ``works`` is asked no number twice.
    """
    failed, found, distance = low - 1, high, 0
    while low + distance < high:
        if works(low + distance):
            found = low + distance
            break
        failed, distance = low + distance, 2 * distance + 1
    while found - failed > 1:
        middle = (failed + found) // 2
        if works(middle):
            found = middle
        else:
            failed = middle
    return found


Holds = Callable[[Candidate], bool]
Phase = Callable[[Candidate, Holds], Candidate]
OnStep = Callable[[str, Candidate, TrialOutcome], None]

ROUNDS: Final = 4
NEIGHBOURS: Final = 12
"""How many requests are tried as the only neighbour, one by one, before sets of them are halved."""
CHUNKS: Final = 4
"""Into how many pieces a prompt is cut, of which some may go."""
SEEDS: Final = 8
"""Seeds of a random-weight twin that are tried before it is given up: with other weights, rounding is origin at other sites."""


class Search:
    """Goes from the original pair to the smallest one, step by step; ``on_step`` is told of each.

    A candidate is compared first. Only what a phase ends with is judged; where its verdict is another one, the phase is
    done again with a verdict on each candidate that looks alike.
    """

    def __init__(
        self, trials: CandidateTrials, start: Candidate, on_step: OnStep, *, flip: bool = False
    ) -> None:
        """Raises what running the original raises; ``original`` is then what has to stay."""
        self.now = start
        self.answer = trials.original(start)
        self.finished = False
        self._trials = trials
        self._on_step = on_step
        self._flip = flip
        self._original = self.answer.kind
        self._kind = self._rule = ""

    @property
    def original(self) -> DivergenceKind | None:
        return self._original

    def run(self, layers: int | None) -> None:
        """Cut down as far as it goes. ``layers`` is the number of layers of the model where twins may stand for it."""
        self._kind, self._rule = self._trials.verdict(self.now)
        self._on_step("the pair as it was given", self.now, self.answer)
        try:
            self._phase("no tokens after the point where they diverge", lambda now, holds: now)
            self._phase("fewer requests", self._requests)
            self._rounds()
            if layers is not None and self._phase("random weights", _twins):
                self._phase("fewer layers", lambda now, holds: _layers(now, holds, layers))
                self._rounds()
                self._phase("fewer layers", lambda now, holds: _layers(now, holds, layers))
            self.finished = True
        except ReductionBudgetSpent:
            return

    def _rounds(self) -> None:
        for _ in range(ROUNDS):
            before, rows = self.now, self.answer.rows
            self._phase("earlier arrivals", _arrivals)
            self._phase("shorter prompts", _prompts)
            self._phase("fewer tokens", _tokens)
            self._phase("plainer settings", plainer)
            self._phase("smaller settings", lowered)
            if self.now == before or self.answer.rows > 0.8 * rows:
                return

    def _phase(self, step: str, phase: Phase) -> bool:
        """Go as far as a phase goes; whether it led anywhere."""
        for holds in (self._looks_alike, self._is_alike):
            found = self._best(phase, holds)
            if found == self.now:
                break
            if self._judged_alike(found):
                self.now, self.answer = found, self._trials.answer(found)
                self._on_step(step, self.now, self.answer)
                return True
        return False

    def _best(self, phase: Phase, holds: Holds) -> Candidate:
        """What a phase ends with, without the tokens that then come after the divergence; where the budget ends, the best
        so far, if there is one."""
        best = self.now

        def noted(candidate: Candidate) -> bool:
            nonlocal best
            if holds(candidate):
                best = candidate
                return True
            return False

        try:
            return self._cut(phase(self.now, noted), noted)
        except ReductionBudgetSpent:
            if best == self.now:
                raise
            return best

    def _cut(self, candidate: Candidate, holds: Holds) -> Candidate:
        for limits in self._trials.answer(candidate).needed:
            shorter = candidate.with_tokens(limits)
            if shorter == candidate:
                break
            if holds(shorter):
                return shorter
        return candidate

    def _looks_alike(self, candidate: Candidate) -> bool:
        if candidate == self.now:
            return True
        if candidate.a == candidate.b and self._kind != "nondeterminism":
            return False
        found = self._trials.answer(candidate)
        if found.kind is None or self._original is None or found.rows > self.answer.rows:
            return False
        return self._original.alike(found.kind, flip=self._flip, layers=candidate.twin is not None)

    def _is_alike(self, candidate: Candidate) -> bool:
        return self._looks_alike(candidate) and self._judged_alike(candidate)

    def _judged_alike(self, candidate: Candidate) -> bool:
        kind, rule = self._trials.verdict(candidate)
        return kind == self._kind and (kind != "undetermined" or rule == self._rule)

    def _requests(self, now: Candidate, holds: Holds) -> Candidate:
        """The request that diverges first alone, then with one neighbour, then the smallest set."""
        first = self._trials.answer(now).first_request or now.ids[0]
        others = [id for id in now.ids if id != first]

        def works(ids: Sequence[str]) -> bool:
            made = _made(lambda: now.keeping(ids))
            return made is not None and holds(made)

        for few in ([], *([id] for id in others[:NEIGHBOURS])):
            if len(few) < len(others) and works([first, *few]):
                return now.keeping([first, *few])
        if len(now.ids) < 3:
            return now
        return now.keeping(smallest(now.ids, works))


def _made(edit: Callable[[], Candidate]) -> Candidate | None:
    """What an edit gives; None where it would be no scenario."""
    try:
        return edit()
    except ScenarioError:
        return None


def _longest_first(now: Candidate, sizes: dict[str, int]) -> Iterator[str]:
    yield from sorted(now.ids, key=lambda id: -sizes[id])


def _prompts(now: Candidate, holds: Holds) -> Candidate:
    """All prompts cut to one length, then each by itself, then pieces from the middle and the end of what is left."""
    prompts = now.prompts
    longest = max(map(len, prompts.values()))

    def all_of(length: int) -> Candidate:
        return now.with_prompts({id: tokens[:length] for id, tokens in prompts.items()})

    length = least_number(1, longest, lambda n: holds(all_of(n)))
    if length < longest:
        now = all_of(length)
    for id in _longest_first(now, {id: len(tokens) for id, tokens in now.prompts.items()}):
        now = _prompt(now, id, holds)
    return now


def _prompt(now: Candidate, id: str, holds: Holds) -> Candidate:
    tokens = now.prompts[id]

    def first(length: int) -> Candidate:
        return now.with_prompts({id: tokens[:length]})

    length = least_number(1, len(tokens), lambda n: holds(first(n)))
    if length < len(tokens):
        now, tokens = first(length), tokens[:length]
    size = -(-len(tokens) // CHUNKS)
    pieces = [tokens[n : n + size] for n in range(0, len(tokens), size)]
    if size < 2:
        return now

    def some(kept: Sequence[Sequence[int]]) -> Candidate:
        return now.with_prompts({id: [token for piece in kept for token in piece]})

    found = smallest(pieces, lambda kept: holds(some(kept)))
    return some(found) if len(found) < len(pieces) else now


def _tokens(now: Candidate, holds: Holds) -> Candidate:
    for id in _longest_first(now, now.max_tokens):
        base = now

        def works(limit: int, base: Candidate = base, id: str = id) -> bool:
            return holds(base.with_tokens({id: limit}))

        limit = least_number(1, now.max_tokens[id], works)
        if limit < now.max_tokens[id]:
            now = now.with_tokens({id: limit})
    return now


def _arrivals(now: Candidate, holds: Holds) -> Candidate:
    delayed = {id: arrival for id, arrival in now.arrivals.items() if arrival}
    if not delayed:
        return now
    at_once = now.with_arrivals(dict.fromkeys(delayed, 0))
    if holds(at_once):
        return at_once
    for id, arrival in delayed.items():
        base = now
        found = least_number(0, arrival, lambda n, base=base, id=id: holds(base.with_arrivals({id: n})))  # type: ignore[misc]
        if found < arrival:
            now = now.with_arrivals({id: found})
    return now


def _twins(now: Candidate, holds: Holds) -> Candidate:
    for seed in range(SEEDS):
        made = replace(now, twin=Twin(seed))
        if holds(made):
            return made
    return now


def _layers(now: Candidate, holds: Holds, layers: int) -> Candidate:
    twin = now.twin
    assert twin is not None

    def cut(n: int) -> Candidate:
        return replace(now, twin=replace(twin, layers=n))

    high = twin.layers or layers
    found = least_number(1, high, lambda n: holds(cut(n)))
    return cut(found) if found < high else now
