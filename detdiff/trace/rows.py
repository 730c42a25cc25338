"""What the recorder hands to a writer and a reader hands back: rows, values and generated tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt64 = NDArray[np.uint64]

PHASES = ("prefill", "decode", "draft", "verify")
"""Phase names; ``row.phase`` is an index into this."""


@dataclass(frozen=True, eq=False)
class Value:
    """Captured values of one column.

    ``rows`` int32 [m] ascending: rows of the batch (when written) or of the shard (when read);
    ``data`` [m, ...] in storage form (BF16 is uint16 bits); ``dtype`` a name in ``DTYPE_CODES``.
    """

    rows: Int32
    data: NDArray[Any]
    dtype: str


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of rows that share one table, in execution order.

    ``request``, ``position``, ``forward``, ``slot``, ``phase`` (index into PHASES), ``token`` (input id):
    int32 [n]. ``table`` has one int per port: its column of ``digests`` or -1 = absent.
    ``digests`` is uint64 [n, columns]. ``values`` maps a column to its captured values.
    """

    request: Int32
    position: Int32
    forward: Int32
    slot: Int32
    phase: Int32
    token: Int32
    table: tuple[int, ...]
    digests: UInt64
    values: Mapping[int, Value] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Lens:
    """Each layer's logits: ``top_ids`` int32 and ``top_logits`` float32 [g, layers, k], ``contested``
    float32 [g, layers, 2] = that layer's logits of the final top two."""

    top_ids: Int32
    top_logits: Float32
    contested: Float32


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated tokens: int32 [g] each, ``top_ids`` int32 [g, k] and ``top_logits`` float32 [g, k],
    descending, equal logits by lower id.

    ``index`` counts the generated tokens of a request from 0; ``position`` is the row that produced it.
    """

    request: Int32
    index: Int32
    token: Int32
    forward: Int32
    position: Int32
    top_ids: Int32
    top_logits: Float32
    lens: Lens | None = None


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Every row of a trace, in execution order: int32 [n] each.

    ``shard`` and ``row`` say where it is stored, ``table`` which table holds its ports, and ``table_row``
    which row of that shard's ``digest/<table>`` has its digests.
    """

    request: Int32
    position: Int32
    forward: Int32
    slot: Int32
    phase: Int32
    token: Int32
    shard: Int32
    row: Int32
    table: Int32
    table_row: Int32
