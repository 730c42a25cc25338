"""Records both runs of a trial with its injected faults in place, and compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fault_case import Expected, Trial
from tiers import FULL, THOROUGH

from detdiff.compare import Divergence, RequestDivergence, compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.trace import Trace

SEEDS = range(10) if FULL else range(3) if THOROUGH else range(1)


class Recorded:
    """Traces of trials below one directory; the last trial's are ``a`` and ``b``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.a: Trace
        self.b: Trace

    def compare(self, trial: Trial, **changes: Any) -> Divergence:
        """The divergence of a trial's runs; ``changes`` are made in both scenarios. Raises what compare raises."""
        self.record(trial, **changes)
        return compare(self.a, self.b)

    def record(self, trial: Trial, **changes: Any) -> None:
        with trial.around:
            self.a, self.b = (
                record(
                    asked.with_changes(**changes) if changes else asked,
                    self._path(),
                    loaded=trial.loaded,
                    draft=trial.draft,
                    options=RecordOptions(observe=0),
                )
                for asked in (trial.scenario_a, trial.scenario_b)
            )

    def _path(self) -> Path:
        self._count += 1
        return self._directory / str(self._count)


def diverged(divergence: Divergence) -> list[RequestDivergence]:
    return [request for request in divergence.requests if not request.identical]


def check_named(divergence: Divergence, expected: Expected) -> None:
    """What every answer has to have right: who diverged, where first, and that nothing else is an origin."""
    assert not divergence.identical
    found = diverged(divergence)
    assert {request.id for request in found} <= expected.requests and found
    for request in found:
        origin = request.origin
        assert expected.kinds == frozenset() or {o.kind for o in request.origins} <= expected.kinds, request
        if expected.site is None:
            continue
        assert origin is not None and origin.site == expected.site, origin
        assert expected.layer is None or origin.layer == expected.layer
        assert expected.how is None or origin.how == expected.how
        assert expected.position is None or origin.position == expected.position
    assert expected.stage is None or divergence.stage == expected.stage
