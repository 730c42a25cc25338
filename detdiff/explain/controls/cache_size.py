"""The control ``cache_size``: both sides with caches that keep every position, where one was to keep fewer than the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from detdiff.compare import compare
from detdiff.engines.base import CACHE_SETTINGS

from ..case import Case
from ..control import CannotRun, Figures, Outcome, control


@dataclass(frozen=True, eq=False)
class CacheSizeFigures(Figures):
    """``stage`` is the one on which the runs still diverge."""

    stage: str | None


@control(
    "cache_size", after="configuration", needs=(CACHE_SETTINGS,), asked_by=lambda facts: bool(facts.sizes)
)
def cache_size(case: Case) -> Outcome:
    """Result ``removed`` where no row of the sides then differs, ``remains`` where one does."""
    plans = {side: case.scenario(side).cache for side in "ab"}
    if all(plan.max_kv_size is None for plan in plans.values()):
        raise CannotRun("the cache of neither side is limited")
    found = compare(
        *(
            case.record(replace(case.scenario(side), cache=replace(plan, max_kv_size=None)), side)
            for side, plan in plans.items()
        )
    )
    # Of tokens that are drawn, other draws from equal logits are no matter of the caches; the control choices looks at them.
    drawn = all(r.stage is None or (not r.differing and r.logits_equal) for r in found.requests)
    result = "removed" if found.identical or drawn else "remains"
    how = f"the runs still diverge on the stage {found.stage}"
    if result == "removed":
        how = (
            "the runs are identical"
            if found.identical
            else "no row differs; tokens that do are drawn from equal logits"
        )
    sentence = f"with caches that keep every position, {how}"
    return Outcome(result, sentence, CacheSizeFigures(found.stage))
