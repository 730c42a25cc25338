"""The memory that the callback of ``node_loops.py`` writes to, and what it wrote of the last batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import coefficients, digest_bias, head_weight, position_weight

from . import node_loops as loops
from .node_loops import (
    DISCOVER,
    EVENT_FIELDS,
    FINE,
    MODE,
    MOST_EVENTS,
    MOST_NODES,
    OFF,
    RECORD,
    STATE,
    Int64,
    UInt64,
    digest,
    on_node,
)


def node_hash(name: bytes, op: int) -> int:
    """What ``HASH`` has for a node: FNV-1a of its name's bytes and its operation, as int64."""
    found = 0xCBF29CE484222325
    for value in (*name, op):
        found = (found ^ value) * 0x100000001B3 % (1 << 64)
    return found - (1 << 64) if found >> 63 else found


@dataclass(frozen=True)
class RecordingSizes:
    """What a context is recorded with: rows of a batch at most, digest columns, cells of all streams, heads of keys and values of
    a layer, sequences, positions, layers with a cache, and bytes of the longest row."""

    rows: int
    columns: int
    cells: int
    heads: int
    sequences: int
    positions: int
    layers: int
    row_bytes: int


class NodeRecorder:
    """The memory that the callback writes to, and the callback itself.

    ``rows`` int64 [rows, 4] are the sequence and position of each row, which graph of the batch it was in, and its place in the batch;
    ``observed`` int64 [rows, 4] are the token, the position, whether logits were asked for and the stream that the row's entries went
    to, as the graph was told, or -1; ``digests`` uint64 [rows, columns]; ``events`` int64 [n, 7] (kind, layer, row or cell, head or cell
    or first missing position, position, owners or count, the digest that a changed entry had).
    """

    def __init__(self) -> None:
        self.state = np.zeros(STATE, np.int64)
        self._table = np.zeros(loops.FIELDS, np.int64)
        self._nodes = np.zeros(MOST_NODES, np.int64)
        self._events = np.zeros((MOST_EVENTS, EVENT_FIELDS), np.int64)
        self._point(loops.AT_STATE, self.state)
        self._point(loops.AT_NODES, self._nodes)
        self._point(loops.AT_EVENTS, self._events)
        self._kept: NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def function(self) -> int:
        """The callback's address."""
        return int(on_node.address)

    @property
    def user_data(self) -> int:
        """What the callback is to be given."""
        return int(self._table.ctypes.data)

    def _point(self, field_: int, array: NDArray[Any]) -> None:
        self._table[field_] = array.ctypes.data

    def discover(self) -> None:
        """Note the nodes of the next graph, and compute it as one."""
        self.state[MODE], self.state[loops.MADE] = DISCOVER, 0

    @property
    def nodes(self) -> list[int]:
        """Addresses of the nodes of the graph that was discovered; they are valid until the next batch."""
        return [int(each) for each in self._nodes[: self.state[loops.MADE]]]

    def address(self, node: int) -> int:
        """The address of a node of the graph that was recorded last, valid until the next batch."""
        return int(self._nodes[node])

    def off(self) -> None:
        """Let graphs be computed unseen."""
        self.state[MODE] = OFF

    def plan(self, plan: Int64, sizes: RecordingSizes, window: int, split: bool) -> None:
        """Record graphs of this ``plan`` int64 [nodes, WIDTH] from now on; nothing is in the cache."""
        self._plan, self.sizes = np.ascontiguousarray(plan), sizes
        self.rows = np.zeros((sizes.rows, 4), np.int64)
        self._batch = np.zeros((sizes.rows, 3), np.int64)
        self.observed = np.zeros((sizes.rows, 4), np.int64)
        self._outputs = np.zeros(sizes.rows, np.int64)
        self.digests = np.zeros((sizes.rows, sizes.columns), np.uint64)
        layers = max(1, sizes.layers)
        self.cells = np.full((layers, 2, sizes.cells), -1, np.int64)
        self.written = np.zeros((layers, sizes.cells, sizes.heads), np.uint64)
        self.terms = np.zeros((layers, sizes.sequences, sizes.positions), np.uint64)
        self.newest = np.full((layers, sizes.sequences, sizes.positions), -1, np.int64)
        self._position_weights = position_weight(np.arange(sizes.positions))
        self._head_weights = head_weight(np.arange(sizes.heads))
        self._coefficients = coefficients(sizes.row_bytes // 4 + 2)
        self._scratch = np.zeros(sizes.row_bytes + 64, np.uint8)
        self._keep = np.zeros(len(plan), np.int64)
        for place, array in (
            (loops.AT_PLAN, self._plan), (loops.AT_ROWS, self.rows), (loops.AT_OBSERVED, self.observed), (loops.AT_OUT, self._outputs),
            (loops.AT_DIGESTS, self.digests), (loops.AT_CELLS, self.cells), (loops.AT_WRITTEN, self.written), (loops.AT_TERMS, self.terms),
            (loops.AT_PW, self._position_weights), (loops.AT_HW, self._head_weights), (loops.AT_COEF, self._coefficients),
            (loops.AT_SCRATCH, self._scratch), (loops.AT_KEPT, self._keep),
            (loops.AT_BATCH, self._batch), (loops.AT_NEWEST, self.newest),
        ):  # fmt: skip
            self._point(place, array)
        self._table[loops.N_ROWS : loops.N_COEF + 1] = (
            sizes.rows, sizes.columns, sizes.cells, sizes.heads, sizes.sequences, sizes.positions, len(self._coefficients),
        )  # fmt: skip
        self.state[loops.WINDOW], self.state[loops.SPLIT], self.state[loops.PLANNED] = (
            window,
            int(split),
            len(plan),
        )

    def begin(self, rows: Int64, kept: NDArray[np.bool_] | None = None) -> None:
        """Record the next batch, of ``rows`` int64 [n, 2] (sequence, position); ``kept`` bool [nodes] says whose values stay."""
        self.state[[loops.NODE, loops.ROW, loops.COUNT, loops.GRAPHS, loops.TROUBLE, loops.EVENTS]] = 0
        self.state[MODE] = RECORD
        self.rows[: len(rows), :2] = rows
        self.rows[: len(rows), 3] = np.arange(len(rows))
        self._batch[: len(rows), :2], self._batch[: len(rows), 2] = rows, 0
        self._table[loops.N_BATCH] = len(rows)
        self.observed[: len(rows)] = (-1, -1, 0, -1)
        self._keep[:] = 0
        if kept is not None and kept.any():
            sizes = self._plan[:, loops.KEEP] * kept
            starts = np.cumsum(sizes * len(rows)) - sizes * len(rows)
            self._kept = np.zeros(int((sizes * len(rows)).sum()), np.uint8)
            self._starts = starts
            self._keep[kept] = self._kept.ctypes.data + starts[kept]

    @property
    def whole(self) -> bool:
        """Whether every row of the last batch was seen in a graph of the plan."""
        state = self.state
        rows = state[loops.ROW] + state[loops.COUNT] == self._table[loops.N_BATCH]
        return bool(rows and state[loops.TROUBLE] == FINE and state[loops.NODE] == state[loops.PLANNED])

    def values(self, node: int, count: int) -> NDArray[np.uint8]:
        """The bytes [count, row bytes] of a kept node's rows."""
        size, start = int(self._plan[node, loops.KEEP]), int(self._starts[node])
        return self._kept[start : start + size * count].reshape(count, size)

    @property
    def events(self) -> Int64:
        """What was noticed in the last batch, at most MOST_EVENTS of it."""
        return self._events[: min(int(self.state[loops.EVENTS]), MOST_EVENTS)]

    def forget(self, sequence: int) -> None:
        """A sequence was taken out of the cache. Its cells keep whose they were, with -2 - position where they had a position."""
        bit = np.int64(1) << sequence
        positions, owners = self.cells[:, 0], self.cells[:, 1]
        mine = (positions >= 0) & (owners == bit)
        positions[mine] = -2 - positions[mine]
        owners[(positions >= 0) & (owners & bit != 0)] &= ~bit
        self.rewind(sequence, 0)

    def rewind(self, sequence: int, start: int) -> None:
        """A sequence's positions from ``start`` on were taken out of the cache. Their cells keep whose they were, and hold no entry."""
        self.terms[:, sequence, start:], self.newest[:, sequence, start:] = 0, -1


def digest_floats(address: int, count: int, coef: UInt64) -> int:
    """The digest of ``count`` float32 at an address; ``coef`` are as many coefficients, or more."""
    return int(digest(address, count * 4, coef, np.uint64(digest_bias("F32", count * 4))))
