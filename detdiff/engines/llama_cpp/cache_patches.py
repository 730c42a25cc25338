"""Cache entries of one run in another: read and put where llama.cpp keeps them, right before the batch that decides.

An entry is found by the recorder's own account of which position lies in which cell. What is read is trusted only where it is
what the trace says was written.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.schedule import Share
from detdiff.explain.case import Case, Side
from detdiff.explain.control import CannotRun
from detdiff.explain.controls.patches import Decision, EntryKey
from detdiff.explain.deciding import deciding_row, digests_of, forwards_of
from detdiff.trace import digest_rows
from detdiff.trace.digest import STORAGE

from . import node_loops as steps
from .context import BatchRow, Float32
from .contradictions import SequenceOwners
from .library import GgmlTensor
from .recorder import ChosenToken, ModelPart
from .served_models import PreparedRun, ServedModel, model_parts
from .serving import Serving
from .sites import CacheLayer

Bytes = NDArray[np.uint8]
LOGITS = ("logits", "out")


class PreparesRuns(Protocol):
    """The engine, as far as it is needed here."""

    def prepared(self, scenario: Any, faults: Sequence[Any] = ()) -> Any: ...


class StoredEntries:
    """A layer's keys or values as they lie in the cache: by cell and head, or transposed, dimension by dimension.

    ``written`` is the node that writes them, of the graph that was computed last.
    """

    def __init__(self, written: GgmlTensor, cells: int, stream: int, heads: int, size: int) -> None:
        self._heads, self._stream = heads, stream
        transposed = written.ne[0] == 1
        width = heads * size if transposed else int(written.nb[1])
        kind: Any = c.c_uint8 * (cells * width)
        memory = np.frombuffer(kind.from_address(written.data), np.uint8)
        self._by_cell = None if transposed else memory.reshape(cells, width)
        element = int(written.nb[0])
        self._by_dimension = (
            memory.reshape(cells // stream, heads, size // element, stream, element) if transposed else None
        )
        self._size = size

    def at(self, cell: int, head: int) -> Bytes:
        """One entry, uint8 [bytes] or [dimensions, bytes of one], in place."""
        if self._by_cell is not None:
            return self._by_cell[cell, head * self._size : (head + 1) * self._size]
        assert self._by_dimension is not None
        return self._by_dimension[cell // self._stream, head, :, cell % self._stream]

    def read(self, cells: NDArray[np.int64]) -> Bytes:
        """The entries of these cells, uint8 [cells, heads, bytes], copied."""
        if self._by_cell is not None:
            whole = self._by_cell[cells, : self._heads * self._size]
            return whole.reshape(len(cells), self._heads, self._size).copy()
        assert self._by_dimension is not None
        found = self._by_dimension[cells // self._stream, :, :, cells % self._stream]
        return np.ascontiguousarray(found).reshape(len(cells), self._heads, self._size)


class HeldSide(NamedTuple):
    """What a layer holds of a request: ``positions`` int64 [n] ascending, their ``cells``, and ``data`` uint8 [n, heads, bytes]."""

    positions: NDArray[np.int64]
    cells: NDArray[np.int64]
    data: Bytes


Held = Mapping[tuple[int, str], HeldSide]
"""By layer and kind (``K`` or ``V``)."""


class _BeforeDecision(Exception):
    """The next batch is the one that decides."""


class _Unwritten:
    """In the place of a recorder: the callback digests each batch, and nothing is written."""

    def __init__(self, run: PreparedRun, part: ModelPart) -> None:
        self.owners, self.part, self._nodes = SequenceOwners(), part, run.nodes

    def begin(self, shares: Sequence[Share], held: Sequence[int] | None = None) -> None:
        rows = [
            (self.owners.sequence(share.work.index), share.start + n)
            for share in shares
            for n in range(len(share.tokens))
        ]
        self._nodes.begin(np.array(rows, np.int64).reshape(-1, 2))

    def end(self, shares: Sequence[Share], logits: Mapping[int, Float32]) -> None: ...

    def chosen(self, answers: Sequence[ChosenToken], texts: Callable[[int], str]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...


class SideBeforeDecision:
    """A side, run again up to the batch that decides, which can then be tried any number of times.

    ``held`` is what the cache holds of the request before that batch. Raises CannotRun where the run is not that of the trace.
    """

    def __init__(self, engine: PreparesRuns, case: Case, side: Side) -> None:
        self._case, self._side = case, side
        self.place = deciding_row(case, side)
        case.budget.begin()
        self._stack = ExitStack()
        self._run: PreparedRun = self._stack.enter_context(
            engine.prepared(case.scenario(side), case.faults(side))
        )
        self._reach()
        self._sequence = self._batch[self._row].sequence
        self._stored: dict[tuple[int, str], StoredEntries] = {}
        self.held: Held = self._read()
        nodes = self._run.nodes
        self._account = [array.copy() for array in (nodes.cells, nodes.written, nodes.terms, nodes.newest)]
        self._columns = np.concatenate(
            [
                np.arange(step[steps.COLUMN], step[steps.COLUMN] + step[steps.HEADS])
                for _, step in self._writes()
            ]
        )
        self._check_entries()
        self.own = self._decide()
        self._check_logits()

    def _reach(self) -> None:
        """Serve the requests until the deciding batch comes."""
        place, trace = self.place, self._case.trace(self._side)
        # A row that was rejected is computed again later, so that it may be in more than one batch.
        others = sum(number < place.forward for number in forwards_of(trace, place.request, place.position))
        forwards = 0

        def batch(shares: Sequence[Share], rows: list[BatchRow]) -> dict[int, Any]:
            nonlocal others, forwards
            at = 0
            for share in shares:
                if share.work.index == place.request and 0 <= place.position - share.start < len(
                    share.tokens
                ):
                    if not others:
                        self._batch, self._row = list(rows), at + place.position - share.start
                        raise _BeforeDecision
                    others -= 1
                at += len(share.tokens)
            forwards += 1
            return self._run.decode(rows)

        runs = [self._run] if self._run.draft is None else [self._run, self._run.draft]
        parts = model_parts([each.graph for each in runs])
        unwritten = [_Unwritten(each, part) for each, part in zip(runs, parts, strict=True)]
        draft = None
        if self._run.draft is not None:
            beside = self._run.draft
            draft = ServedModel(beside, unwritten[1], lambda shares, rows: beside.decode(rows), False)
        try:
            Serving(self._run, False, batch, lambda *_: None).run(unwritten[0], lambda token: "", draft)
        except _BeforeDecision:
            self._case.budget.spend(forwards)
            return
        raise CannotRun(f"side {self._side} did not come to its deciding forward again")

    def _writes(self) -> list[tuple[int, NDArray[np.int64]]]:
        """The nodes that write the cache, with their steps of the plan."""
        plan = self._run.graph.plan
        writes = np.isin(plan[:, steps.ACTION], (steps.WRITE_K, steps.WRITE_V))
        return [(int(n), plan[n]) for n in np.flatnonzero(writes)]

    def _read(self) -> Held:
        nodes, found = self._run.nodes, {}
        for node, step in self._writes():
            place = int(step[steps.LAYER])
            newest = nodes.newest[place, self._sequence]
            positions = np.flatnonzero(newest >= 0)
            if not len(positions):
                continue
            cells = newest[positions]
            stored = StoredEntries(
                GgmlTensor.from_address(nodes.address(node)), nodes.cells.shape[2], int(step[steps.KV_SIZE]),
                int(step[steps.HEADS]), int(step[steps.ENTRY]),
            )  # fmt: skip
            key = (self._layer(place).layer, "K" if step[steps.ACTION] == steps.WRITE_K else "V")
            self._stored[key] = stored
            found[key] = HeldSide(positions, cells, stored.read(cells))
        return found

    def _layer(self, place: int) -> CacheLayer:
        return self._run.graph.caches[place]

    def _check_entries(self) -> None:
        """Whether what was read is what the trace says was written, but where it says itself that an entry changed after that."""
        trace, caches = self._case.trace(self._side), {each.layer: each for each in self._run.graph.caches}
        told = {
            (event["layer"], event["entry"], event["head"], event["position"])
            for line in trace.forwards()
            for event in line.get("events", ())
            if event["kind"] == "cache_changed" and event.get("request") == self.place.request
        }
        for (layer, kind), side in self.held.items():
            dtype = caches[layer].dtypes[0 if kind == "K" else 1]
            count, heads, size = side.data.shape
            values = side.data.reshape(count * heads, size).view(STORAGE[dtype])
            digests = digest_rows(values, dtype).reshape(count, heads)
            ports = [(f"cache_l{layer}.write", f"{kind}.{head}") for head in range(heads)]
            written = digests_of(trace, self.place.request, ports)
            for position, found in zip(side.positions.tolist(), digests.tolist(), strict=True):
                expected = written.get(position, ())
                wrong = {head for head in range(heads) if expected[head : head + 1] != (found[head],)}
                if any((layer, kind, head, position) not in told for head in wrong):
                    raise CannotRun(
                        f"side {self._side}, run again, holds another entry of layer {layer} and position {position} in its cache than its "
                        "trace says was written"
                    )

    def _check_logits(self) -> None:
        """Whether the batch, tried as it is, gives what the trace has, and gives it twice."""
        known = digests_of(self._case.trace(self._side), self.place.request, [LOGITS]).get(
            self.place.position
        )
        if known is not None and known != (self._logits_digest,):
            raise CannotRun(
                f"side {self._side}, run again to its deciding forward, gave other logits than its trace has"
            )
        if self._decide() != self.own:
            raise CannotRun(
                f"the deciding forward of side {self._side}, run twice from one cache, gave other bits"
            )

    def answer(self, entries: Sequence[EntryKey], other: Held) -> Decision:
        """What the batch decides with these entries of ``other``. Raises BudgetSpent."""
        kept: list[tuple[Bytes, Bytes]] = []
        self._case.budget.begin()
        self._case.budget.forward()
        try:
            for layer, kind, head, position in entries:
                mine, theirs = self.held[layer, kind], other[layer, kind]
                place = self._stored[layer, kind].at(int(mine.cells[_at(mine, position)]), head)
                kept.append((place, place.copy()))
                place[...] = theirs.data[_at(theirs, position), head].reshape(place.shape)
            return self._decide()
        finally:
            for place, own in kept:
                place[...] = own

    def _decide(self) -> Decision:
        """Compute the deciding batch from the cache as it lies, and take it back."""
        run, nodes, batch = self._run, self._run.nodes, self._batch
        nodes.begin(_sequences_and_positions(batch))
        try:
            logits = run.decode(batch).get(self._row)
            row = batch[self._row]
            told = nodes.rows[: len(batch)]
            at = int(np.flatnonzero((told[:, 0] == row.sequence) & (told[:, 1] == row.position))[0])
            written = nodes.digests[at, self._columns].tobytes()
            self._logits_digest = None if logits is None else int(digest_rows(logits[None], "F32")[0])
            if self.place.index is not None and logits is not None:
                return run.context.choose(logits)
            return bytes(written + (b"" if logits is None else logits.tobytes()))
        finally:
            first: dict[int, int] = {}
            for row in batch:
                first[row.sequence] = min(row.position, first.get(row.sequence, row.position))
            for sequence, position in first.items():
                run.context.remove(sequence, position)
            account = nodes.cells, nodes.written, nodes.terms, nodes.newest
            for array, before in zip(account, self._account, strict=True):
                array[...] = before


def _at(side: HeldSide, position: int) -> int:
    return int(np.searchsorted(side.positions, position))


def _sequences_and_positions(rows: Sequence[BatchRow]) -> NDArray[np.int64]:
    return np.array([(row.sequence, row.position) for row in rows], np.int64).reshape(-1, 2)


def differing(a: Held, b: Held) -> list[EntryKey]:
    """The entries, of positions that both hold, whose bytes differ, layer by layer."""
    found: list[EntryKey] = []
    for layer, kind in sorted(a.keys() & b.keys()):
        mine, theirs = a[layer, kind], b[layer, kind]
        if mine.data.shape[1:] != theirs.data.shape[1:]:
            raise CannotRun("the two runs hold their entries in different forms")
        positions, x, y = np.intersect1d(mine.positions, theirs.positions, return_indices=True)
        unequal = (mine.data[x] != theirs.data[y]).any(axis=2)
        found += [EntryKey(layer, kind, int(h), int(positions[p])) for h, p in np.argwhere(unequal.T)]
    return found


class LlamaCachePatches:
    """What the controls ``patch_in`` and ``patch_out`` ask; see their protocol there."""

    def __init__(self, engine: PreparesRuns, case: Case) -> None:
        self._sides = {side: SideBeforeDecision(engine, case, side) for side in "ab"}
        self.differing: Sequence[EntryKey] = differing(self._sides["a"].held, self._sides["b"].held)
        self.own: Mapping[Side, Decision] = {side: found.own for side, found in self._sides.items()}
        self.ends: Mapping[Side, int] = {side: _end(found.held) for side, found in self._sides.items()}
        self.positions: Mapping[Side, int] = {
            side: found.place.position for side, found in self._sides.items()
        }

    def recurrent(self, side: Side) -> list[int]:
        """None: the models that this engine takes keep keys and values in every layer."""
        return []

    def answer(self, side: Side, given: Sequence[EntryKey]) -> Decision:
        return self._sides[side].answer(given, self._sides["b" if side == "a" else "a"].held)


def _end(held: Held) -> int:
    return max((int(side.positions[-1]) + 1 for side in held.values()), default=0)
