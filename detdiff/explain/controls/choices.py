"""The control ``choices``: is each token the one that its request's own processors, sampler and seed choose from the logits?

A re-run of each side keeps the logits, what the sampler was given, and the token. All is then computed anew from the request's own
settings and tokens; where that gives another token, the settings, tokens, seeds and states of others are tried one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from detdiff.compare.divergence import RequestDivergence
from detdiff.engines.base import CHOICES

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control
from ..facts import Facts


@dataclass(frozen=True)
class WrongChoice:
    """The first draw of a run that is not what its request asks for.

    ``stage`` is ``processors`` (the sampler was given other log-probabilities than the request's own processors make) or ``draw``
    (it chose another token than the request's own sampler does). ``cause`` is what gives all ``draws`` that were looked at, in
    words, and empty where nothing that was ``tried`` does; ``also`` gives them as well.
    """

    run: Side
    request: str
    index: int
    stage: str
    token: int
    cause: str
    draws: int
    tried: tuple[str, ...]
    also: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Where it is and what explains it."""
        if self.stage == "processors":
            what = f"the sampler was not given what the request's own logits processors make of its logits, first for token {self.index} of {self.request}"
        else:
            what = f"token {self.index} of {self.request} ({self.token}) is not the one that its own sampler and seed choose"
        found = f"in run {self.run} {what}"
        if self.cause:
            twins = f" (so does: {'; '.join(self.also[:2])})" if self.also else ""
            return f"{found}: {self.cause}, which gives all {self.draws} draws that were computed anew{twins}"
        return f"{found}; nothing that was tried instead gives every draw (tried: {', '.join(self.tried)})"


@dataclass(frozen=True)
class RunChoices:
    """All draws of a run that were computed anew: how many, the random state before each that several requests draw from, by request
    id and index (empty where none is shared), and the first wrong one. ``uncached`` are requests whose processors saw, as mlx-lm's
    ``generate_step`` has it, no token that came from a cache."""

    draws: int
    states: Mapping[tuple[str, int], int]
    wrong: WrongChoice | None
    uncached: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ChoiceFigures(Figures):
    """``draws`` of each side were computed anew; the rest is of the first draw of a run that is not as asked, a's before b's."""

    draws: Mapping[Side, int]
    run: Side | None = None
    request: str | None = None
    index: int | None = None
    stage: str | None = None
    token: int | None = None
    cause: str | None = None
    tried: tuple[str, ...] = field(default=())


def _drawn(facts: Facts) -> bool:
    """Whether a token differs that was drawn, or chosen after processors, or whose logits are equal."""
    return bool(facts.chosen_otherwise or facts.processed_otherwise) or any(
        request.flip is not None and facts.samples(request.id) for request in facts.diverged
    )


@control("choices", after=None, needs=(CHOICES,), asked_by=_drawn)
def choices(case: Case) -> Outcome:
    """Result ``otherwise`` where a draw is not what its request asks for, ``uncached`` where processors were not given what came from
    a cache, which is mlx-lm's own way, ``shared`` where all are as asked and a token that differs was drawn from another state of
    MLX's one random state, ``as_asked`` where all are.

    Raises CannotRun where nothing was chosen otherwise, or draws cannot be computed anew.
    """
    until = _last_asked(case)
    found = {side: case.engine(side).choices(case, side, until) for side in "ab"}  # type: ignore[attr-defined]
    draws = {side: each.draws for side, each in found.items()}
    wrong = [each.wrong for each in found.values() if each.wrong is not None]
    counted = f"{draws['a']} draws of run a and {draws['b']} of run b"
    if wrong:
        first = wrong[0]
        cause = first.cause or None
        figures = ChoiceFigures(
            draws, first.run, first.request, first.index, first.stage, first.token, cause, first.tried
        )
        return Outcome("otherwise", "; ".join(each.sentence for each in wrong), figures)
    uncached = {side: each.uncached for side, each in found.items() if each.uncached}
    if uncached:
        where = " and ".join(f"of {', '.join(ids[:4])} in run {side}" for side, ids in uncached.items())
        sentence = (
            f"computed anew, {counted} are those that the requests ask for once the logits processors {where} are given only the tokens "
            "that mlx-lm's generate_step was fed itself, and none that came from a cache, which is how it works"
        )
        return Outcome("uncached", sentence, ChoiceFigures(draws))
    if any(_other_state(request, found) for request in case.divergence.requests):
        sentence = (
            f"computed anew, {counted} are those that the requests ask for, taken in the order of each run from MLX's one random state, "
            "which the requests of a batch share and which was another one at the token that differs"
        )
        return Outcome("shared", sentence, ChoiceFigures(draws))
    return Outcome(
        "as_asked", f"computed anew, {counted} are those that the requests ask for", ChoiceFigures(draws)
    )


def _other_state(request: RequestDivergence, found: Mapping[Side, RunChoices]) -> bool:
    """Whether a request's token that differs was drawn from another random state, which others drew from before."""
    if request.flip is None:
        return False
    place = request.id, request.flip.index
    states = [each.states.get(place) for each in found.values()]
    return any(state is not None for state in states) and states[0] != states[1]


def _last_asked(case: Case) -> dict[str, int]:
    """By request, the last token that is to be computed anew: some after the first one that differs."""
    asked = {}
    processed = {each.request for each in case.divergence.bookkeeping if each.what == "processed"}
    for request in case.divergence.requests:
        if request.flip is not None:
            asked[request.id] = request.flip.index + 8
        elif request.id in processed:
            asked[request.id] = request.generated_a
    if not asked:
        raise CannotRun("no token differs, and nothing that one was chosen from")
    return asked
