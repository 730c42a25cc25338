"""The rules about what arrays of a trace may say; the writer keeps them and the reader checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import GeneratedError, RowError, TableError
from detdiff.trace.rows import PHASES, Generated, Int32

ROW_FIELDS = ("request", "position", "forward", "slot", "phase", "token")
GEN_FIELDS = ("request", "index", "token", "forward", "position")
_ANY = 1 << 31


@dataclass(frozen=True)
class Limits:
    """How many requests, forwards and ports exist."""

    requests: int
    forwards: int
    ports: int


def check_rows(where: str, rows: Mapping[str, Int32], limits: Limits) -> None:
    """Raises RowError for a field out of range or forwards that go back."""
    above = {"request": limits.requests, "forward": limits.forwards, "phase": len(PHASES)}
    for name in ROW_FIELDS:
        bad = _outside(rows[name], above.get(name, _ANY))
        if bad is not None:
            raise RowError(
                f"{where} has a row with {name} {bad}; expected 0 to {above.get(name, _ANY) - 1}. The trace "
                "is damaged or was recorded by a faulty recorder: record it again."
            )
    forward = rows["forward"]
    if len(forward) > 1 and bool((forward[1:] < forward[:-1]).any()):
        raise RowError(
            f"{where} has rows of an earlier forward after rows of a later one; expected execution order. "
            "Record the trace again."
        )


def check_table(where: str, table: Int32, columns: int, limits: Limits) -> None:
    """Raises TableError unless every port has a column or -1, and every column a port."""
    if len(table) != limits.ports:
        raise TableError(
            f"{where} has {len(table)} ports; expected the {limits.ports} ports of the trace's sites. Record "
            "the trace again."
        )
    used = np.unique(table[table != -1])
    if len(used) != columns or not np.array_equal(used, np.arange(columns)):
        raise TableError(
            f"{where} sends ports to the columns {_short(used)}; expected each of 0 to {columns - 1} at "
            "least once and -1 for absent ports. Record the trace again."
        )


def check_generated(where: str, generated: Generated, limits: Limits) -> None:
    """Raises GeneratedError for a field out of range or top logits out of order."""
    above = {"request": limits.requests, "forward": limits.forwards}
    for name in (*GEN_FIELDS, "top_ids"):
        bad = _outside(getattr(generated, name), above.get(name, _ANY))
        if bad is not None:
            raise GeneratedError(
                f"{where} has a generated token with {name} {bad}; expected 0 to "
                f"{above.get(name, _ANY) - 1}. The trace is damaged or was recorded by a faulty recorder: "
                "record it again."
            )
    ids, logits = generated.top_ids, generated.top_logits
    rises = logits[:, 1:] > logits[:, :-1]
    ties = (logits[:, 1:] == logits[:, :-1]) & (ids[:, 1:] <= ids[:, :-1])
    if bool((rises | ties).any()):
        place = int(np.flatnonzero((rises | ties).any(axis=1))[0])
        raise GeneratedError(
            f"{where} has top logits {_short(logits[place])} of the ids {_short(ids[place])}; expected "
            "descending logits, equal ones by lower id. Record the trace again."
        )


def check_unique(where: str, tokens: list[tuple[Int32, Int32]]) -> None:
    """Raises GeneratedError when one (request, index) occurs twice in ``tokens``."""
    keys = [request.astype(np.int64) << 32 | index for request, index in tokens]
    found, counts = np.unique(np.concatenate(keys), return_counts=True)
    if bool((counts > 1).any()):
        key = int(found[counts > 1][0])
        raise GeneratedError(
            f"{where} has token {key & 0xFFFFFFFF} of request {key >> 32} although it was generated before; "
            "expected every index once. Record the trace again."
        )


def _outside(array: NDArray[Any], above: int) -> int | None:
    if not array.size:
        return None
    low, high = int(array.min()), int(array.max())
    return low if low < 0 else high if high >= above else None


def _short(array: NDArray[Any]) -> str:
    return np.array2string(array, threshold=8, edgeitems=3, separator=", ").replace("\n", "")
