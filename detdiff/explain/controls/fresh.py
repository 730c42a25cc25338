"""The control ``fresh``: each scenario on an engine that has served nothing, and its first request again at the end; and of later
turns the whole conversation from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from detdiff.compare import compare
from detdiff.engines.base import PIN_KERNELS, Overrides
from detdiff.errors import DetdiffError
from detdiff.scenario import Scenario

from ..case import Case, Side
from ..control import Figures, Outcome, control
from ..facts import Facts, goes_on
from .repeat import first_place, same


@dataclass(frozen=True, eq=False)
class FreshFigures(Figures):
    """Where ``side`` first was another on a fresh engine; ``again`` says that it is its first request, asked again after
    the others, that was another. ``runs`` counts the fresh runs of each side."""

    runs: Mapping[Side, int]
    side: Side | None = None
    request: str | None = None
    where: str | None = None
    again: bool | None = None


_PLAIN: Final = {"KVCache", "BatchKVCache", "PagedCache"}
"""Caches of which every entry stays as it was written, so that what is kept is what is computed from scratch, bit for bit, where
every row is computed by one path."""


def _keeps_state(facts: Facts) -> bool:
    """Whether something is kept: from run to run, unless an engine says that its runs share nothing, or from turn to turn."""
    return not facts.stateless or facts.goes_on


@control("fresh", after="ranks", asked_by=_keeps_state)
def fresh(case: Case) -> Outcome:
    """Result ``equal``, ``differs`` (it depends on what was served before), or ``unsteady``: other bits on every fresh
    engine, which is no matter of what was served.

    Where ``repeat`` was equal, a fresh run that is another one tells; where no repetition was what the trace has, one that
    is. Of later turns that go on over a kept cache, each row on one kernel path: ``kept`` (other bits than the whole conversation
    from scratch, though its caches are such as keep them) or ``rounds`` (the same with caches of which that is not known). Raises
    CannotRun for an engine that can neither be reset nor opened anew.
    """
    runs = {"a": 0, "b": 0}
    turned = [side for side in "ab" if goes_on(case.trace(side).scenario)]
    for side in turned:
        otherwise = _against_scratch(case, side, runs)
        if otherwise is not None:
            return otherwise
    if turned and all(getattr(engine, "stateless", False) for engine in case.engines.values()):
        sentence = f"every later turn of side {' and '.join(turned)} gives the bits of its whole conversation from scratch"
        return Outcome("equal", sentence, FreshFigures(runs))
    for side in "ab":
        scenario, trace = case.scenario(side), case.trace(side)
        asked = _first_alone(scenario)
        before = None if asked is None else case.record(asked, side, on=case.fresh(side))
        engine = case.fresh(side)
        found = case.record(scenario, side, on=engine)
        runs[side] += 1
        answer = compare(trace, found)
        repeated = case.record(scenario, side, on=engine)
        matches, warm = same(answer), same(compare(trace, repeated))
        if matches != warm or (not matches and not same(compare(found, repeated))):
            second = case.record(scenario, side, on=case.fresh(side))
            runs[side] += 1
            if not same(compare(found, second)):
                sentence = f"two runs of side {side} on fresh engines gave other bits each"
                return Outcome("unsteady", sentence, FreshFigures(runs, side))
            place = first_place(compare(found, repeated))
            sentence = (
                f"side {side} gives other bits on an engine that has served nothing than on one that has, first at "
                f"{place['where']}, and the same ones each time"
            )
            return Outcome(
                "differs", sentence, FreshFigures(runs, side, place.get("request"), place["where"])
            )
        if asked is not None and before is not None:
            after = case.record(asked, side, on=engine)
            told = compare(before, after)
            if not same(told):
                place = first_place(told)
                sentence = (
                    f"the first request of side {side}, asked again alone after the others, gives other bits than before "
                    f"them, first at {place['where']}"
                )
                return Outcome(
                    "differs", sentence, FreshFigures(runs, side, place.get("request"), place["where"], True)
                )
    sentence = "on an engine that has served nothing, both sides are the same, and so is the first request, asked again at the end"
    return Outcome("equal", sentence, FreshFigures(runs))


def _against_scratch(case: Case, side: Side, runs: dict[str, int]) -> Outcome | None:
    """What is to be said where a later turn is not the whole conversation from scratch; None where it is."""
    pins = PIN_KERNELS in case.engine(side).capabilities
    overrides = Overrides(pin_kernels=pins)
    scenario = case.scenario(side)
    kept = case.record(scenario, side, overrides=overrides)
    scratch = case.record(scenario.with_changes(turns="fresh"), side, overrides=overrides)
    runs[side] += 1
    told = compare(scratch, kept)
    if same(told) or Facts(told).chosen_otherwise:
        return None  # Where all that was computed is equal, another token is not the cache's.
    kinds = {note["kind"] for line in kept.forwards() for note in line["caches"]}
    plain = pins and kinds <= _PLAIN and "quantise" not in {event["event"] for event in kept.events()}
    place = first_place(told)
    sentence = (
        f"a later turn of side {side} gives other bits over the cache that was kept than the whole conversation from scratch, first "
        f"at {place['where']}{', with every row on one kernel path' if pins else ''}"
    )
    if not plain:
        sentence += (
            f"; of {', '.join(sorted(kinds)) or 'its caches'} it is not known that they keep every bit"
        )
    figures = FreshFigures(runs, side, place.get("request"), place["where"])
    return Outcome("kept" if plain else "rounds", sentence, figures)


def _first_alone(scenario: Scenario) -> Scenario | None:
    """The scenario with its first request alone; None where that is all of it, or forced tokens name the others."""
    if len(scenario.requests) < 2 or scenario.force_tokens is not None:
        return None
    first = replace(scenario.requests[0], arrival=0)
    try:
        return replace(scenario, requests=(first,))
    except DetdiffError:
        return None
