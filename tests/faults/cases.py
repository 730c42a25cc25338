"""The twenty injected cases: what each injects, over which runs, and what has to be named.

``CASES[n].trial(seed)`` draws one trial. Recorded with its injected faults in place (``with trial.around:``), run B of a trial shows
the fault and run A does not, unless ``Expected.kind`` is ``identical``; both run on one model.
"""

from __future__ import annotations

import batch_cases
import cache_cases
import numerics_cases
import other_cases
import value_cases
from fault_case import Expected, FaultCase, Trial

CASES: dict[int, FaultCase] = {
    case.number: case
    for part in (numerics_cases, cache_cases, batch_cases, value_cases, other_cases)
    for case in part.CASES
}

__all__ = ["CASES", "Expected", "FaultCase", "Trial"]
