"""The rules about what arrays of a trace may say; the writer keeps them and the reader checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import GeneratedError, LacksError, RowError, TableError
from detdiff.trace.rows import PHASES, Generated, Int32
from detdiff.trace.site import Site

ROW_FIELDS = ("request", "position", "forward", "slot", "phase", "token")
GEN_FIELDS = ("request", "index", "token", "forward", "position")
_ANY = 1 << 31
OUTER_KINDS = ("tokens", "log_probability")
"""Kinds of sites that stand for no place in a model: what was fed, and what is known of the answer."""


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


def check_lacking_sites(where: str, header: Mapping[str, Any], sites: Sequence[Site]) -> None:
    """Raises LacksError for a site of the model in a trace that says that it has none, and for a prompt of a text-only
    trace that is no text."""
    lacks = header.get("lacks", {})
    inner = next((site.name for site in sites if site.kind not in OUTER_KINDS), None)
    if "sites" in lacks and inner is not None:
        raise LacksError(
            f"{where} says that it lacks sites ({lacks['sites']}) and lists {inner!r}; expected only sites of the kinds "
            f"{' and '.join(OUTER_KINDS)}. Record the trace again."
        )
    for request in header["requests"]:
        _code_points(where, lacks, np.array(request["tokens"], np.int64))


def check_lacking(where: str, lacks: Mapping[str, str], generated: Generated) -> None:
    """Raises LacksError unless top logits are missing just where the header says so, and tokens of a text-only trace are
    code points."""
    if ("logits" in lacks) != (generated.top_ids.shape[1] == 0):
        raise LacksError(
            f"{where} has {generated.top_ids.shape[1]} top logits a token, and the header says that they are "
            f"{'missing' if 'logits' in lacks else 'there'}; expected the two to agree. Record the trace again."
        )
    _code_points(where, lacks, generated.token)


def _code_points(where: str, lacks: Mapping[str, str], tokens: NDArray[Any]) -> None:
    wrong = tokens[(tokens > 0x10FFFF) | ((tokens >= 0xD800) & (tokens < 0xE000))]
    if "tokens" in lacks and len(wrong):
        raise LacksError(
            f"{where} says that it lacks tokens ({lacks['tokens']}) and has the id {int(wrong[0])}; expected code points of "
            "its text. Record the trace again."
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
