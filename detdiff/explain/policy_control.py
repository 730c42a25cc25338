"""The control ``policy``: both sides again without a quantised cache, where they quantised it at different positions."""

from __future__ import annotations

import time
from dataclasses import replace

from detdiff.compare import compare
from detdiff.scenario import CachePlan

from .case import Case
from .control import NOT_RUN, Control

NAME = "policy"


def policy(case: Case) -> Control:
    """Result ``removed`` where the sides are then identical, ``remains`` where they are not."""
    started = time.perf_counter()
    sides = (case.scenario_a, case.scenario_b)
    if all(side.cache.kv_bits is None for side in sides):
        return Control(NAME, NOT_RUN, "neither side quantises its cache", 0, 0.0)
    plain, traces = CachePlan(), []
    for name, side in zip("ab", sides, strict=True):
        cache = replace(
            side.cache, kv_bits=plain.kv_bits, kv_group_size=plain.kv_group_size, kv_start=plain.kv_start
        )
        traces.append(case.record(replace(side, cache=cache), name))
    forwards = sum(len(trace.forwards()) for trace in traces)
    found = compare(*traces)
    result = "removed" if found.identical else "remains"
    said = (
        "with no side quantising its cache, the runs are identical"
        if found.identical
        else f"with no side quantising its cache, the runs still part on the rung {found.rung}"
    )
    return Control(NAME, result, said, forwards, time.perf_counter() - started, {"rung": found.rung})
