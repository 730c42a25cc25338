"""The control ``configuration``: both sides without a quantised cache, where they quantised it at different positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from detdiff.compare import compare
from detdiff.engines.base import CACHE_SETTINGS
from detdiff.scenario import CachePlan

from ..case import Case
from ..control import CannotRun, Figures, Outcome, control


@dataclass(frozen=True, eq=False)
class QuantisationFigures(Figures):
    """``stage`` is the one on which the runs still diverge."""

    stage: str | None


@control(
    "configuration", after="finite", needs=(CACHE_SETTINGS,), asked_by=lambda facts: facts.quantised_apart
)
def quantisation(case: Case) -> Outcome:
    """Result ``removed`` where the sides are then identical, ``remains`` where they are not."""
    if all(case.scenario(side).cache.kv_bits is None for side in "ab"):
        raise CannotRun("neither side quantises its cache")
    plain, traces = CachePlan(), []
    for side in "ab":
        scenario = case.scenario(side)
        cache = replace(
            scenario.cache,
            kv_bits=plain.kv_bits,
            kv_group_size=plain.kv_group_size,
            kv_start=plain.kv_start,
        )
        traces.append(case.record(replace(scenario, cache=cache), side))
    found = compare(*traces)
    if found.identical:
        sentence = "with no side quantising its cache, the runs are identical"
        return Outcome("removed", sentence, QuantisationFigures(found.stage))
    sentence = f"with no side quantising its cache, the runs still diverge on the stage {found.stage}"
    return Outcome("remains", sentence, QuantisationFigures(found.stage))
