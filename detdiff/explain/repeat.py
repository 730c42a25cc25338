"""The control ``repeat``: each scenario again, unchanged. Other bits mean a race, and nothing else can be concluded."""

from __future__ import annotations

from typing import Any

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.environment import environment
from detdiff.errors import ReplayError
from detdiff.trace import Trace

from .case import Case
from .control import BudgetSpent
from .outcome import Outcome

REPETITIONS = 2
"""Of each side. A race that shows in one run of n is missed by both with the chance (1 - 1/n)²."""


def repeat(case: Case) -> Outcome:
    """Result ``equal`` (every digest and token of every repetition) or ``differs``.

    Raises ReplayError where repetitions agree with each other and not with a trace from another machine or version, and
    BudgetSpent where not even one repetition of each side was in the budget.
    """
    done = {"a": 0, "b": 0}
    first: dict[str, Trace] = {}
    for _ in range(REPETITIONS):
        for side in "ab":
            try:
                again = case.record(case.scenario(side), side)
            except BudgetSpent:
                if not all(done.values()):
                    raise
                return _equal(done)
            done[side] += 1
            found = compare(case.trace(side), again)
            if _same(found):
                first.setdefault(side, again)
                continue
            return _differs(case, side, again, found, done)
    return _equal(done)


def _same(found: Divergence) -> bool:
    return found.identical or (found.inconclusive and not found.compared.differing)


def _equal(done: dict[str, int]) -> Outcome:
    said = f"run again, side a {done['a']} times and side b {done['b']} times, every digest and every token was equal"
    return Outcome("equal", said, {"repetitions": dict(done)})


def _differs(case: Case, side: str, again: Trace, found: Divergence, done: dict[str, int]) -> Outcome:
    trace = case.trace(side)
    if trace.header["environment"] != environment():
        third = case.record(case.scenario(side), side)
        if _same(compare(again, third)):
            raise ReplayError(
                f"Re-runs of {trace.path} agree with each other and not with it. It was recorded on another machine or with "
                "other versions (see the environment in `detdiff show`). Record both sides again on this machine."
            )
    detail: dict[str, Any] = {"repetitions": dict(done), "side": side}
    where = "the number of compared rows"
    parted = next((r for r in found.requests if r.rung is not None), None)
    if parted is not None:
        detail["request"] = parted.id
        where = f"request {parted.id}"
        if parted.origin is not None:
            detail |= {
                "site": parted.origin.site,
                "layer": parted.origin.layer,
                "position": parted.origin.position,
                "forward": parted.origin.forward_a,
            }
            where = f"{parted.origin.site}, position {parted.origin.position} of {parted.id}"
        if parted.flip is not None:
            detail["token"] = parted.flip.index
    said = f"side {side}, run again as it is, gave other bits, first at {where}"
    return Outcome("differs", said, {**detail, "where": where})
