"""A case: two runs that are to be explained, where they diverged, and the engines that run them again."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from detdiff.compare import Divergence, RequestDivergence, compare
from detdiff.engines.base import ADDRESS, RESET, Engine, Overrides, RunOptions
from detdiff.engines.record import record
from detdiff.engines.registry import as_engine, import_again, mlx_engine, open_engine, same_engine
from detdiff.errors import EngineUnusable, ReplayError
from detdiff.scenario import Scenario
from detdiff.trace import Address, Place, Trace, place

from .control import Budget, CannotRun

Side = str
"""``a`` or ``b``."""
Progress = Callable[[int, int], None]
Faults = tuple[tuple[Any, ...], tuple[Any, ...]]
REPEATS: Final = 2
"""Repetitions of each side. A change that shows in one run of n is missed by both with the chance (1 - 1/n)²."""
_HASHES = ("config_sha256", "weights_sha256", "tokenizer_sha256")


@dataclass(eq=False)
class Case:
    """Two runs, recorded, and their divergence; every control is a function of it.

    ``engines`` are the opened engines of both sides, one where one serves both: re-runs use these very objects, so that a
    fault in one of them is there again. ``injected_faults`` are the faults that were put into a and into b, for tests.
    ``reopens`` says that an engine can be opened anew by what its scenario says. ``repeats`` is how often ``repeat`` runs
    each side.
    """

    scenario_a: Scenario
    scenario_b: Scenario
    a: Trace
    b: Trace
    divergence: Divergence
    engines: Mapping[Side, Engine]
    budget: Budget = field(default_factory=Budget)
    progress: Progress | None = None
    injected_faults: Faults = ((), ())
    reopens: bool = False
    repeats: int = REPEATS
    known: dict[str, Any] = field(default_factory=dict)
    """What one control found out and another can use, by name."""
    _folder: Path | None = None
    _recorded: int = 0

    @classmethod
    def of(
        cls,
        a: Scenario | Trace,
        b: Scenario | Trace,
        divergence: Divergence | None = None,
        *,
        engine: Any = None,
        loaded: Any = None,
        draft: Any = None,
        budget: Budget | int | None = None,
        progress: Progress | None = None,
        injected_faults: Faults = ((), ()),
        repeats: int = REPEATS,
        across_engines: bool = False,
        across_models: bool = False,
    ) -> Case:
        """Record what is given as a scenario, and compare, unless the ``divergence`` of two traces is known.

        ``engine`` runs both sides where it is opened already, or is a pair of engines, opened by what the scenarios
        say; ``loaded`` and ``draft`` are models of the mlx engine. A
        number as ``budget`` limits re-runs. ``across_engines`` and ``across_models``: as in ``compare``.

        Raises ReplayError for a trace that is incomplete or of another model than the one that is loaded, NothingComparable
        where nothing of the two can be compared, and what opening and recording raise.
        """
        scenarios = [scenario_of(side) for side in (a, b)]
        import_again([side.header["environment"] for side in (a, b) if isinstance(side, Trace)])
        engines = _engines(scenarios, mlx_engine(loaded, draft) if loaded is not None else engine, draft)
        for side, opened, scenario in zip((a, b), engines, scenarios, strict=True):
            if isinstance(side, Trace):
                _check(side, opened, scenario)
        folder = Path(tempfile.mkdtemp(prefix="detdiff-explain-"))
        try:
            traces = []
            for given, scenario, opened, faults, name in zip(
                (a, b), scenarios, engines, injected_faults, "ab", strict=True
            ):
                if isinstance(given, Trace):
                    traces.append(given)
                    continue
                options = RunOptions(faults=faults, progress=progress, durable=False)
                if name == "b" and opened is engines[0] and RESET in opened.capabilities:
                    opened.reset()  # as for side a: what was served before is what fresh asks about
                traces.append(record(scenario, folder / name, engine=opened, options=options))
            if divergence is None:
                divergence = compare(*traces, across_models=across_models, across_engines=across_engines)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        case = cls(
            scenarios[0],
            scenarios[1],
            traces[0],
            traces[1],
            divergence,
            {"a": engines[0], "b": engines[1]},
            budget if isinstance(budget, Budget) else Budget(budget),
            progress,
            injected_faults,
            reopens=loaded is None and (engine is None or isinstance(engine, tuple)),
            repeats=repeats,
            _folder=folder,
        )
        weakref.finalize(case, shutil.rmtree, folder, ignore_errors=True)
        return case

    def scenario(self, side: Side) -> Scenario:
        return self.scenario_a if side == "a" else self.scenario_b

    def trace(self, side: Side) -> Trace:
        return self.a if side == "a" else self.b

    def faults(self, side: Side) -> tuple[Any, ...]:
        return self.injected_faults[0] if side == "a" else self.injected_faults[1]

    def engine(self, side: Side) -> Engine:
        return self.engines[side]

    def one_engine(self) -> Engine:
        """The engine of both sides. Raises CannotRun where each has one of its own."""
        if self.engines["a"] is not self.engines["b"]:
            raise CannotRun(
                "the two sides run on different engines, so no call of one has a counterpart in the other"
            )
        return self.engines["a"]

    def lacking(self, capabilities: Sequence[str]) -> str | None:
        """Why an engine cannot do what a control asks of it; None where both can."""
        for engine in self.engines.values():
            for capability in capabilities:
                if capability not in engine.capabilities:
                    return engine.lacks(capability)
        return None

    def fresh(self, side: Side) -> Engine:
        """The engine of a side as if it had served nothing: reset, or opened anew. Raises CannotRun."""
        engine = self.engines[side]
        if RESET in engine.capabilities:
            engine.reset()
            return engine
        if not self.reopens or ADDRESS in engine.capabilities:
            # To open what asks an address anew leaves what serves there as it is.
            raise CannotRun(engine.lacks(RESET))
        return open_engine(self.scenario(side))

    def record(
        self, scenario: Scenario, side: Side, *, overrides: Overrides | None = None, on: Engine | None = None
    ) -> Trace:
        """Record a re-run whole, with the faults of a side, ``on`` another engine than its own where one is given; its
        forwards are counted as spent."""
        self.budget.begin()
        assert self._folder is not None
        self._recorded += 1
        path = self._folder / f"again-{self._recorded}"
        options = RunOptions(
            observe=0,
            faults=self.faults(side),
            progress=self.progress,
            durable=False,
            overrides=overrides or Overrides(),
        )
        trace = record(scenario, path, engine=on or self.engines[side], options=options)
        self.budget.spend(len(trace.forwards()))
        return trace

    @property
    def focus(self) -> RequestDivergence:
        """The request that controls look at: the first to flip in b, else the one whose scores or vector moved furthest, else
        the one with the first origin.

        Raises CannotRun where nothing diverged.
        """
        diverged = [request for request in self.divergence.requests if request.stage is not None]
        if not diverged:
            raise CannotRun("the two runs do not diverge")
        flipped = [request for request in diverged if request.flip is not None]
        if flipped:
            return min(flipped, key=_flipped_in)
        furthest = max(diverged, key=_moved)
        if _moved(furthest):
            return furthest
        return next((r for r in diverged if r.id == self.divergence.first), diverged[0])

    def number(self, side: Side, request: str) -> int:
        """A request's number in a side's run, by its id."""
        ids = [each["id"] for each in self.trace(side).requests]
        return ids.index(request)

    def ids(self, side: Side) -> Sequence[str]:
        return [each["id"] for each in self.trace(side).requests]


def _moved(request: RequestDivergence) -> float:
    """How far scores or a vector moved; 0 where there are none."""
    if request.embedding is not None:
        return float("inf") if request.embedding.max_abs is None else request.embedding.max_abs
    moved = 0.0 if request.scored is None else request.scored.max_abs
    return float("inf") if moved != moved else moved


def _flipped_in(request: RequestDivergence) -> int:
    assert request.flip is not None
    forward = request.flip.forward_b
    return forward if forward is not None else request.flip.forward_a or 0


def opened_run(run: Trace | Scenario | Place | str) -> Trace | Scenario:
    """A run that may be named by the path of its trace or scenario file. Raises what reading them raises."""
    if isinstance(run, Trace | Scenario):
        return run
    path = place(run)
    if isinstance(path, Address):
        return Trace.open(path, checked=True)
    return Trace.open(path, checked=True) if path.is_dir() else Scenario.from_toml(path)


def scenario_of(side: Scenario | Trace) -> Scenario:
    """What a run was, or is to be, a run of. Raises what reading a scenario raises."""
    if isinstance(side, Scenario):
        return side
    return Scenario.from_dict(side.scenario, where=f"the scenario of {side.path}")


def _engines(scenarios: Sequence[Scenario], given: Any, draft: Any) -> list[Engine]:
    """Those of both sides, opened where none was given; one where one serves both."""
    if isinstance(given, tuple):
        return list(given)
    if given is not None:
        engine = as_engine(given)
        if engine is None:
            raise EngineUnusable(
                f"A {type(given).__name__} was given as an engine; expected one, an object with generate(requests, schedule), or a "
                "function. Give one of them."
            )
        return [engine, engine]
    first = open_engine(scenarios[0])
    if draft is not None and hasattr(first, "draft"):
        first.draft = draft
    return [first, first if same_engine(*scenarios) else open_engine(scenarios[1])]


def _check(trace: Trace, engine: Engine, scenario: Scenario) -> None:
    if not trace.complete:
        raise ReplayError(
            f"{trace.path} is incomplete, so a re-run cannot be checked against it. Expected a finished trace: record "
            "it again."
        )
    pairs = [("model", trace.model, engine.identity)]
    drafted = getattr(engine, "draft_identity", None)
    if drafted is not None and scenario.speculation is not None and "draft" in trace.header:
        pairs.append(("draft", trace.header["draft"], drafted(scenario)))
    for what, stored, opened in pairs:
        for key in _HASHES:
            if opened.get(key) != stored.get(key):
                raise ReplayError(
                    f"The {what} has the {key.partition('_')[0]} hash {opened.get(key)}; the trace {trace.path} was "
                    f"recorded with {stored.get(key)}. Name the model it was recorded with, or record again."
                )
