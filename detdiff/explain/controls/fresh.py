"""The control ``fresh``: each scenario on an engine that has served nothing, and its first request again at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from detdiff.compare import compare
from detdiff.errors import DetdiffError
from detdiff.scenario import Scenario

from ..case import Case, Side
from ..control import Figures, Outcome, control
from ..facts import Facts
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


def _keeps_state(facts: Facts) -> bool:
    """Whether an engine may keep something from run to run. One that says that its runs share nothing needs no proof, but
    where its re-runs are not those of the trace."""
    return not facts.stateless


@control("fresh", after="repeat", asked_by=_keeps_state)
def fresh(case: Case) -> Outcome:
    """Result ``equal``, ``differs`` (it depends on what was served before), or ``unsteady``: other bits on every fresh
    engine, which is no matter of what was served.

    Where ``repeat`` was equal, a fresh run that is another one tells; where no repetition was what the trace has, one that
    is. Raises CannotRun for an engine that can neither be reset nor opened anew.
    """
    runs = {"a": 0, "b": 0}
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


def _first_alone(scenario: Scenario) -> Scenario | None:
    """The scenario with its first request alone; None where that is all of it, or forced tokens name the others."""
    if len(scenario.requests) < 2 or scenario.force_tokens is not None:
        return None
    first = replace(scenario.requests[0], arrival=0)
    try:
        return replace(scenario, requests=(first,))
    except DetdiffError:
        return None
