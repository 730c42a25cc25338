"""A side right before the forward that decides: its caches can be read and changed, and the forward be run, at will."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.instrument.buffers import handle
from detdiff.engines.mlx.instrument.forward import TARGET, Forward
from detdiff.engines.mlx.packed import PackedEngine
from detdiff.engines.mlx.snapshot import Snapshot, StopRun

from .baseline import Baseline
from .case import Case, Side
from .control import CannotRun
from .deciding import Place, place
from .entries import Held, held, put
from .rerun import Changes, Run, rerun
from .watch import Watch

Answer = int | bytes
"""The token that is chosen, or a digest of the row where nothing flipped."""


class Moment(Protocol):
    """Reads and tries."""

    def entries(self) -> list[Held]:
        """What each layer holds of the request."""
        ...

    def answer(self, changed: Mapping[int, Held]) -> Answer:
        """What the forward decides where these layers hold other entries."""
        ...


def moment(case: Case, side: Side, base: Baseline) -> Moment:
    """The moment before the deciding forward of a side. In the padded layout that takes one more run to it."""
    where = place(case, side)
    if case.scenario(side).schedule.layout == "padded":
        return _Padded(case, side, where)
    run = base.a if side == "a" else base.b
    start = run.snapshots.before(where.forward)
    if start is None:
        raise CannotRun(f"there is no snapshot of side {side} before its deciding forward")
    return _Packed(case, side, where, run, start[1])


@dataclass(frozen=True, eq=False)
class _Packed:
    case: Case
    side: Side
    place: Place
    run: Run
    snapshot: Snapshot

    def entries(self) -> list[Held]:
        found: list[Held] = []

        def before(engine: PackedEngine) -> None:
            found.extend(held(cache) for cache in engine.target.caches.of(self.place.request))
            raise StopRun

        self._rerun(before)
        return found

    def answer(self, changed: Mapping[int, Held]) -> Answer:
        done = False

        def before(engine: PackedEngine) -> None:
            nonlocal done
            if not done:
                caches = engine.target.caches.of(self.place.request)
                for layer, entries in changed.items():
                    put(caches[layer], entries)
            done = True

        return _answer(self._rerun(before), self.place)

    def _rerun(self, before: Any) -> Run:
        decided = None if before is None else lambda run: _known(run, self.place)
        return rerun(
            self.case, self.side, Changes(start=(self.run, self.snapshot), before=before, decided=decided)
        )


def _known(run: Run, where: Place) -> bool:
    if where.index is not None:
        return len(run.tokens[where.request]) > where.index
    return where.row in run.watch.rows


def _answer(run: Run, where: Place) -> Answer:
    if where.index is not None:
        return run.tokens[where.request][where.index]
    return run.watch.rows[where.row] + run.watch.logits.get(where.row, b"")


class _Padded:
    """mlx-lm's generators cannot be begun in the middle, but the model can be called as they would call it."""

    def __init__(self, case: Case, side: Side, where: Place) -> None:
        self.case, self.side, self.place = case, side, where
        if case.scenario(side).requests[where.request].sampling.temperature and where.index is not None:
            raise CannotRun(
                "the request draws its tokens, and one forward of mlx-lm's generators cannot be drawn from"
            )
        self._caught: list[tuple[Forward, list[Any]]] = []
        rerun(case, side, Changes(begun=self._catch))
        if not self._caught:
            raise CannotRun(f"side {side} did not come to its deciding forward again")
        self._forward, self._caches = self._caught[0]
        self._segment = next(s for s in self._forward.segments if s.request == where.request)

    def _catch(self, forward: Forward, caches: Sequence[Any]) -> None:
        if forward.index == self.place.forward:
            self._caught.append((forward, [copied(cache) for cache in caches]))
            raise StopRun

    def entries(self) -> list[Held]:
        return [held(cache, self._segment.slot) for cache in self._caches]

    def answer(self, changed: Mapping[int, Held]) -> Answer:
        session = self.case.sessions(self.side).target
        caches = [copied(cache) for cache in self._caches]
        for layer, entries in changed.items():
            put(caches[layer], entries, self._segment.slot)
        self.case.budget.begin()
        self.case.budget.forward()
        watch = Watch().of(session.sites, TARGET)
        with session.running(watch):
            session.compose = lambda inputs, cache: self._forward
            logits = session.model(self._forward.tokens, cache=caches)
            if self.place.index is None:
                return watch.rows[self.place.row] + watch.logits.get(self.place.row, b"")
            column = self._segment.column + self.place.position - self._segment.start
            return int(np.asarray(mx.argmax(logits[self._segment.slot, column])))


def copied(cache: Any) -> Any:
    """A cache of its own, on the same arrays."""
    found = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, mx.array):
            setattr(found, name, handle(value))
        elif isinstance(value, list | tuple):
            setattr(found, name, type(value)(handle(v) if isinstance(v, mx.array) else v for v in value))
    return found
