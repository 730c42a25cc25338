"""A case: two runs that are to be explained, what parted them, and what re-running them needs."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detdiff.compare import Divergence, RequestDivergence, compare
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.record import RecordOptions, record
from detdiff.engines.mlx.serve import Models
from detdiff.engines.mlx.taps.faults import Plant
from detdiff.errors import ReplayError
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .control import Budget, CannotRun

Side = str
"""``a`` or ``b``."""
Progress = Callable[[int, int], None]
Plants = tuple[tuple[Plant, ...], tuple[Plant, ...]]
_HASHES = ("config_sha256", "weights_sha256", "tokenizer_sha256")


@dataclass(eq=False)
class Case:
    """Two runs, recorded, and their divergence; every control is a function of it.

    ``loaded`` is the model of both runs and ``draft`` its draft model: re-runs use these very objects, so that a fault
    in one of them is there again. ``plants`` are the faults that were planted in a and in b.
    """

    scenario_a: Scenario
    scenario_b: Scenario
    a: Trace
    b: Trace
    divergence: Divergence
    loaded: LoadedModel
    draft: LoadedModel | None = None
    budget: Budget = field(default_factory=Budget)
    progress: Progress | None = None
    plants: Plants = ((), ())
    known: dict[str, Any] = field(default_factory=dict)
    """What one control found out and another can use: runs by name."""
    _folder: Path | None = None
    _recorded: int = 0

    @classmethod
    def of(
        cls,
        a: Scenario | Trace,
        b: Scenario | Trace,
        divergence: Divergence | None = None,
        *,
        loaded: LoadedModel | None = None,
        draft: LoadedModel | None = None,
        budget: Budget | int | None = None,
        progress: Progress | None = None,
        plants: Plants = ((), ()),
    ) -> Case:
        """Record what is given as a scenario, and compare, unless the ``divergence`` of two traces is known.

        A number as ``budget`` limits re-runs.

        Raises ReplayError for a trace that is incomplete or of another model than the one that is loaded, NothingComparable
        where nothing of the two can be compared, and what loading and recording raise.
        """
        scenarios = [_scenario(side) for side in (a, b)]
        speculative = next((s for s in scenarios if s.speculation is not None), scenarios[0])
        models = Models.of(speculative, loaded, draft)
        for side in (a, b):
            if isinstance(side, Trace):
                _check(side, models)
        folder = Path(tempfile.mkdtemp(prefix="detdiff-explain-"))
        try:
            traces = []
            for given, scenario, faults, name in zip((a, b), scenarios, plants, "ab", strict=True):
                if isinstance(given, Trace):
                    traces.append(given)
                    continue
                options = RecordOptions(faults=faults, progress=progress, durable=False)
                path = folder / name
                traces.append(
                    record(scenario, path, loaded=models.target, draft=models.draft, options=options)
                )
            found = compare(*traces) if divergence is None else divergence
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        case = cls(
            scenarios[0],
            scenarios[1],
            traces[0],
            traces[1],
            found,
            models.target,
            models.draft,
            budget if isinstance(budget, Budget) else Budget(budget),
            progress,
            plants,
            _folder=folder,
        )
        weakref.finalize(case, shutil.rmtree, folder, ignore_errors=True)
        return case

    def scenario(self, side: Side) -> Scenario:
        return self.scenario_a if side == "a" else self.scenario_b

    def trace(self, side: Side) -> Trace:
        return self.a if side == "a" else self.b

    def faults(self, side: Side) -> tuple[Plant, ...]:
        return self.plants[0] if side == "a" else self.plants[1]

    def record(self, scenario: Scenario, side: Side, options: RecordOptions | None = None) -> Trace:
        """Record a re-run whole, with the faults of a side; its forwards are counted as spent."""
        self.budget.begin()
        assert self._folder is not None
        self._recorded += 1
        path = self._folder / f"again-{self._recorded}"
        options = options or RecordOptions(observe=0, progress=self.progress)
        options = replace(options, faults=self.faults(side), durable=False)
        trace = record(scenario, path, loaded=self.loaded, draft=self.draft, options=options)
        self.budget.spend(len(trace.forwards()))
        return trace

    @property
    def focus(self) -> RequestDivergence:
        """The request that controls look at: the first to flip in b, else the one with the first origin.

        Raises CannotRun where nothing parted.
        """
        parted = [request for request in self.divergence.requests if request.rung is not None]
        if not parted:
            raise CannotRun("the two runs do not part")
        flipped = [request for request in parted if request.flip is not None]
        if flipped:
            return min(flipped, key=_flipped_in)
        return next((r for r in parted if r.id == self.divergence.first), parted[0])

    def number(self, side: Side, request: str) -> int:
        """A request's number in a side's run, by its id."""
        ids = [each["id"] for each in self.trace(side).requests]
        return ids.index(request)

    def ids(self, side: Side) -> Sequence[str]:
        return [each["id"] for each in self.trace(side).requests]


def _flipped_in(request: RequestDivergence) -> int:
    assert request.flip is not None
    forward = request.flip.forward_b
    return forward if forward is not None else request.flip.forward_a or 0


def _scenario(side: Scenario | Trace) -> Scenario:
    if isinstance(side, Scenario):
        return side
    return Scenario.from_dict(side.scenario, where=f"the scenario of {side.path}")


def _check(trace: Trace, models: Models) -> None:
    if not trace.complete:
        raise ReplayError(
            f"{trace.path} is incomplete, so a re-run cannot be checked against it. Expected a finished trace: record "
            "it again."
        )
    pairs = [("model", trace.model, models.target)]
    if models.draft is not None and "draft" in trace.header:
        pairs.append(("draft", trace.header["draft"], models.draft))
    for what, stored, loaded in pairs:
        for key in _HASHES:
            if loaded.identity.get(key) != stored.get(key):
                raise ReplayError(
                    f"The {what} has the {key.partition('_')[0]} hash {loaded.identity.get(key)}; the trace {trace.path} was "
                    f"recorded with {stored.get(key)}. Name the model it was recorded with, or record again."
                )
