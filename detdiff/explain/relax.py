"""The control ``relax``: run a's kernel paths in b's schedule, but for the smallest set of path changes that still flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detdiff.engines.mlx.path_changes import Baseline, Change, baseline, trials
from detdiff.engines.mlx.reruns import Reruns

from .case import Case
from .control import BudgetSpent
from .outcome import Outcome
from .smallest import by_groups


def relax(case: Case) -> Outcome:
    """Result ``smallest`` (the detail's ``smallest`` lists it), ``reduced`` where the budget ended the search, ``remains``
    where the target happens with every change held, or ``none`` where there is no path change that moves a bit."""
    found = trials(Reruns.of(case))
    base = baseline(Reruns.of(case))
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
