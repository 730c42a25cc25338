"""Runs a scenario again with one thing changed, from a snapshot where there is one, and only as far as is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from detdiff.engines.mlx.instrument.forward import Forward
from detdiff.engines.mlx.instrument.roles import Steering
from detdiff.engines.mlx.packed import PackedEngine
from detdiff.engines.mlx.serve import Sessions, packed_engine, serve
from detdiff.engines.mlx.snapshot import Snapshot, StopRun
from detdiff.engines.mlx.work import Work, prepare
from detdiff.scenario import Scenario

from .case import Case, Side
from .steer import Doubting
from .watch import Row, Watch

KEPT = 12
PINNED = 12


@dataclass
class Snapshots:
    """Snapshots of one packed run by the number of the next forward: evenly spread ones, and those that are pinned."""

    spread: dict[int, Snapshot] = field(default_factory=dict)
    pinned: dict[int, Snapshot] = field(default_factory=dict)
    last: tuple[int, Snapshot] | None = None
    at: tuple[int, Snapshot] | None = None
    _stride: int = 1
    _count: int = 0

    def add(self, engine: PackedEngine) -> None:
        self.last = engine.clock.forwards, engine.snapshot()
        if self._count % self._stride == 0:
            self.spread[self.last[0]] = self.last[1]
        self._count += 1
        if len(self.spread) > KEPT:
            self._stride *= 2
            for n, forward in enumerate(sorted(self.spread)):
                if n % 2:
                    del self.spread[forward]

    def pin(self) -> None:
        """Keep the last one for good, as far as there is room."""
        if self.last is not None and len(self.pinned) < PINNED:
            self.pinned[self.last[0]] = self.last[1]

    def before(self, forward: int) -> tuple[int, Snapshot] | None:
        """The latest one from which ``forward`` is still to come."""
        known = {**self.spread, **self.pinned}
        for extra in (self.last, self.at):
            if extra is not None:
                known[extra[0]] = extra[1]
        found = max((n for n in known if n <= forward), default=None)
        return None if found is None else (found, known[found])


@dataclass(eq=False)
class Run:
    """A re-run: what its watch saw, the tokens by request number, and what it took.

    ``from_`` is the forward that it began with, 0 for the prompt; ``whole`` says that it was not ended early.
    """

    side: Side
    watch: Watch
    tokens: list[list[int]]
    snapshots: Snapshots = field(default_factory=Snapshots)
    forwards: int = 0
    seconds: float = 0.0
    from_: int = 0
    whole: bool = False

    @property
    def last(self) -> int:
        """The number of the next forward."""
        return len(self.watch.chain)


Decided = Callable[[Run], bool]


@dataclass(frozen=True)
class Changes:
    """What is changed in a re-run of a side, and how much of it is run.

    ``scenario`` stands for the side's own; ``steering`` chooses paths. ``decided(run)`` is asked after each token and
    before each forward, and ends the run. ``start`` continues a known run from one of its snapshots. ``before(engine)`` is
    called before each packed step, ``begun(forward, caches)`` before every forward. ``wanted`` are ports of rows whose
    values are kept; ``keep`` keeps snapshots, and ``at`` names a forward before which there must be one. ``progress`` is
    called with tokens so far and at most; None is the case's own.
    """

    scenario: Scenario | None = None
    steering: Steering | None = None
    decided: Decided | None = None
    start: tuple[Run, Snapshot] | None = None
    before: Callable[[PackedEngine], None] | None = None
    begun: Callable[[Forward, Sequence[Any]], None] | None = None
    wanted: dict[tuple[str, str], Row] = field(default_factory=dict)
    keep: bool = False
    at: int | None = None
    sessions: Sessions | None = None
    progress: Callable[[int, int], None] | None = None


def rerun(case: Case, side: Side, changes: Changes | None = None) -> Run:
    """Run a side again. Raises BudgetSpent when the case's budget ends, and what the engine raises."""
    changes = changes or Changes()
    if changes.start is None and changes.progress is None:
        # From a snapshot it is over before a bar is drawn.
        changes = replace(changes, progress=case.progress)
    scenario = changes.scenario or case.scenario(side)
    sessions = changes.sessions or case.sessions(side, scenario.kernels)
    case.budget.begin()
    run = Run(side, Watch(), [[] for _ in scenario.requests])
    run.watch = _watch(case, run, changes, sessions)
    if changes.start is not None:
        _continue(run, *changes.start)
    work = prepare(scenario, case.loaded)
    clock = time.perf_counter()
    for session in (sessions.target, sessions.draft):
        if session is not None:
            session.steer(changes.steering)
    try:
        with sessions.running(run.watch, None):
            _serve(run, changes, scenario, sessions, work)
        run.whole = all(item.finished for item in work)
    finally:
        for session in (sessions.target, sessions.draft):
            if session is not None:
                session.steer(None)
        run.seconds = time.perf_counter() - clock
        run.forwards = run.last - run.from_
    return run


def _watch(case: Case, run: Run, changes: Changes, sessions: Sessions) -> Watch:
    padded = (changes.scenario or case.scenario(run.side)).schedule.layout == "padded"

    def begun(forward: Forward, caches: Sequence[Any]) -> None:
        if padded and changes.decided is not None and changes.decided(run):
            raise StopRun
        case.budget.forward()
        if changes.begun is not None:
            changes.begun(forward, caches)

    watch = Watch(begun)
    watch.wanted = changes.wanted
    for model, sites in sessions.sites.items():
        watch.of(sites, model)
    return watch


def _continue(run: Run, known: Run, snapshot: Snapshot) -> None:
    """Let ``run`` know of ``known`` what came before the snapshot."""
    run.from_ = snapshot.forwards
    run.watch.inherit(known.watch, snapshot.forwards)
    run.tokens = [list(progress.generated) for progress in snapshot.progress]
    for n, tokens in enumerate(run.tokens):
        # What was told on is the model's own choice, which under forced tokens is not what was fed.
        run.tokens[n] = known.tokens[n][: len(tokens)]


def _serve(run: Run, changes: Changes, scenario: Scenario, sessions: Sessions, work: list[Work]) -> None:
    total = sum(item.max_tokens for item in work)

    def on_token(request: int, index: int, token: int) -> None:
        run.tokens[request].append(token)
        if changes.progress is not None:
            changes.progress(sum(map(len, run.tokens)), total)
        if changes.decided is not None and changes.decided(run):
            raise StopRun

    if scenario.schedule.layout == "padded":
        try:
            serve(scenario, sessions, work, on_token)
        except StopRun:
            return
        return
    engine = packed_engine(scenario, sessions)

    def before(engine: PackedEngine, step: int) -> None:
        if changes.decided is not None and changes.decided(run):
            raise StopRun
        if changes.keep:
            # The one before the step that has just been run is worth keeping where something happened in it.
            if _happened(changes.steering):
                run.snapshots.pin()
            run.snapshots.add(engine)
            if changes.at is not None and engine.clock.forwards <= changes.at:
                run.snapshots.at = run.snapshots.last
        if changes.before is not None:
            changes.before(engine)

    seen = 0

    def _happened(steering: Any) -> bool:
        nonlocal seen
        if not isinstance(steering, Doubting):
            return False
        steering.settle()
        before, seen = seen, len(steering.effective)
        return seen > before

    from_ = None if changes.start is None else changes.start[1]
    engine.run(work, scenario.schedule, on_token, from_=from_, before_step=before)
