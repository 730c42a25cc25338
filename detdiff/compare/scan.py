"""The digests of paired rows, a bounded block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Trace

from .ports import Columns, CommonPorts
from .rows import RowPairs

Int64 = NDArray[np.int64]

_READ_BYTES: Final = (
    1 << 20
)  # of one trace: what was read is compared while it is still in the processor's cache
_THREADS: Final = 2
_BLOCK_BYTES: Final = 8 << 20  # of answers, a byte for each pair of digests


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of one pair of tables: ``rows`` int64 [n] are places in RowPairs, ``differ`` bool [n, column pairs]."""

    rows: Int64
    columns: Columns
    differ: NDArray[np.bool_]

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """Blocks of the same tables as one."""
        return cls(
            np.concatenate([block.rows for block in blocks]),
            blocks[0].columns,
            np.concatenate([block.differ for block in blocks]),
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
                step = max(1, _BLOCK_BYTES // max(1, len(columns.a)))
                for first in range(0, len(rows), step):
                    yield self._block(rows[first : first + step], columns)

    def pair(self, row: int) -> Block:
        """One row pair alone."""
        table_a = int(self._a.row_index().table[self._pairs.a[row]])
        table_b = int(self._b.row_index().table[self._pairs.b[row]])
        return self._block(np.array([row]), self.columns(table_a, table_b))

    def _block(self, rows: Int64, columns: Columns) -> Block:
        differ = np.empty((len(rows), len(columns.a)), dtype=np.bool_)
        step = max(1, _READ_BYTES // (8 * max(1, len(columns.a))))

        def compare(first: int) -> None:
            part = rows[first : first + step]
            left, right = _digests(self._a, self._pairs.a[part]), _digests(self._b, self._pairs.b[part])
            columns.differ(left, right, differ[first : first + step])

        if len(rows) <= step:
            compare(0)
        else:
            # Reading and comparing let go of the interpreter, so two threads take two processors.
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(compare, range(0, len(rows), step)))
        return Block(rows, columns, differ)


def _digests(trace: Trace, rows: Int64) -> NDArray[np.uint64]:
    """Digests of rows that share one table, in the given order: uint64 [n, columns]."""
    index = trace.row_index()
    shards, places = index.shard[rows], index.table_row[rows]
    if bool((shards == shards[0]).all()) and bool((np.diff(places) == 1).all()):
        # Consecutive rows need no gathering, which would copy them once more.
        first = int(places[0])
        return trace.shard(int(shards[0])).digests(int(index.table[rows[0]]), first, first + len(places))
    return trace.digests(rows)
