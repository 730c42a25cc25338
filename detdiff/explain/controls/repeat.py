"""The control ``repeat``: each scenario again, unchanged. Other bits every time, and nothing else can be concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from detdiff.compare import Divergence, compare
from detdiff.engines.base import Engine
from detdiff.engines.record import recorded_by
from detdiff.trace import Trace

from ..case import Case, Side
from ..control import BudgetSpent, Figures, Outcome, control


@dataclass(frozen=True, eq=False)
class RepeatFigures(Figures):
    """How often each side was run again (``repetitions``), and where ``side`` first was another: ``where`` in words.

    ``returned`` says that a later repetition gave the trace's bits again. ``changed`` lists what of the environment, the sources
    and the model's own code is another than when the trace was recorded.
    """

    repetitions: Mapping[Side, int]
    side: Side | None = None
    request: str | None = None
    site: str | None = None
    layer: int | None = None
    position: int | None = None
    forward: int | None = None
    token: int | None = None
    where: str | None = None
    returned: bool | None = None
    changed: Sequence[str] | None = None


@control("repeat", after=None)
def repeat(case: Case) -> Outcome:
    """Result ``equal`` (every digest and token of every repetition), ``differs``, or ``changed``: not what the trace has,
    and the same each time.

    A trace that this very engine recorded just before is a repetition too: where later ones are alike and it is not, that
    is a change as rare as one run of so many. Raises BudgetSpent where not even one repetition of each side was in the budget.
    """
    done = {"a": 0, "b": 0}
    for _ in range(case.repeats):
        for side in "ab":
            try:
                again = case.record(case.scenario(side), side)
            except BudgetSpent:
                if not all(done.values()):
                    raise
                return _equal(done)
            done[side] += 1
            found = compare(case.trace(side), again)
            if not same(found):
                return _differs(case, side, again, found, done)
    return _equal(done)


def same(found: Divergence) -> bool:
    """Whether everything that was compared is equal."""
    return found.identical or (found.inconclusive and not found.compared.differing)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _equal(done: dict[str, int]) -> Outcome:
    sentence = f"run again, side a {done['a']} times and side b {done['b']} times, every digest and every token was equal"
    return Outcome("equal", sentence, RepeatFigures(dict(done)))


def _differs(case: Case, side: Side, again: Trace, found: Divergence, done: dict[str, int]) -> Outcome:
    """One more re-run tells what does not repeat from what repeats and is not the trace's."""
    trace, steady, returned = case.trace(side), False, False
    own = recorded_by(trace, case.engine(side))
    try:
        third = case.record(case.scenario(side), side)
        done[side] += 1
        steady, returned = same(compare(again, third)), same(compare(trace, third))
    except BudgetSpent:
        pass
    where = first_place(found)
    if steady and not own:
        changed = _changed(trace, case.engine(side))
        figures = RepeatFigures(dict(done), side, **where, returned=returned, changed=changed)
        what = f"what differs is known: {'; '.join(changed)}" if changed else UNCHANGED
        sentence = (
            f"side {side} does not repeat its trace and repeats itself, in {done[side]} runs: the first difference from the "
            f"trace is at {where['where']}; {what}"
        )
        return Outcome("changed", sentence, figures)
    figures = RepeatFigures(dict(done), side, **where, returned=returned)
    sentence = (
        f"side {side}, run again {_times(done[side])} as it is, gave other bits, first at {where['where']}"
    )
    if steady:
        sentence += "; the repetitions are alike and what the same engine recorded before them is not, so that it happens in few runs"
    return Outcome("differs", sentence, figures)


UNCHANGED: Final = (
    "versions, machine and the sources that were hashed are the same, so either the code changed elsewhere, or what the trace shows "
    "happens in few runs (--repeats N looks more often)"
)


def _changed(trace: Trace, engine: Engine) -> list[str]:
    """What is known to be another than when a trace was recorded, as clauses."""
    found = []
    then, now = trace.header["environment"], engine.environment()
    for key in dict.fromkeys((*then, *now)):
        before, after = then.get(key), now.get(key)
        if before == after or key not in then:
            continue  # a trace of an older detdiff says less
        if key in ("sources", "imports") and isinstance(before, Mapping) and isinstance(after, Mapping):
            other = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
            found.append(f"the source of {', '.join(other)}")
        else:
            found.append(f"{key} is {after} and was {before}")
    code = "model_file_sha256"
    if trace.model.get(code) != engine.identity.get(code):
        found.append(
            f"the model's own code {engine.identity.get('model_file') or trace.model.get('model_file')}"
        )
    return found


def first_place(found: Divergence) -> dict[str, Any]:
    """Where two runs of one scenario first differ: ``where`` in words, and what of it is known."""
    diverged = next((r for r in found.requests if r.stage is not None), None)
    if diverged is None:
        return {"where": "the number of compared rows"}
    place: dict[str, Any] = {"request": diverged.id, "where": f"request {diverged.id}"}
    if diverged.origin is not None:
        place |= {
            "site": diverged.origin.site,
            "layer": diverged.origin.layer,
            "position": diverged.origin.position,
            "forward": diverged.origin.forward_a,
            "where": f"{diverged.origin.site}, position {diverged.origin.position} of {diverged.id}",
        }
    if diverged.flip is not None:
        place["token"] = diverged.flip.index
        if diverged.origin is None:
            place["where"] = f"token {diverged.flip.index} of {diverged.id}"
    return place
