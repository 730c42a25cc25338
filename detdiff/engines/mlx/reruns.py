"""Runs a side of a case again with one thing changed, as far as is needed, and what such a run remembers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.taps.forward import Forward, PathOverride, handle, memory
from detdiff.engines.mlx.taps.kernel_plan import RowComputation, TakenPath
from detdiff.engines.mlx.taps.sites import Arrays, SiteMap
from detdiff.engines.mlx.taps.unread import CacheUpdate
from detdiff.engines.schedule import Work
from detdiff.explain.case import Case, Side
from detdiff.scenario import KernelPlan, Scenario

from .model import LoadedModel
from .packed import PackedEngine, Snapshot, StopRun
from .requests import prepare
from .serve import Sessions, packed_engine, serve

Bytes = NDArray[np.uint8]


class Row(NamedTuple):
    """A row of a run: whose model, which request (by number), which position."""

    model: str
    request: int
    position: int


class Mark(NamedTuple):
    """One port of one row, whose bytes a watch keeps."""

    site: str
    port: str
    row: Row


def rows_of(forward: Forward) -> list[Row | None]:
    """The rows of a forward by flat place, slot after slot; None is padding."""
    columns = forward.shape[1]
    found: list[Row | None] = [None] * (forward.shape[0] * columns)
    for s in forward.segments:
        for n in range(s.count):
            found[s.slot * columns + s.column + n] = Row(forward.model, s.request, s.start + n)
    return found


@dataclass
class TakenPaths:
    """The paths that a run took: per forward and site runs of flat rows, and where each row was (its last write)."""

    forwards: dict[int, dict[str, list[tuple[range, RowComputation]]]] = field(default_factory=dict)
    places: dict[Row, tuple[int, int]] = field(default_factory=dict)

    def of(self, site: str, row: Row) -> RowComputation | None:
        """The path of one row at a site; None where the run has no such row, or the plan had no say."""
        where = self.places.get(row)
        if where is None:
            return None
        for run, made in self.forwards[where[0]].get(site, ()):
            if where[1] in run:
                return made
        return None


class RerunWatch:
    """A session's recording that keeps, per row, a digest of what it wrote to all caches, and of its logits.

    ``chain[n]`` digests everything written in forwards 0 to n with their compositions and inputs: where two runs agree
    in it, their caches are bit-equal. ``begun(forward, caches)`` is called before each forward, which it may stop.
    """

    def __init__(self, begun: Callable[[Forward, Sequence[Any]], None] | None = None) -> None:
        self.rows: dict[Row, bytes] = {}
        self.logits: dict[Row, bytes] = {}
        self.forward_of: dict[Row, int] = {}
        self.chain: list[bytes] = []
        self.compositions: list[tuple[Any, ...]] = []
        self.paths = TakenPaths()
        self.marks: dict[Mark, bytes] = {}
        self.values: dict[Mark, mx.array] = {}
        self.wanted: dict[tuple[str, str], Row] = {}
        self._begun = begun
        self._maps: dict[str, SiteMap] = {}
        self._forward: Forward | None = None
        self._writes: list[tuple[mx.array, mx.array]] = []
        self._states: list[mx.array] = []

    def of(self, sites: SiteMap, model: str) -> RerunWatch:
        """Tell it the sites of a model; returns itself."""
        self._maps[model] = sites
        return self

    def inherit(self, other: RerunWatch, forwards: int) -> None:
        """Take over what ``other`` saw in its first ``forwards`` forwards."""
        mine = [row for row, forward in other.forward_of.items() if forward < forwards]
        self.rows = {row: other.rows[row] for row in mine}
        self.logits = {row: other.logits[row] for row in mine if row in other.logits}
        self.forward_of = {row: other.forward_of[row] for row in mine}
        self.marks = {mark: value for mark, value in other.marks.items() if mark.row in self.rows}
        self.chain = other.chain[:forwards]
        self.compositions = other.compositions[:forwards]

    # What a session calls.

    def begin(self, forward: Forward, cache: Sequence[Any]) -> None:
        if self._begun is not None:
            self._begun(forward, cache)
        self._forward = forward
        self._writes, self._states = [], []

    def site(self, key: str, kind: str, inputs: Arrays, outputs: Arrays, parent: str | None) -> None:
        if kind == "state":
            self._states += [handle(array) for _, array in outputs]
        if not self.wanted or self._forward is None:
            return
        sites = self._maps[self._forward.model]
        place = sites.index.get(key)
        if place is None:
            return
        for name, array in (*inputs, *outputs):
            self._mark(sites.sites[place].name, name, array, sites.axes.get(sites.ports.get((key, name), -1)))

    def _mark(self, site: str, port: str, array: mx.array, axis: int | None) -> None:
        row, forward = self.wanted.get((site, port)), self._forward
        if row is None or forward is None or axis is None or row.model != forward.model:
            return
        for s in forward.segments:
            if s.request == row.request and 0 <= row.position - s.start < s.count:
                column = s.column + row.position - s.start
                if (
                    forward.selected is not None
                    and array.shape[axis] == len(forward.selected) < forward.shape[1]
                ):
                    if column not in forward.selected:
                        continue
                    column = forward.selected.index(column)
                value = mx.moveaxis(array, axis, 1)[s.slot, column]
                self.marks[Mark(site, port, row)] = _flat(value)
                self.values[Mark(site, port, row)] = value

    def call(self, key: str, taken: TakenPath) -> None:
        forward = self._forward
        if forward is None or taken.made is None:
            return
        sites = self._maps[forward.model]
        name = sites.sites[sites.index[key]].name
        runs = self.paths.forwards.setdefault(forward.index, {}).setdefault(name, [])
        everything = range(forward.shape[0] * forward.shape[1])
        at = taken.at
        if forward.selected is not None and key == sites.head:
            # The head sees the selected rows only.
            for n in at if at is not None else range(len(forward.selected)):
                runs.append((range(forward.selected[n], forward.selected[n] + 1), taken.made))
            return
        if at is None or taken.rows is None or taken.rows == len(everything):
            runs.append((everything if at is None else at, taken.made))
            return
        several = max(1, taken.rows // len(everything))  # rows that the site made of each of the forward's
        runs.append((range(at.start // several, -(-at.stop // several)), taken.made))

    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: list[CacheUpdate]) -> None:
        self._writes.append((keys, values))

    def attended(self, key: str, layer: int | None, keys: Any, mask: Any) -> None: ...
    def block_done(self, key: str) -> None: ...

    def end(self, forward: Forward, logits: mx.array) -> None:
        self._forward = None
        written = [array for pair in self._writes for array in pair]
        mx.eval(written, self._states)
        places = rows_of(forward)
        chain = hashlib.blake2b(self.chain[-1] if self.chain else b"", digest_size=16)
        composition = (
            forward.model,
            forward.shape,
            tuple((s.request, s.slot, s.start, s.count, s.column) for s in forward.segments),
        )
        chain.update(repr(composition).encode())
        chain.update(np.asarray(forward.tokens).astype(np.int64).tobytes())
        blocks = [_by_row(array) for array in written]
        whole = np.concatenate(blocks, axis=1) if blocks else np.zeros((len(places), 0), np.uint8)
        states = self._state_bytes(forward)
        for flat, row in enumerate(places):
            if row is None:
                continue
            digest = hashlib.blake2b(whole[flat].tobytes(), digest_size=16)
            digest.update(states.get((flat // forward.shape[1], row.position), b""))
            self.rows[row] = digest.digest()
            self.logits.pop(row, None)  # those of a write that was rejected
            self.forward_of[row] = forward.index
            self.paths.places[row] = (forward.index, flat)
            chain.update(self.rows[row])
        if forward.logits_used:
            chain.update(self._logits(forward, logits, places))
        self.chain.append(chain.digest())
        self.compositions.append(composition)

    def _state_bytes(self, forward: Forward) -> dict[tuple[int, int], bytes]:
        """Recurrent states belong to a slot's last row."""
        found: dict[tuple[int, int], bytes] = {}
        for s in forward.segments:
            parts = [_flat(array[s.slot : s.slot + 1]) for array in self._states]
            if parts:
                found[s.slot, s.start + s.count - 1] = b"".join(parts)
        return found

    def _logits(self, forward: Forward, logits: mx.array, places: list[Row | None]) -> bytes:
        columns = forward.shape[1]
        if forward.selected is not None and logits.shape[1] == len(forward.selected):
            answering = [(0, n, places[column]) for n, column in enumerate(forward.selected)]
        elif forward.layout == "packed":
            chosen = range(columns) if forward.selected is None else forward.selected
            answering = [(0, column, places[column]) for column in chosen]
        else:
            # mlx-lm uses the last column only, but when it verifies.
            last = [
                s.slot * columns + column
                for s in forward.segments
                for column in range(0 if s.phase == "verify" else s.count - 1, s.count)
            ]
            answering = [(flat // columns, flat % columns, places[flat]) for flat in last]
        together = b""
        for slot, column, row in answering:
            if row is not None:
                digest = hashlib.blake2b(_flat(logits[slot, column]), digest_size=16).digest()
                self.logits[row] = digest
                together += digest
        return together


def _by_row(array: mx.array) -> Bytes:
    """The bytes of [slots, heads, columns, width] by flat row, uint8 [slots * columns, bytes of a row]."""
    bits = memory(array).numpy()
    slots, _, columns, _ = bits.shape
    rows = np.ascontiguousarray(bits.transpose(0, 2, 1, 3)).reshape(slots * columns, -1)
    return rows.view(np.uint8)


def _flat(array: mx.array) -> bytes:
    mx.eval(array)
    return memory(array).numpy().tobytes()


class Reruns:
    """A case with what running its sides on mlx models needs: the models themselves, and taps kept from run to run."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.engine = cast(Any, case.one_engine())
        self.loaded: LoadedModel = self.engine.loaded
        self._sessions: dict[Any, Sessions] = {}

    @classmethod
    def of(cls, case: Case) -> Reruns:
        """Those of a case, the same whoever asks."""
        found = case.known.get("reruns")
        if not isinstance(found, Reruns):
            found = case.known["reruns"] = cls(case)
        return found

    def sessions(self, side: Side, plan: KernelPlan | None = None) -> Sessions:
        """Taps on the models of a side under its kernel plan, or another one; kept from re-run to re-run."""
        scenario = self.case.scenario(side)
        if plan is not None:
            scenario = replace(scenario, kernels=plan)
        key = (scenario.kernels, scenario.speculation, scenario.schedule.layout, self.case.faults(side))
        if key not in self._sessions:
            self._sessions[key] = Sessions.of(scenario, self.engine.models(scenario), self.case.faults(side))
        return self._sessions[key]


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
class Rerun:
    """A re-run: what its watch saw, the tokens by request number, and what it took.

    ``from_`` is the forward that it began with, 0 for the prompt; ``whole`` says that it was not ended early.
    """

    side: Side
    watch: RerunWatch
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


Decided = Callable[[Rerun], bool]


@runtime_checkable
class ComputesTwoWays(Protocol):
    """An override that computes calls in two ways: ``effective`` has those that differed in bits, once they are settled."""

    effective: dict[Any, int]

    def settle(self) -> None: ...


@dataclass(frozen=True)
class RerunChanges:
    """What is changed in a re-run of a side, and how much of it is run.

    ``scenario`` stands for the side's own; ``override`` chooses paths. ``decided(run)`` is asked after each token and
    before each forward, and ends the run. ``start`` continues a known run from one of its snapshots. ``before(engine)`` is
    called before each packed step, ``begun(forward, caches)`` before every forward. ``wanted`` are ports of rows whose
    values are kept; ``keep`` keeps snapshots, and ``at`` names a forward before which there must be one. ``progress`` is
    called with tokens so far and at most; None is the case's own.
    """

    scenario: Scenario | None = None
    override: PathOverride | None = None
    decided: Decided | None = None
    start: tuple[Rerun, Snapshot] | None = None
    before: Callable[[PackedEngine], None] | None = None
    begun: Callable[[Forward, Sequence[Any]], None] | None = None
    wanted: dict[tuple[str, str], Row] = field(default_factory=dict)
    keep: bool = False
    at: int | None = None
    sessions: Sessions | None = None
    progress: Callable[[int, int], None] | None = None


def rerun(runs: Reruns, side: Side, changes: RerunChanges | None = None) -> Rerun:
    """Run a side again. Raises BudgetSpent when the case's budget ends, and what the engine raises."""
    changes = changes or RerunChanges()
    if changes.start is None and changes.progress is None:
        # From a snapshot it is over before a bar is drawn.
        changes = replace(changes, progress=runs.case.progress)
    scenario = changes.scenario or runs.case.scenario(side)
    sessions = changes.sessions or runs.sessions(side, scenario.kernels)
    runs.case.budget.begin()
    run = Rerun(side, RerunWatch(), [[] for _ in scenario.requests])
    run.watch = _watch(runs, run, changes, sessions)
    if changes.start is not None:
        _continue(run, *changes.start)
    work = prepare(scenario, runs.loaded)
    clock = time.perf_counter()
    for session in (sessions.target, sessions.draft):
        if session is not None:
            session.override_paths(changes.override)
    try:
        with sessions.running(run.watch, None):
            _serve(run, changes, scenario, sessions, work)
        run.whole = all(item.finished for item in work)
    finally:
        for session in (sessions.target, sessions.draft):
            if session is not None:
                session.override_paths(None)
        run.seconds = time.perf_counter() - clock
        run.forwards = run.last - run.from_
    return run


def _watch(runs: Reruns, run: Rerun, changes: RerunChanges, sessions: Sessions) -> RerunWatch:
    padded = (changes.scenario or runs.case.scenario(run.side)).schedule.layout == "padded"

    def begun(forward: Forward, caches: Sequence[Any]) -> None:
        if padded and changes.decided is not None and changes.decided(run):
            raise StopRun
        runs.case.budget.forward()
        if changes.begun is not None:
            changes.begun(forward, caches)

    watch = RerunWatch(begun)
    watch.wanted = changes.wanted
    for model, sites in sessions.sites.items():
        watch.of(sites, model)
    return watch


def _continue(run: Rerun, known: Rerun, snapshot: Snapshot) -> None:
    """Let ``run`` know of ``known`` what came before the snapshot."""
    run.from_ = snapshot.forwards
    run.watch.inherit(known.watch, snapshot.forwards)
    run.tokens = [list(progress.generated) for progress in snapshot.progress]
    for n, tokens in enumerate(run.tokens):
        # What was told on is the model's own choice, which under forced tokens is not what was fed.
        run.tokens[n] = known.tokens[n][: len(tokens)]


def _serve(
    run: Rerun, changes: RerunChanges, scenario: Scenario, sessions: Sessions, work: list[Work]
) -> None:
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
            if _happened(changes.override):
                run.snapshots.pin()
            run.snapshots.add(engine)
            if changes.at is not None and engine.clock.forwards <= changes.at:
                run.snapshots.at = run.snapshots.last
        if changes.before is not None:
            changes.before(engine)

    seen = 0

    def _happened(override: Any) -> bool:
        nonlocal seen
        if not isinstance(override, ComputesTwoWays):
            return False
        override.settle()
        before, seen = seen, len(override.effective)
        return seen > before

    from_ = None if changes.start is None else changes.start[1]
    engine.run(work, scenario.schedule, on_token, from_=from_, before_step=before)
