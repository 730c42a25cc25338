"""How far the values of many row pairs are apart, read a bounded part at a time, where both traces hold them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Shard, Trace

from .metrics import Values, row_distances
from .rows import RowPairs

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_LOW: Final = (1 << 32) - 1
_ELEMENTS: Final = (
    1 << 20
)  # of one trace at a time; as float64 with its intermediate results a few tens of MB


class Distances:
    """ULPs and relative differences of row pairs, column by column of their tables."""

    def __init__(self, a: Trace, b: Trace, pairs: RowPairs) -> None:
        self._sides = _Side(a, pairs.a), _Side(b, pairs.b)
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


class _Side:
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
