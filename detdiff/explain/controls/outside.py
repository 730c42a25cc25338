"""Controls of a server, which shows answers alone: caches, what was served before, whose answer it is, other neighbours, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from detdiff.compare import compare
from detdiff.engines.base import ADDRESS
from detdiff.engines.registry import open_engine
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control
from ..facts import Facts
from ..outside import borrowed, cached_tokens, differences
from .neighbours import changed
from .repeat import same

CONTENTS: Final = 3
"""Other contents of the neighbours that are tried, each twice."""
_SETTINGS: Final = 6


def _outside(facts: Facts) -> bool:
    return facts.outside


@dataclass(frozen=True, eq=False)
class CachedFigures(Figures):
    """Prompt tokens from a prefix cache at first and when asked again, of the first request of ``side`` where they differ."""

    side: Side
    request: str
    first: int
    again: int
    rounding: bool | None = None


@control("cached", after=None, needs=(ADDRESS,), asked_by=_outside)
def cached(case: Case) -> Outcome:
    """Each side again, where prefix caches were used: a prompt that was seen before against one that was not.

    Result ``differs`` (the answers change with the cache, and cached ones repeat), ``equal``, or ``none``: no cache is seen to
    be used. Raises CannotRun where the server does not say.
    """
    counts = {side: cached_tokens(case.trace(side)) for side in "ab"}
    if all(each is None for each in counts.values()):
        raise CannotRun("the server does not say how much of a prompt came from a cache")
    for side in "ab":
        again = case.record(case.scenario(side), side)
        before, now = counts[side] or {}, cached_tokens(again) or {}
        other = next((id for id in now if now[id] != before.get(id, 0)), None)
        if other is None:
            continue
        found = compare(case.trace(side), again)
        if same(found):
            continue
        if not same(compare(again, case.record(case.scenario(side), side))):
            continue
        looks = differences(case.trace(side), again)
        rounding = None if looks is None else looks.rounding
        numbers = "" if looks is None else f": {looks.said}"
        sentence = (
            f"side {side}, asked again, takes {now[other]} prompt tokens of {other} from a prefix cache and took {before.get(other, 0)} at "
            f"first, and its answers are others from then on, the same each time{numbers}"
        )
        return Outcome(
            "differs", sentence, CachedFigures(side, other, before.get(other, 0), now[other], rounding)
        )
    if not any(count for each in counts.values() for count in (each or {}).values()):
        return Outcome("none", "no prompt token of the two runs came from a prefix cache")
    return Outcome(
        "equal",
        "asked again, with another part of the prompts in a prefix cache or the same, the answers are equal",
    )


@dataclass(frozen=True, eq=False)
class ServedFigures(Figures):
    """Where ``side`` in reverse order first gave ``request`` another answer."""

    side: Side
    request: str | None = None


@control("served", after="cached", needs=(ADDRESS,), asked_by=_outside)
def served(case: Case) -> Outcome:
    """A side that serves one request after the other, in reverse order: each answer may depend on its own prompt alone.

    Result ``equal``, ``differs`` (each order repeats, and they differ), or ``unsteady``. The first request of an order, which
    follows another run, is left out. Raises CannotRun where no side serves one by one.
    """
    side = next((each for each in "ab" if case.scenario(each).schedule.kind == "serial"), None)
    if side is None or len(case.scenario(side).requests) < 3:
        raise CannotRun("no side serves three requests or more one after the other")
    scenario = case.scenario(side)
    turned = replace(scenario, requests=scenario.requests[::-1])
    inner = [request.id for request in scenario.requests[1:-1]]
    again, reversed_ = case.record(scenario, side), case.record(turned, side)
    if _first_changed(case.trace(side), again, inner) is not None:
        return Outcome("unsteady", f"side {side} in its own order does not repeat", ServedFigures(side))
    other = _first_changed(again, reversed_, inner)
    if other is None:
        sentence = f"in reverse order, side {side} gives each request the same answer"
        return Outcome("equal", sentence, ServedFigures(side))
    if _first_changed(reversed_, case.record(turned, side), inner) is not None:
        return Outcome("unsteady", f"side {side} in reverse order does not repeat", ServedFigures(side))
    sentence = (
        f"side {side} gives {other} another answer when its requests come in reverse order, and each order repeats: an answer depends on "
        "the request that was served before it"
    )
    return Outcome("differs", sentence, ServedFigures(side, other))


def _first_changed(a: Trace, b: Trace, ids: list[str]) -> str | None:
    """The first of ``ids`` whose answers differ."""
    found = compare(a, b, requests=ids)
    return next((each.id for each in found.requests if each.stage is not None), None)


@dataclass(frozen=True, eq=False)
class AnswersFigures(Figures):
    """``request`` got ``what`` of ``other`` for ``steps`` steps; ``more`` other requests did likewise."""

    request: str
    other: str
    what: str
    steps: int
    more: int


@control("answers", after="repeat", needs=(ADDRESS,), asked_by=_outside)
def answers(case: Case) -> Outcome:
    """Whether a request was answered with another one's text or log-probabilities; nothing is run.

    Result ``another`` or ``own``.
    """
    found = [*borrowed(case.a, case.b), *borrowed(case.b, case.a)]
    if not found:
        return Outcome(
            "own", "no answer is another request's, as far as their texts and log-probabilities tell"
        )
    first = found[0]
    sentence = f"{first.request} got the {first.what} that {first.other} gets in the other run, in all of {first.steps} steps, and not its own"
    figures = AnswersFigures(first.request, first.other, first.what, first.steps, len(found) - 1)
    return Outcome("another", sentence, figures)


@dataclass(frozen=True, eq=False)
class ContentFigures(Figures):
    """``contents`` were tried beside ``request``; ``rounding`` says whether what they changed looks as rounding would."""

    side: Side
    request: str
    contents: int
    rounding: bool | None = None


@control("other_neighbours", after="answers", needs=(ADDRESS,), asked_by=_outside)
def other_neighbours(case: Case) -> Outcome:
    """Neighbours of the same lengths and other content, several, each twice: nothing of a request may follow them.

    Result ``equal``; ``differs`` (each content repeats, and the answer follows the content, further than rounding would); ``small``
    (the same within what rounding would do: experts whose rows are put together by what they say do that without a fault); ``unsteady``.
    """
    side = next((each for each in "ba" if case.scenario(each).schedule.kind != "serial"), None)
    if side is None:
        raise CannotRun("no side serves requests together")
    if getattr(case.engine(side), "asks_text", True) or any(
        each.chat for each in case.scenario(side).requests
    ):
        raise CannotRun(
            "prompts go to the server as text, so that neighbours of the same number of tokens cannot be made"
        )
    id = case.focus.id
    runs = [case.trace(side)]
    for seed in range(CONTENTS):
        scenario = changed(
            case, side, id, lambda tokens, draw: [draw() for _ in tokens], keep_length=True, seed=seed
        )
        first = case.record(scenario, side)
        if _first_changed(first, case.record(scenario, side), [id]) is not None:
            sentence = f"with the same other neighbours twice, {id} does not repeat"
            return Outcome("unsteady", sentence, ContentFigures(side, id, seed + 1))
        runs.append(first)
    others = [run for run in runs[1:] if _first_changed(runs[0], run, [id]) is not None]
    if not others:
        sentence = f"{CONTENTS} other contents of the same length beside {id} change nothing of it"
        return Outcome("equal", sentence, ContentFigures(side, id, CONTENTS))
    found = [each for run in others if (each := differences(runs[0], run, id)) is not None]
    far = [each for each in found if each.far]
    numbers = (far or found)[0].said if found else "what changes was not measured"
    sentence = (
        f"the answer to {id} follows the content of its neighbours, whose lengths are the same, in {len(others)} of {CONTENTS} other contents, "
        f"each of which repeats: {numbers}"
    )
    return Outcome(
        "differs" if far else "small",
        sentence,
        ContentFigures(side, id, CONTENTS, not far if found else None),
    )


@dataclass(frozen=True, eq=False)
class UnsetFigures(Figures):
    """``setting``: without it side a gives what side b gives with it, for ``requests`` requests."""

    setting: str
    requests: int


@control("unset", after="other_neighbours", needs=(ADDRESS,), asked_by=_outside)
def unset(case: Case) -> Outcome:
    """Side a without one of the settings that ``engine.body`` asks for: whether that is what side b answers, which has it.

    Result ``dropped`` (b answers as if it had not been asked for) or ``kept``. Raises CannotRun without any such setting.
    """
    shared = (
        _body(case.scenario_a).items() & _scalars(_body(case.scenario_b)).items() if _plain(case) else set()
    )
    if not shared:
        raise CannotRun("both sides ask for no setting of their own (engine.body) that could be left out")
    diverged = [each.id for each in case.divergence.requests if each.stage is not None]
    for setting, _ in sorted(shared)[:_SETTINGS]:
        body = {key: value for key, value in _body(case.scenario_a).items() if key != setting}
        scenario = case.scenario_a.with_changes(**{"engine.body": body or None})
        without = case.record(scenario, "a", on=open_engine(scenario))
        if diverged and _first_changed(without, case.b, diverged) is None:
            sentence = f"without {setting}, side a gives bit for bit what side b gives with it, for all {len(diverged)} requests that differ"
            return Outcome("dropped", sentence, UnsetFigures(setting, len(diverged)))
    return Outcome("kept", "no setting of engine.body is answered as if it had not been asked for")


def _plain(case: Case) -> bool:
    return all(_body(scenario) for scenario in (case.scenario_a, case.scenario_b))


def _body(scenario: Scenario) -> dict[str, Any]:
    given = scenario.engine_settings.get("body", {})
    return _scalars(given) if isinstance(given, Mapping) else {}


def _scalars(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if isinstance(value, str | int | float | bool)}
