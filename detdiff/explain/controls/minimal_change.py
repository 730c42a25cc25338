"""The control ``minimal_change``: run a's kernel paths in b's schedule, but for the smallest set of path changes that still flips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from detdiff.engines.base import MINIMAL_CHANGE

from ..case import Case
from ..control import BudgetSpent, Figures, Outcome, by_groups, control


class PathTrials(Protocol):
    """What an engine with the capability ``minimal_change`` tries: run b with some of its path changes taken back.

    A path change is a call of run b that took another path than run a's for some of its rows, with its ``forward`` and
    ``site``, by which they are ordered. ``target`` is what must still happen, in words; ``candidates`` counts all path
    changes and ``effective`` has those that move a bit. ``remains`` says that the target happens with every change taken back. ``asked`` counts trials, ``run`` those
    that took a run, ``forwards`` theirs.
    """

    target: str
    candidates: int
    effective: Sequence[Any]
    remains: bool
    baseline_forwards: int
    held_forwards: int
    asked: int
    run: int
    forwards: int

    def happens(self, allowed: Sequence[Any]) -> bool:
        """Whether the target happens where only these changes are left as b has them. Raises BudgetSpent."""

    def entry(self, change: Any) -> dict[str, Any]:
        """A change as JSON values: forward, site, and of both sides path, rule and rows."""


class TriesPaths(Protocol):
    """An engine with the capability ``minimal_change``."""

    def path_trials(self, case: Case) -> PathTrials:
        """Raises CannotRun where run b does not repeat."""


@dataclass(frozen=True, eq=False)
class MinimalChangeFigures(Figures):
    """``candidates`` path changes, of which ``effective`` move a bit; ``smallest`` lists those that are enough for
    ``target``. The rest counts forwards and trials."""

    candidates: int
    effective: int
    held_forwards: int | None = None
    baseline_forwards: int | None = None
    trials: int | None = None
    reruns: int | None = None
    trial_forwards: int | None = None
    smallest: tuple[Mapping[str, Any], ...] | None = None
    target: str | None = None


@control("minimal_change", after="neighbour_content", needs=(MINIMAL_CHANGE,))
def minimal_change(case: Case) -> Outcome:
    """Result ``smallest`` (the figures' ``smallest`` lists it), ``reduced`` where the budget ended the search, ``remains``
    where the target happens with every change held, or ``none`` where there is no path change that moves a bit."""
    engine: Any = case.one_engine()
    found: PathTrials = engine.path_trials(case)
    counts: dict[str, Any] = {"candidates": found.candidates, "effective": len(found.effective)}
    if not found.effective:
        why = (
            "no call of b took another kernel path than its rows took in a"
            if not found.candidates
            else f"none of the {found.candidates} calls of b that took another path than a moved a bit by it"
        )
        return Outcome(
            "none", f"there is no path change to minimal_change: {why}", MinimalChangeFigures(**counts)
        )
    counts |= {"held_forwards": found.held_forwards, "baseline_forwards": found.baseline_forwards}
    if found.remains:
        sentence = f"{found.target} happens even where every row takes the path that it took in a"
        return Outcome("remains", sentence, MinimalChangeFigures(**counts))
    best = list(found.effective)
    result = "smallest"

    def happens(some: Sequence[Any]) -> bool:
        nonlocal best
        happened = found.happens(some)
        if happened and len(some) < len(best):
            best = list(some)
        return happened

    layers = {site.name: site.layer for site in case.b.sites}
    try:
        best = by_groups(
            list(found.effective),
            (lambda change: change.forward, lambda change: (change.forward, layers.get(change.site))),
            happens,
        )
    except BudgetSpent:
        result = "reduced"
    listed = tuple(found.entry(change) for change in sorted(best))
    counts |= {"trials": found.asked, "reruns": found.run, "trial_forwards": found.forwards}
    what = f"{len(best)} path change{'' if len(best) == 1 else 's'} of {len(found.effective)} that move bits"
    first = listed[0]
    sentence = (
        f"{found.target} needs only {what}, first at {first['site']} in forward {first['forward']} "
        f"({_took(first, 'a')} in a, {_took(first, 'b')} in b)"
    )
    if result == "reduced":
        sentence += "; the budget ended before a smaller set was ruled out"
    return Outcome(result, sentence, MinimalChangeFigures(**counts, smallest=listed, target=found.target))


def _took(change: Mapping[str, Any], run: str) -> str:
    path, rows = change[f"path_{run}"], change[f"rows_{run}"]
    unit = " rows"[: 0 if run == "b" else 4 + (rows != 1)]
    # What runs request by request has no number of rows.
    return str(path) if rows is None else f"{path} on {rows}{unit}"
