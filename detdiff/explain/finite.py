"""The control ``finite``: which operation gave the first value that is not finite, and whether in a row of padding."""

from __future__ import annotations

import time

from detdiff.engines.mlx.first_not_finite import NotFinite, watched_for_values
from detdiff.engines.mlx.reruns import Reruns

from .case import Case
from .control import Control


def finite(case: Case) -> Control:
    """Run both sides again, up to the first value that is not finite in each. Result ``finite`` or ``not_finite``."""
    started = time.perf_counter()
    found: list[NotFinite] = []
    forwards = 0
    for side in "ab":
        watch = watched_for_values(Reruns.of(case), side)
        forwards += watch.forwards
        if watch.found is not None:
            found.append(watch.found)
    seconds = time.perf_counter() - started
    if not found:
        return Control(
            "finite",
            "finite",
            "every value of every site is finite in both runs, padding included",
            forwards,
            seconds,
        )
    first = min(found, key=lambda each: each.forward)
    detail = {"first": {**vars(first), "said": first.said}, "runs": [each.run for each in found]}
    return Control("finite", "not_finite", first.said, forwards, seconds, detail)
