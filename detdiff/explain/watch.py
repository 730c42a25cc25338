"""What a re-run remembers: digests of what each row wrote to the caches, logits, and the paths that were taken."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.instrument.buffers import handle, memory
from detdiff.engines.mlx.instrument.forward import Forward
from detdiff.engines.mlx.instrument.paths import Made, Taken
from detdiff.engines.mlx.instrument.sites import Arrays, SiteMap

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
class Paths:
    """The paths that a run took: per forward and site runs of flat rows, and where each row was (its last write)."""

    forwards: dict[int, dict[str, list[tuple[range, Made]]]] = field(default_factory=dict)
    places: dict[Row, tuple[int, int]] = field(default_factory=dict)

    def of(self, site: str, row: Row) -> Made | None:
        """The path of one row at a site; None where the run has no such row, or the plan had no say."""
        where = self.places.get(row)
        if where is None:
            return None
        for run, made in self.forwards[where[0]].get(site, ()):
            if where[1] in run:
                return made
        return None


class Watch:
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
        self.paths = Paths()
        self.marks: dict[Mark, bytes] = {}
        self.values: dict[Mark, mx.array] = {}
        self.wanted: dict[tuple[str, str], Row] = {}
        self._begun = begun
        self._maps: dict[str, SiteMap] = {}
        self._forward: Forward | None = None
        self._writes: list[tuple[mx.array, mx.array]] = []
        self._states: list[mx.array] = []

    def of(self, sites: SiteMap, model: str) -> Watch:
        """Tell it the sites of a model; returns itself."""
        self._maps[model] = sites
        return self

    def inherit(self, other: Watch, forwards: int) -> None:
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

    def call(self, key: str, taken: Taken) -> None:
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

    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: list[tuple[Any, Any]]) -> None:
        self._writes.append((keys, values))

    def mask(self, layer: int | None, kind: str) -> None: ...
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
