"""The digests of paired rows, a bounded block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Trace

from .ports import Columns, CommonPorts
from .rows import RowPairs

Int64 = NDArray[np.int64]

_NEAR_BYTES: Final = 1 << 20  # of one trace: what was read is compared while the processor's cache has it
_FAR_BYTES: Final = 16 << 20  # of run A, kept at hand where run B has its rows in another order
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
    """Reads both traces along their row pairs."""

    def __init__(self, a: Trace, b: Trace, ports: CommonPorts, pairs: RowPairs) -> None:
        self._a, self._b = a, b
        self._ports = ports
        self._pairs = pairs
        self._columns: dict[tuple[int, int], Columns] = {}

    def columns(self, table_a: int, table_b: int) -> Columns:
        """The column pairs of two tables."""
        found = self._columns.get((table_a, table_b))
        if found is None:
            found = self._ports.columns(self._a.tables[table_a], self._b.tables[table_b])
            self._columns[table_a, table_b] = found
        return found

    def blocks(self) -> Iterator[Block]:
        """Every row pair once; each block stays within a few tens of megabytes whatever the traces' size."""
        rows_a, rows_b = self._a.row_index(), self._b.row_index()
        shard = rows_a.shard[self._pairs.a]
        bounds = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(shard)]
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            table_a = rows_a.table[self._pairs.a[start:stop]].astype(np.int64)
            table_b = rows_b.table[self._pairs.b[start:stop]].astype(np.int64)
            tables = (table_a << 32) | table_b
            for both in np.unique(tables).tolist():
                columns = self.columns(both >> 32, both & 0xFFFFFFFF)
                rows = start + np.flatnonzero(tables == both)
                far = len(_runs(self._b, self._pairs.b[rows])) > 1
                step = columns.rows_in(_FAR_BYTES if far else _NEAR_BYTES)
                for first in range(0, len(rows), step):
                    yield self._block(rows[first : first + step], columns)

    def pair(self, row: int) -> Block:
        """One row pair alone."""
        table_a = int(self._a.row_index().table[self._pairs.a[row]])
        table_b = int(self._b.row_index().table[self._pairs.b[row]])
        return self._block(np.array([row]), self.columns(table_a, table_b))

    def _block(self, rows: Int64, columns: Columns) -> Block:
        left = _digests(self._a, self._pairs.a[rows])
        step = columns.rows_in(_NEAR_BYTES)
        if len(rows) <= step:
            return Block(rows, columns, columns.differ(left, _digests(self._b, self._pairs.b[rows])))
        # Run B is read in its own order, so that rows that lie together there are one read.
        order = np.argsort(self._pairs.b[rows], kind="stable")
        rows_b = self._pairs.b[rows[order]]
        runs = _runs(self._b, rows_b)
        if len(runs) * _LONG > len(rows):
            runs = [0]
        bits = np.empty((len(rows), columns.words), dtype=np.uint64)
        for start, stop in zip(runs, [*runs[1:], len(rows)], strict=True):
            for first in range(start, stop, step):
                part = slice(first, min(first + step, stop))
                bits[order[part]] = columns.differ(left[order[part]], _digests(self._b, rows_b[part]))
        return Block(rows, columns, bits)


def _runs(trace: Trace, rows: Int64) -> list[int]:
    """Where runs of rows begin that lie together in one shard."""
    index = trace.row_index()
    apart = (np.diff(index.table_row[rows]) != 1) | (np.diff(index.shard[rows]) != 0)
    return [0, *(np.flatnonzero(apart) + 1).tolist()]


def _digests(trace: Trace, rows: Int64) -> NDArray[np.uint64]:
    """Digests of rows that share one table, in the given order: uint64 [n, columns]."""
    if len(_runs(trace, rows)) > 1:
        return trace.digests(rows)
    # Rows that lie together need no gathering, which would copy them once more.
    index, first = trace.row_index(), rows[0]
    start = int(index.table_row[first])
    return trace.fetch(int(index.shard[first]), int(index.table[first]), start, start + len(rows))
