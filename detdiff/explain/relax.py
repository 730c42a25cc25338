"""The control ``relax``: run a's kernel paths in b's schedule, but for the smallest set of path changes that still flips.

A path change is a call of b (forward and site) in which a row takes another path than it took in a. Three runs are known:
a, b, and b with every change held. In b and in the held run each change is computed both ways on the same inputs, so it is
known which of them move a bit there. A trial follows the held run until its first relaxed change that moves a bit, and b
as long as every held change moves none: it starts at the later of the two, and where it never leaves a known run its
answer is known without a forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from .baseline import Baseline, baseline
from .case import Case
from .control import BudgetSpent
from .outcome import Outcome
from .rerun import Changes, Run, rerun
from .smallest import by_groups
from .steer import Change, Relaxed

NEVER = 1 << 60


@dataclass
class _Known:
    """A run that a trial may fall together with: which changes move bits on its inputs, and how it ended."""

    run: Run
    effective: dict[Change, int]
    happened: bool

    def leaves(self, changes: Collection[Change], from_: int = 0) -> int:
        """The first forward, from one on, in which one of these changes would leave this run."""
        found = (n for change, n in self.effective.items() if n >= from_ and change in changes)
        return min(found, default=NEVER)


@dataclass
class Trials:
    """Trials of one case, and what they took. ``asked`` counts those whose answer was known without a forward too."""

    case: Case
    base: Baseline
    held: _Known
    natural: _Known
    asked: int = 0
    run: int = 0
    forwards: int = 0
    answers: dict[frozenset[Change], bool] = field(default_factory=dict)

    def happens(self, relaxed: Sequence[Change]) -> bool:
        """Whether the target still happens where only these changes are left as b has them."""
        key = frozenset(relaxed)
        if key not in self.answers:
            self.asked += 1
            self.answers[key] = self._answer(key)
        return self.answers[key]

    def _answer(self, relaxed: frozenset[Change]) -> bool:
        kept = frozenset(self.base.changes.calls) - relaxed
        leaves_held, leaves_natural = self.held.leaves(relaxed), self.natural.leaves(kept)
        if NEVER in (leaves_held, leaves_natural):
            return (self.held if leaves_held == NEVER else self.natural).happened
        known = self.held if leaves_held >= leaves_natural else self.natural
        start = known.run.snapshots.before(max(leaves_held, leaves_natural))
        answer: list[bool] = []

        def decided(run: Run) -> bool:
            happened = self.base.target.happened(run)
            if happened is None:
                for each, others in ((self.held, relaxed), (self.natural, kept)):
                    if _together(run, each.run) and each.leaves(others, run.last) == NEVER:
                        happened = each.happened
            if happened is not None:
                answer[:] = [happened]
            return happened is not None

        trial = rerun(
            self.case,
            "b",
            Changes(
                steering=Relaxed(self.base.changes, relaxed),
                decided=decided,
                start=None if start is None else (known.run, start[1]),
                wanted=self.base.wanted,
            ),
        )
        self.run += 1
        self.forwards += trial.forwards
        return answer[0] if answer else bool(self.base.target.happened(trial))


def _together(run: Run, known: Run) -> bool:
    """Whether the caches of both are bit-equal now, after equal forwards."""
    n = run.last
    return 0 < n <= known.last and run.watch.chain[n - 1] == known.watch.chain[n - 1]


def trials(case: Case) -> Trials | None:
    """The trials of a case, its held run done; None where no path change moves a bit in b."""
    base = baseline(case)
    if not base.effective:
        return None
    doubts = Relaxed(base.changes, (), doubting=True)
    first = base.b.snapshots.before(min(base.effective.values()))
    held = rerun(
        case,
        "b",
        Changes(
            steering=doubts,
            keep=True,
            decided=lambda run: base.target.happened(run) is not None,
            start=None if first is None else (base.b, first[1]),
            wanted=base.wanted,
        ),
    )
    doubts.settle()
    return Trials(
        case,
        base,
        _Known(held, doubts.effective, bool(base.target.happened(held))),
        _Known(base.b, base.effective, True),
    )


def relax(case: Case) -> Outcome:
    """Result ``smallest`` (the detail's ``smallest`` lists it), ``reduced`` where the budget ended the search, ``remains``
    where the target happens with every change held, or ``none`` where there is no path change that moves a bit."""
    found = trials(case)
    base = baseline(case)
    counts = {"candidates": len(base.changes.calls), "effective": len(base.effective)}
    if found is None:
        why = (
            "no call of b took another kernel path than its rows took in a"
            if not base.changes.calls
            else f"none of the {len(base.changes.calls)} calls of b that took another path than a moved a bit by it"
        )
        return Outcome("none", f"there is no path change to relax: {why}", counts)
    counts |= {"held_forwards": found.held.run.forwards, "baseline_forwards": base.forwards}
    if found.held.happened:
        said = f"{base.target.said} happens even where every row takes the path that it took in a"
        return Outcome("remains", said, counts)
    best = sorted(base.effective)
    result = "smallest"

    def happens(some: Sequence[Change]) -> bool:
        nonlocal best
        happened = found.happens(some)
        if happened and len(some) < len(best):
            best = list(some)
        return happened

    layers = {site.name: site.layer for site in case.b.sites}
    try:
        best = by_groups(
            sorted(base.effective),
            (lambda change: change.forward, lambda change: (change.forward, layers.get(change.site))),
            happens,
        )
    except BudgetSpent:
        result = "reduced"
    listed = [_entry(case, base, change) for change in sorted(best)]
    counts |= {"trials": found.asked, "reruns": found.run, "trial_forwards": found.forwards}
    what = f"{len(best)} path change{'' if len(best) == 1 else 's'} of {len(base.effective)} that move bits"
    first = listed[0]
    said = (
        f"{base.target.said} needs only {what}, first at {first['site']} in forward {first['forward']} "
        f"({first['path_a']} on {first['rows_a']} row{'' if first['rows_a'] == 1 else 's'} in a, {first['path_b']} on "
        f"{first['rows_b']} in b)"
    )
    if result == "reduced":
        said += "; the budget ended before a smaller set was ruled out"
    return Outcome(result, said, {**counts, "smallest": listed, "target": base.target.said})


def _entry(case: Case, base: Baseline, change: Change) -> dict[str, Any]:
    made_a, made_b = base.changes.made[change]
    rows = base.changes.calls[change]
    ids = case.ids("b")
    return {
        "forward": change.forward,
        "site": change.site,
        "path_a": made_a.path.name,
        "path_b": made_b.path.name,
        "rule_a": made_a.path.rule,
        "rule_b": made_b.path.rule,
        "rows_a": made_a.rows or None,
        "rows_b": made_b.rows or None,
        "rows": [
            {"request": ids[row.request], "position": row.position, "model": row.model}
            for row in sorted(rows)[:8]
        ],
        "row_count": len(rows),
    }
