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
    """Result ``removed`` where the sides are then identical, ``remains`` where they are not."""
    plans = {side: case.scenario(side).cache for side in "ab"}
    if all(plan.max_kv_size is None for plan in plans.values()):
        raise CannotRun("the cache of neither side is limited")
    found = compare(
        *(
            case.record(replace(case.scenario(side), cache=replace(plan, max_kv_size=None)), side)
            for side, plan in plans.items()
        )
    )
    result = "removed" if found.identical else "remains"
    how = "are identical" if found.identical else f"still diverge on the stage {found.stage}"
    sentence = f"with caches that keep every position, the runs {how}"
    return Outcome(result, sentence, CacheSizeFigures(found.stage))
