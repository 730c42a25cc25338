"""The control ``padding``: another token in the rows that fill a batch up. They are nobody's, so nothing may change."""

from __future__ import annotations

from detdiff.compare import compare
from detdiff.engines.base import PADDING, Overrides
from detdiff.trace import Trace

from ..case import Case
from ..control import CannotRun, Outcome, control
from ..facts import Facts
from .neighbours import ChangeFigures, first_change, moved_far


def _not_explained(facts: Facts) -> bool:
    """What goes with pinned kernels came from no padding, which they leave as it is."""
    return not facts.outside and facts.result("pin_kernels") != "removed"


@control("padding", after="place", needs=(PADDING,), asked_by=_not_explained)
def padding(case: Case) -> Outcome:
    """Result ``equal``; ``differs``, a leak, with the first changed site and cache entry; or ``undecided`` where the first
    change is at an expert layer, whose rows are put together by what they say, and no further than rounding goes.

    Every shape stays as it is, so that kernels do, and no rounding is another one.
    """
    filled = {side: _filled(case.trace(side)) for side in "ab"}
    side = "b" if filled["b"] >= filled["a"] else "a"
    if not filled[side]:
        raise CannotRun("no forward of either side has a row of padding")
    token = _another(case.trace(side))
    if token >= int(case.engine(side).identity.get("vocab_size") or token + 1):
        raise CannotRun("the requests were fed every token of the vocabulary, so that padding has no other")
    again = case.record(case.scenario(side), side, overrides=Overrides(padding=token))
    found = compare(case.trace(side), again)
    first = next((each for each in found.requests if each.id == found.first), None)
    first = first or next((each for each in found.requests if each.stage is not None), None)
    place = None if first is None else first_change(first, None)
    if first is None or place is None:
        sentence = f"with another token in the rows of padding of side {side}, no bit of any request changed"
        return Outcome("equal", sentence, ChangeFigures(side))
    sentence = f"with another token in the rows of padding of side {side}, {first.id} changed, first at {place['where']}"
    figures = ChangeFigures(side, first.id, **place)
    runs = ((case.scenario(side), Overrides()), (case.scenario(side), Overrides(padding=token)))
    if place.get("kind") == "switch" and not moved_far(case, side, first.id, place, runs):
        return Outcome("undecided", f"{sentence}, whose calls hold the rows of padding too", figures)
    return Outcome("differs", sentence, figures)


def _another(trace: Trace) -> int:
    """A token that no request was fed: entries of layers without positions are known by their token alone."""
    fed = {0, *(int(token) for each in trace.requests for token in each["tokens"])}
    fed |= {int(token) for token in trace.generated().token}
    return next(token for token in range(len(fed) + 1) if token not in fed)


def _filled(trace: Trace) -> int:
    """Rows of padding in all forwards."""
    lines = trace.forwards()
    sizes = (int(line["shape"][0]) * int(line["shape"][1]) for line in lines)
    return sum(sizes) - sum(int(row["count"]) for line in lines for row in line["rows"])
