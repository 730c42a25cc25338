"""The digests and values of paired rows, a bounded part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Shard, Trace

from .alignment import Columns, CommonPorts, RowPairs
from .metrics import Values, row_distances

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

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

    One run leads and is read in its own order: the one whose neighbouring rows are more often of different requests.
    A stretch of it then holds a few long runs of rows of the other, which the reverse would not.
    """

    def __init__(self, a: Trace, b: Trace, ports: CommonPorts, pairs: RowPairs) -> None:
        self._ports, self._pairs = ports, pairs
        self._sides = (_SideDigests(a, pairs.a), _SideDigests(b, pairs.b))
        self._columns: dict[tuple[int, int], Columns] = {}

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
        orders = [np.argsort(side.rows, kind="stable") for side in self._sides]
        changes = [np.count_nonzero(np.diff(self._pairs.request[order])) for order in orders]
        lead = int(changes[1] > changes[0])
        order, other = orders[lead], self._sides[1 - lead]
        shard = self._sides[lead].shard[order]
        tables = (self._sides[0].table[order] << 32) | self._sides[1].table[order]
        bounds = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(shard)]
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            for both in np.unique(tables[start:stop]).tolist():
                columns = self.columns(both >> 32, both & 0xFFFFFFFF)
                rows = order[start:stop][tables[start:stop] == both]
                step = columns.rows_in(_NEAR_BYTES if other.together(rows) else _FAR_BYTES)
                for first in range(0, len(rows), step):
                    yield self._block(rows[first : first + step], columns, lead)

    def pair(self, row: int) -> Block:
        """One row pair alone."""
        a, b = self._sides
        return self._block(np.array([row]), self.columns(int(a.table[row]), int(b.table[row])), 0)

    def _block(self, rows: Int64, columns: Columns, lead: int) -> Block:
        held, other = self._sides[lead].digests(rows), self._sides[1 - lead]
        step = columns.rows_in(_NEAR_BYTES)
        if len(rows) <= step:
            return Block(rows, columns, _bits(columns, held, other.digests(rows), lead))
        bits = np.empty((len(rows), columns.words), dtype=np.uint64)
        for part in other.parts(rows, step):
            bits[part] = _bits(columns, held[part], other.digests(rows[part]), lead)
        return Block(rows, columns, bits)


class _SideDigests:
    """One run's half of the row pairs: ``shard``, ``table`` and ``place`` in its table, int64 [n] each."""

    def __init__(self, trace: Trace, rows: Int64) -> None:
        self.trace, self.rows = trace, rows
        index = trace.row_index()
        self.shard, self.table, self.place = (
            field[rows].astype(np.int64) for field in (index.shard, index.table, index.table_row)
        )

    def together(self, rows: Int64) -> bool:
        """Whether row pairs of one table follow each other in one shard."""
        place, shard = self.place[rows], self.shard[rows]
        return bool((place[1:] - place[:-1] == 1).all() and (shard == shard[0]).all())

    def digests(self, rows: Int64) -> NDArray[np.uint64]:
        """Digests of row pairs of one table, in the given order: uint64 [n, columns]."""
        if not self.together(rows):
            return self.trace.digests(self.rows[rows])
        # Rows that lie together need no gathering, which would copy them once more.
        first = rows[0]
        start = int(self.place[first])
        return self.trace.fetch(int(self.shard[first]), int(self.table[first]), start, start + len(rows))

    def parts(self, rows: Int64, step: int) -> Iterator[Int64]:
        """Splits row pairs of one table, as places in ``rows``, so that what lies together in this run is one read."""
        order = np.argsort(self.rows[rows], kind="stable")
        place, shard = self.place[rows[order]], self.shard[rows[order]]
        starts = np.flatnonzero((np.diff(place) != 1) | (np.diff(shard) != 0)) + 1
        if len(starts) * _LONG > len(rows):
            starts = starts[:0]
        for run in np.split(order, starts):
            yield from np.split(run, range(step, len(run), step))


def _bits(
    columns: Columns, leading: NDArray[np.uint64], other: NDArray[np.uint64], lead: int
) -> NDArray[np.uint64]:
    return columns.differ(other, leading) if lead else columns.differ(leading, other)


_LOW: Final = (1 << 32) - 1
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
