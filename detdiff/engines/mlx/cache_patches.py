"""Cache entries of one run in another: read and put by position, right before the forward that decides."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from detdiff.engines.mlx.taps.forward import TARGET, Forward, handle, memory
from detdiff.explain.case import Side
from detdiff.explain.control import CannotRun
from detdiff.explain.controls.patches import EntryKey
from detdiff.explain.deciding import DecidingRow, deciding_row

from .caches import PagedCache
from .packed import PackedEngine, Snapshot, StopRun
from .path_changes import Baseline, baseline
from .reruns import Rerun, RerunChanges, Reruns, RerunWatch, Row, rerun

Arrays = tuple[mx.array, ...]
"""Keys or values [heads, positions, width] of one request in one layer; a quantised cache has several arrays."""


class LayerEntries(NamedTuple):
    """What one layer holds of a request: positions ``first`` to ``first`` + n - 1; a recurrent layer holds none."""

    first: int
    keys: Arrays
    values: Arrays

    @property
    def end(self) -> int:
        return self.first + (int(self.keys[0].shape[1]) if self.keys else 0)


def held(cache: Any, slot: int = 0) -> LayerEntries:
    """The entries of a slot of a cache, in the order of their positions. Raises CannotRun for a cache of another kind."""
    if isinstance(cache, PagedCache):
        keys, values = cache.entries()
        return LayerEntries(0, (handle(keys)[0],), (handle(values)[0],))
    if isinstance(cache, ArraysCache):
        return LayerEntries(0, (), ())
    columns, first = _columns(cache, slot)
    places = mx.array(columns, mx.uint32)

    def side(value: Any) -> Arrays:
        return tuple(handle(array)[slot][:, places] for array in _arrays(value))

    return LayerEntries(first, side(cache.keys), side(cache.values))


def put(cache: Any, entries: LayerEntries, slot: int = 0) -> None:
    """Let a cache hold ``entries``, all of which it must have places for."""
    if isinstance(cache, PagedCache):
        cache.put(entries.first, entries.keys[0][None], entries.values[0][None])
        return
    columns, first = _columns(cache, slot)
    at = mx.array(columns[entries.first - first : entries.end - first], mx.uint32)
    for name, side in (("keys", entries.keys), ("values", entries.values)):
        new = []
        for array, rows in zip(_arrays(getattr(cache, name)), side, strict=True):
            changed, mine = handle(array), handle(array)[slot]
            mine[:, at] = rows
            changed[slot] = mine
            new.append(changed)
        setattr(
            cache,
            name,
            new[0] if isinstance(getattr(cache, name), mx.array) else type(getattr(cache, name))(new),
        )


def _arrays(side: Any) -> Sequence[mx.array]:
    return [side] if isinstance(side, mx.array) else list(side)


def _columns(cache: Any, slot: int) -> tuple[list[int], int]:
    """(columns, first): where the entries of a slot lie, oldest first, and the oldest one's position."""
    name = type(cache).__name__
    if getattr(cache, "keys", None) is None:
        raise CannotRun("a cache is still empty before the forward of the flip")
    if name in ("KVCache", "QuantizedKVCache"):
        return list(range(cache.offset)), 0
    if name == "BatchKVCache":
        padding = int(np.asarray(cache.left_padding)[slot])
        return list(range(padding, cache._idx)), 0
    if name == "RotatingKVCache":
        size = int(cache.keys.shape[2])
        # Behind the write index there is nothing yet, until it has been there once.
        count = cache._idx if cache._idx == cache.offset else min(cache.offset, size)
        return _ring(cache._idx, cache.keep, size, cache.offset, count)
    raise CannotRun(f"the entries of {name} cannot be put by position")


def _ring(index: int, keep: int, size: int, offset: int, count: int) -> tuple[list[int], int]:
    if keep:
        raise CannotRun("a rotating cache that keeps its first entries holds no run of positions")
    columns = [(index - 1 - back) % size for back in reversed(range(count))]
    return columns, offset - count


def differing(a: Sequence[LayerEntries], b: Sequence[LayerEntries]) -> list[EntryKey]:
    """The entries, of positions that both hold, whose bits differ, layer by layer."""
    found: list[EntryKey] = []
    for layer, (mine, theirs) in enumerate(zip(a, b, strict=True)):
        first, end = max(mine.first, theirs.first), min(mine.end, theirs.end)
        if first >= end:
            continue
        for kind, x, y in (("K", mine.keys, theirs.keys), ("V", mine.values, theirs.values)):
            unequal: NDArray[np.bool_] | None = None
            for p, q in zip(x, y, strict=True):
                if p.dtype != q.dtype:
                    raise CannotRun("the two runs hold their entries in different dtypes")
                rows = [
                    _bits(array[:, first - side.first : end - side.first])
                    for array, side in ((p, mine), (q, theirs))
                ]
                other = (rows[0] != rows[1]).any(axis=-1)
                unequal = other if unequal is None else unequal | other
            assert unequal is not None
            found += [EntryKey(layer, kind, int(h), first + int(p)) for h, p in np.argwhere(unequal)]
    return found


def _bits(array: mx.array) -> NDArray[Any]:
    whole = mx.contiguous(array)
    mx.eval(whole)
    return memory(whole).numpy().copy()


def patched(own: LayerEntries, other: LayerEntries, entries: Sequence[EntryKey]) -> LayerEntries:
    """One layer's ``own`` entries, but for ``entries``, which are taken from ``other``."""
    sides = []
    for kind, mine, theirs in (("K", own.keys, other.keys), ("V", own.values, other.values)):
        chosen = [entry for entry in entries if entry.kind == kind]
        if not chosen:
            sides.append(mine)
            continue
        heads, positions = (
            mx.array([getattr(e, name) for e in chosen], mx.uint32) for name in ("head", "position")
        )
        new = []
        for array, source in zip(mine, theirs, strict=True):
            changed = handle(array)
            changed[heads, positions - own.first] = source[heads, positions - other.first]
            new.append(changed)
        sides.append(tuple(new))
    return LayerEntries(own.first, *sides)


Answer = int | bytes
"""The token that is chosen, or a digest of the row where nothing flipped."""


class DecidingForward(Protocol):
    """Reads and tries."""

    def entries(self) -> list[LayerEntries]:
        """What each layer holds of the request."""
        ...

    def answer(self, changed: Mapping[int, LayerEntries]) -> Answer:
        """What the forward decides where these layers hold other entries."""
        ...


def deciding_forward(runs: Reruns, side: Side, base: Baseline) -> DecidingForward:
    """A side right before its deciding forward. In the padded layout that takes one more run to it."""
    where = deciding_row(runs.case, side)
    if runs.case.scenario(side).schedule.layout == "padded":
        return _PaddedForward(runs, side, where)
    run = base.a if side == "a" else base.b
    start = run.snapshots.before(where.forward)
    if start is None:
        raise CannotRun(f"there is no snapshot of side {side} before its deciding forward")
    return _PackedForward(runs, side, where, run, start[1])


@dataclass(frozen=True, eq=False)
class _PackedForward:
    runs: Reruns
    side: Side
    place: DecidingRow
    run: Rerun
    snapshot: Snapshot

    def entries(self) -> list[LayerEntries]:
        found: list[LayerEntries] = []

        def before(engine: PackedEngine) -> None:
            found.extend(held(cache) for cache in engine.target.caches.of(self.place.request))
            raise StopRun

        self._rerun(before)
        return found

    def answer(self, changed: Mapping[int, LayerEntries]) -> Answer:
        done = False

        def before(engine: PackedEngine) -> None:
            nonlocal done
            if not done:
                caches = engine.target.caches.of(self.place.request)
                for layer, entries in changed.items():
                    put(caches[layer], entries)
            done = True

        return _answer(self._rerun(before), self.place)

    def _rerun(self, before: Any) -> Rerun:
        decided = None if before is None else lambda run: _known(run, self.place)
        return rerun(
            self.runs,
            self.side,
            RerunChanges(start=(self.run, self.snapshot), before=before, decided=decided),
        )


def _row(where: DecidingRow) -> Row:
    return Row(TARGET, where.request, where.position)


def _known(run: Rerun, where: DecidingRow) -> bool:
    if where.index is not None:
        return len(run.tokens[where.request]) > where.index
    return _row(where) in run.watch.rows


def _answer(run: Rerun, where: DecidingRow) -> Answer:
    if where.index is not None:
        return run.tokens[where.request][where.index]
    return run.watch.rows[_row(where)] + run.watch.logits.get(_row(where), b"")


class _PaddedForward:
    """mlx-lm's generators cannot be begun in the middle, but the model can be called as they would call it."""

    def __init__(self, runs: Reruns, side: Side, where: DecidingRow) -> None:
        self.runs, self.side, self.place = runs, side, where
        if runs.case.scenario(side).requests[where.request].sampling.temperature and where.index is not None:
            raise CannotRun(
                "the request draws its tokens, and one forward of mlx-lm's generators cannot be drawn from"
            )
        self._caught: list[tuple[Forward, list[Any]]] = []
        rerun(runs, side, RerunChanges(begun=self._catch))
        if not self._caught:
            raise CannotRun(f"side {side} did not come to its deciding forward again")
        self._forward, self._caches = self._caught[0]
        self._segment = next(s for s in self._forward.segments if s.request == where.request)

    def _catch(self, forward: Forward, caches: Sequence[Any]) -> None:
        if forward.index == self.place.forward:
            self._caught.append((forward, [copied(cache) for cache in caches]))
            raise StopRun

    def entries(self) -> list[LayerEntries]:
        return [held(cache, self._segment.slot) for cache in self._caches]

    def answer(self, changed: Mapping[int, LayerEntries]) -> Answer:
        session = self.runs.sessions(self.side).target
        caches = [copied(cache) for cache in self._caches]
        for layer, entries in changed.items():
            put(caches[layer], entries, self._segment.slot)
        self.runs.case.budget.begin()
        self.runs.case.budget.forward()
        watch = RerunWatch().of(session.sites, TARGET)
        with session.running(watch):
            session.compose = lambda inputs, cache: self._forward
            logits = session.model(self._forward.tokens, cache=caches)
            if self.place.index is None:
                return watch.rows[_row(self.place)] + watch.logits.get(_row(self.place), b"")
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


class CachePatches:
    """What the controls ``patch_in`` and ``patch_out`` ask; see their protocol there."""

    def __init__(self, runs: Reruns) -> None:
        base = baseline(runs)
        self._forwards = {side: deciding_forward(runs, side, base) for side in "ab"}
        self._entries = {side: self._forwards[side].entries() for side in "ab"}
        self.differing = differing(self._entries["a"], self._entries["b"])
        self.own = {side: self._forwards[side].answer({}) for side in "ab"} if self.differing else {}
        self.ends = {side: max(layer.end for layer in self._entries[side]) for side in "ab"}
        self.positions = {side: deciding_row(runs.case, side).position for side in "ab"}

    def recurrent(self, side: Side) -> list[int]:
        return [layer for layer, held in enumerate(self._entries[side]) if not held.keys]

    def answer(self, side: Side, given: Sequence[EntryKey]) -> Answer:
        mine, theirs = self._entries[side], self._entries["b" if side == "a" else "a"]
        changed = {
            layer: patched(mine[layer], theirs[layer], [e for e in given if e.layer == layer])
            for layer in sorted({entry.layer for entry in given})
        }
        return self._forwards[side].answer(changed)
