"""The digests and values of paired rows, a bounded part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Shard, Trace
from detdiff.trace.files import FileReader
from detdiff.trace.shard import Tensor

from .alignment import Columns, CommonPorts, RowPairs, in_order
from .forwards import distinct
from .metrics import Values, row_distances

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]

_LOW: Final = (1 << 32) - 1
_NEAR_BYTES: Final = 1 << 20  # of one trace: what was read is compared while the processor's cache has it
_FAR_BYTES: Final = 16 << 20  # of the leading trace, held where the other has its rows in another order
_LONG: Final = 16  # rows: shorter runs are not worth a read of their own
_EIGHT: Final = (1 << np.arange(8)).astype(np.uint8)[:, None]


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of one pair of tables: ``rows`` int64 [n] are places in RowPairs.

    ``bits`` uint64 [n, words] has a bit for each column pair, the lowest first, set where the digests differ.
    """

    rows: Int64
    columns: Columns
    bits: NDArray[np.uint64]

    @property
    def differ(self) -> NDArray[np.bool_]:
        """The bits as bool [n, column pairs]."""
        bits = self.bits.view(np.uint8)
        return np.unpackbits(bits, axis=1, count=len(self.columns.a), bitorder="little").view(np.bool_)

    def turned(self) -> NDArray[np.uint8]:
        """The bits as uint8 [column pairs, bytes], with a bit for each row, the lowest first."""
        eights = np.ascontiguousarray(self.bits.view(np.uint8).T)
        packed = [np.packbits(eight & _EIGHT, axis=1, bitorder="little") for eight in eights]
        return np.concatenate(packed)[: len(self.columns.a)]

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """Blocks of the same tables as one."""
        return cls(
            np.concatenate([block.rows for block in blocks]),
            blocks[0].columns,
            np.concatenate([block.bits for block in blocks]),
        )


class Scanner:
    """Reads both traces along their row pairs.

    One run leads and is read in its own order: the one whose neighbouring rows are more often of different requests, or that had
    more rows in a forward. A stretch of it then holds a few long runs of rows of the other, which the reverse would not.
    """

    def __init__(self, a: Trace, b: Trace, ports: CommonPorts, pairs: RowPairs) -> None:
        self._ports, self._pairs = ports, pairs
        self._sides = _SideDigests(a, pairs.a), _SideDigests(b, pairs.b)
        self._columns: dict[tuple[int, int], Columns] = {}
        self._differ = np.empty((0, 0), dtype=np.bool_)
        self._last: tuple[int, tuple[UInt64, UInt64], Block] | None = None

    def columns(self, table_a: int, table_b: int) -> Columns:
        """The column pairs of two tables."""
        found = self._columns.get((table_a, table_b))
        if found is None:
            a, b = self._sides
            found = self._ports.columns(a.trace.tables[table_a], b.trace.tables[table_b])
            self._columns[table_a, table_b] = found
        return found

    def blocks(self) -> Iterator[Block]:
        """Every row pair once; each block stays within a few tens of megabytes whatever the traces' size."""
        lead, order = self._leading()
        shard = self._sides[lead].shard[order]
        table_a, table_b = (side.table[order] for side in self._sides)
        bounds = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(shard)]
        try:
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
                tables = (table_a[start:stop].astype(np.int64) << 32) | table_b[start:stop]
                for both in distinct(tables).tolist():
                    columns = self.columns(both >> 32, both & _LOW)
                    rows = order[start:stop][tables == both]
                    step = columns.rows_in(_FAR_BYTES)
                    for first in range(0, len(rows), step):
                        yield self._block(rows[first : first + step], columns, lead)
        finally:
            for side in self._sides:
                side.files.close()

    def _leading(self) -> tuple[int, Int64]:
        """Which run leads, and the places of the row pairs in its order."""
        first = np.arange(len(self._pairs))
        if bool((self._pairs.b[1:] > self._pairs.b[:-1]).all()):
            return 0, first
        orders = first, in_order(self._pairs.b, len(self._sides[1].trace.row_index().request))
        changes, forwards = zip(
            *(
                [np.count_nonzero(np.diff(field[order])) for field in (self._pairs.request, side.forward)]
                for side, order in zip(self._sides, orders, strict=True)
            ),
            strict=True,
        )
        lead = int((changes[1], -forwards[1]) > (changes[0], -forwards[0]))
        return lead, orders[lead]

    def pair(self, row: int) -> Block:
        """One row pair alone."""
        return self._one(row)[1]

    def digests(self, row: int) -> tuple[UInt64, UInt64]:
        """The digests of one row pair in each run, uint64 [columns]."""
        return self._one(row)[0]

    def _one(self, row: int) -> tuple[tuple[UInt64, UInt64], Block]:
        # One row is asked for several times in turn.
        if self._last is None or self._last[0] != row:
            a, b = (side.one(row) for side in self._sides)
            columns = self.columns(*(int(side.table[row]) for side in self._sides))
            bits = columns.bits(columns.differ(a, b))
            self._last = row, (a[0], b[0]), Block(np.array([row]), columns, bits)
        return self._last[1:]

    def _block(self, rows: Int64, columns: Columns, lead: int) -> Block:
        # Memory that is asked for anew has to be found by the system, which takes as long as comparing it.
        if len(self._differ) < len(rows) or self._differ.shape[1] != len(columns.a):
            self._differ = np.empty((len(rows), len(columns.a)), dtype=np.bool_)
        differ = self._differ[: len(rows)]
        held, other = self._sides[lead], self._sides[1 - lead]
        step = columns.rows_in(_NEAR_BYTES)

        def compared(
            leading: UInt64, theirs: UInt64, out: NDArray[np.bool_] | None = None
        ) -> NDArray[np.bool_]:
            return columns.differ(theirs, leading, out) if lead else columns.differ(leading, theirs, out)

        starts = np.flatnonzero(held.apart(rows) | other.apart(rows)) + 1
        if len(starts) * _LONG <= len(rows):
            # What lies together is read a part at a time, which the processor's cache has while it is compared.
            for first, last in _parts(np.flatnonzero(held.apart(rows)) + 1, len(rows), step):
                leading = held.read(int(rows[first]), last - first)
                inside = starts[np.searchsorted(starts, first + 1) : np.searchsorted(starts, last)]
                for start, stop in pairwise((first, *inside.tolist(), last)):
                    theirs = other.read(int(rows[start]), stop - start)
                    compared(leading[start - first : stop - first], theirs, differ[start:stop])
        else:
            whole = held.digests(rows)
            for part in other.parts(rows, step):
                differ[part] = compared(whole[_as_slice(part)], other.digests(rows[part]))
        return Block(rows, columns, columns.bits(differ))


def _parts(starts: Int64, end: int, step: int) -> Iterator[tuple[int, int]]:
    """The first and the last place but one of stretches that begin at 0 and at ``starts``, in parts of ``step`` places."""
    for start, stop in pairwise((0, *starts.tolist(), end)):
        for first in range(start, stop, step):
            yield first, min(first + step, stop)


def _as_slice(places: Int64) -> slice | Int64:
    """Ascending places as a slice where they are equally far apart, so that nothing is copied."""
    if len(places) < 2:
        return places
    step = int(places[1] - places[0])
    if step < 1 or not bool((np.diff(places) == step).all()):
        return places
    return slice(int(places[0]), int(places[-1]) + 1, step)


class _SideDigests:
    """One run's half of the row pairs: ``forward``, ``shard``, ``table`` and ``place`` in its table, int32 [n] each."""

    def __init__(self, trace: Trace, rows: Int64) -> None:
        self.trace, self.rows = trace, rows
        index = trace.row_index()
        self.forward, self.shard, self.table, self.place = (
            field[rows] for field in (index.forward, index.shard, index.table, index.table_row)
        )
        self.files = FileReader()
        self._digests: tuple[Shard | None, int, Tensor | None] = (None, 0, None)
        self._buffer = np.empty((0, 0), dtype=np.uint64)

    def apart(self, rows: Int64) -> NDArray[np.bool_]:
        """Where the next of row pairs of one table does not follow in the same shard, bool [n - 1]."""
        place, shard = self.place[rows], self.shard[rows]
        return np.asarray((place[1:] - place[:-1] != 1) | (shard[1:] != shard[:-1]))

    def read(self, row: int, count: int) -> UInt64:
        """Digests of ``count`` rows that lie together, of which ``row`` is the first, uint64 [count, columns]; until the next call."""
        shard, table = self.trace.shards[self.shard[row]], self.table[row]
        known, of, tensor = self._digests
        if shard is not known or table != of or tensor is None:
            tensor = shard.tensors[f"digest/{table}"]
            self._digests = shard, int(table), tensor
        columns = tensor.shape[1]
        if len(self._buffer) < count or self._buffer.shape[1] != columns:
            self._buffer = np.empty((count, columns), dtype="<u8")
        found = self._buffer[:count]
        self.files.fill(shard.path, tensor.offset + int(self.place[row]) * columns * 8, found)
        return found

    def one(self, row: int) -> UInt64:
        """Digests of one row pair, uint64 [1, columns]."""
        place = int(self.place[row])
        return self.trace.fetch(int(self.shard[row]), int(self.table[row]), place, place + 1)

    def digests(self, rows: Int64) -> UInt64:
        """Digests of row pairs of one table, in the given order: uint64 [n, columns]."""
        if self.apart(rows).any():
            return self.trace.digests(self.rows[rows])
        # Rows that lie together need no gathering, which would copy them once more.
        return self.read(int(rows[0]), len(rows))

    def parts(self, rows: Int64, step: int) -> Iterator[Int64]:
        """Splits row pairs of one table, as places in ``rows``, so that what lies together in this run is one read."""
        order = np.argsort(self.rows[rows], kind="stable")
        starts = np.flatnonzero(self.apart(rows[order])) + 1
        if len(starts) * _LONG > len(rows):
            starts = starts[:0]
        for first, last in _parts(starts, len(order), step):
            yield order[first:last]


_ELEMENTS: Final = (
    1 << 20
)  # of one trace at a time; as float64 with its intermediate results a few tens of MB


class Distances:
    """ULPs and relative differences of row pairs, column by column of their tables."""

    def __init__(self, a: Trace, b: Trace, pairs: RowPairs) -> None:
        self._sides = _SideValues(a, pairs.a), _SideValues(b, pairs.b)
        self.known = all(bool(side.holding.any()) for side in self._sides)
        """Whether both traces hold values at all."""

    def of(self, rows: Int64, column_a: int, column_b: int) -> tuple[Float64, Float64] | None:
        """(largest ULP distance, largest relative difference) of row pairs of one pair of tables, float64 [n] each.

        NaN where not both traces hold the value; None where that is so for all.
        """
        a, b = self._sides
        shards = (a.shard[rows] << 32) | b.shard[rows]
        ulp, rel = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        some = False
        for both in np.unique(shards).tolist():
            if not (a.holding[both >> 32] and b.holding[both & _LOW]):
                continue
            here = np.flatnonzero(shards == both)
            place_a, place_b = a.places(rows[here], column_a), b.places(rows[here], column_b)
            held = (place_a >= 0) & (place_b >= 0)
            here, place_a, place_b = here[held], place_a[held], place_b[held]
            if not len(here):
                continue
            some = True
            first = rows[here[0]]
            step = max(1, _ELEMENTS // max(a.width(first, column_a), b.width(first, column_b)))
            for start in range(0, len(here), step):
                part = slice(start, start + step)
                ulp[here[part]], rel[here[part]] = row_distances(
                    a.values(first, column_a, place_a[part]), b.values(first, column_b, place_b[part])
                )
        return (ulp, rel) if some else None


class _SideValues:
    """One run's half of the row pairs: ``shard``, ``row`` in it and ``table``, int64 [n] each.

    ``holding`` bool [shards] says which shards have values.
    """

    def __init__(self, trace: Trace, rows: Int64) -> None:
        self._shards = trace.shards
        index = trace.row_index()
        self.shard, self.row, self.table = (
            field[rows].astype(np.int64) for field in (index.shard, index.row, index.table)
        )
        self.holding = np.array(
            [any(name.startswith("value/") for name in shard.tensors) for shard in trace.shards], dtype=bool
        )

    def places(self, rows: Int64, column: int) -> Int64:
        """Where the values of row pairs of one shard and table lie in their column, int64 [n]; -1 where they are not."""
        shard, table = self._of(int(rows[0]))
        kept = shard.value_rows(table, column).astype(np.int64)
        wanted = self.row[rows]
        found = np.searchsorted(kept, wanted)
        inside = np.append(kept, -1)[found] == wanted
        return np.where(inside, found, -1)

    def width(self, row: int, column: int) -> int:
        """How many elements the value of a row pair has."""
        shard, table = self._of(row)
        tensor = shard.tensors[f"value/{table}/{column}"]
        return int(np.prod(tensor.shape[1:], dtype=np.int64))

    def values(self, row: int, column: int, places: Int64) -> Values:
        """Values by their places in the column of a row pair's shard and table."""
        shard, table = self._of(row)
        dtype = shard.tensors[f"value/{table}/{column}"].dtype
        return Values(shard.values_at(table, column, places), dtype)

    def _of(self, row: int) -> tuple[Shard, int]:
        return self._shards[int(self.shard[row])], int(self.table[row])
