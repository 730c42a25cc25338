"""Which rows of two traces belong together: by request and position, the last write of each position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import NothingComparable
from detdiff.trace import RowIndex, Trace

from .divergence import Finding
from .requests import RequestPair

Int64 = NDArray[np.int64]

_LISTED = 8


@dataclass(frozen=True, eq=False)
class RowPairs:
    """Rows to compare, in run A's execution order: int64 [n] each.

    ``request`` is the place among the compared requests; ``a`` and ``b`` index each trace's ``rows``.
    ``lacking`` int64 [requests] counts rows that fed or chose a common token and that only one run has.
    """

    request: Int64
    position: Int64
    a: Int64
    b: Int64
    only_a: int
    only_b: int
    superseded_a: int
    superseded_b: int
    after_flip_a: int
    after_flip_b: int
    token_differs: int
    lacking: Int64
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.a)


def pair_rows(a: Trace, b: Trace, requests: tuple[RequestPair, ...]) -> RowPairs:
    """Align by (request, position). Raises NothingComparable where no row is left."""
    limits = np.array([pair.limit for pair in requests], dtype=np.int64)
    side_a = _surviving(a.row_index(), [pair.a for pair in requests], limits)
    side_b = _surviving(b.row_index(), [pair.b for pair in requests], limits)
    # Keys ascend on both sides, so looking one up in the other is cheaper than sorting both together.
    found = np.searchsorted(side_b.key, side_a.key)
    common = np.append(side_b.key, -1)[found] == side_a.key
    at_a, at_b = np.flatnonzero(common), found[common]
    rows_a, rows_b = side_a.row[at_a], side_b.row[at_b]
    same = a.row_index().token[rows_a] == b.row_index().token[rows_b]
    findings = _token_findings(a, b, requests, rows_a[~same], rows_b[~same])
    request = (side_a.key[at_a] >> 32)[same]
    position = (side_a.key[at_a] & 0xFFFFFFFF)[same]
    rows_a, rows_b = rows_a[same], rows_b[same]
    if not len(rows_a):
        raise NothingComparable(_no_row(a, b, len(same)))
    order = np.argsort(rows_a, kind="stable")
    return RowPairs(
        request=request[order],
        position=position[order],
        a=rows_a[order],
        b=rows_b[order],
        only_a=len(side_a.key) - len(at_a),
        only_b=len(side_b.key) - len(at_b),
        superseded_a=side_a.superseded,
        superseded_b=side_b.superseded,
        after_flip_a=side_a.after,
        after_flip_b=side_b.after,
        token_differs=int(np.count_nonzero(~same)),
        lacking=_lacking(requests, np.concatenate([side_a.key[~common], np.delete(side_b.key, at_b)])),
        findings=findings,
    )


@dataclass(frozen=True, eq=False)
class _Side:
    """One trace's surviving rows up to each flip: ``key`` = request place << 32 | position, ascending."""

    key: Int64
    row: Int64
    superseded: int
    after: int


def _surviving(rows: RowIndex, numbers: list[int], limits: Int64) -> _Side:
    place = np.full(max(int(rows.request.max(initial=0)), *numbers) + 1, -1, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))
    of_row = place[rows.request]
    mine = np.flatnonzero(of_row >= 0)
    key = (of_row[mine] << 32) | rows.position[mine].astype(np.int64)
    # Of rows with one key the last in execution order survives: search the reversed array.
    unique, last = np.unique(key[::-1], return_index=True)
    row = mine[len(mine) - 1 - last]
    inside = (unique & 0xFFFFFFFF) <= limits[unique >> 32]
    return _Side(unique[inside], row[inside], len(mine) - len(unique), int(np.count_nonzero(~inside)))


def _lacking(requests: tuple[RequestPair, ...], one_sided: Int64) -> Int64:
    # The last common token is chosen by the row at prompt + tokens - 2 (counted from 0); engines may run one row more.
    last = np.array(
        [r.prompt + max(1, min(len(r.steps_a), len(r.steps_b))) - 2 for r in requests], dtype=np.int64
    )
    request = one_sided >> 32
    needed = (one_sided & 0xFFFFFFFF) <= last[request]
    return np.bincount(request[needed], minlength=len(requests)).astype(np.int64)


def _token_findings(
    a: Trace, b: Trace, requests: tuple[RequestPair, ...], rows_a: Int64, rows_b: Int64
) -> tuple[Finding, ...]:
    ids = {pair.a: pair.id for pair in requests}
    found = []
    order = np.argsort(rows_a, kind="stable")
    for row_a, row_b in zip(rows_a[order][:_LISTED].tolist(), rows_b[order][:_LISTED].tolist(), strict=True):
        position = int(a.row_index().position[row_a])
        detail = (
            f"position {position} was fed token {int(a.row_index().token[row_a])} in run a and "
            f"{int(b.row_index().token[row_b])} in run b, though no generated token before it differs"
        )
        forward = int(a.row_index().forward[row_a])
        found.append(Finding("both", "token_in", ids[int(a.row_index().request[row_a])], forward, detail))
    if len(order) > _LISTED:
        detail = f"{len(order) - _LISTED} more rows were fed different tokens"
        found.append(Finding("both", "token_in", None, None, detail))
    return tuple(found)


def _no_row(a: Trace, b: Trace, other_tokens: int) -> str:
    for trace, run in ((a, "a"), (b, "b")):
        if not len(trace.row_index().request):
            if trace.header["complete"] and trace.problems:
                return (
                    f"What is left of run {run} ({trace.path}) holds no rows; expected at least one forward. "
                    f"{trace.problems[0]}"
                )
            return (
                f"Run {run} ({trace.path}) holds no rows; expected at least one forward. The run ended before its "
                "first shard was written, or recorded nothing. Record it again."
            )
    if other_tokens:
        return (
            f"All {other_tokens} rows that run a ({a.path}) and run b ({b.path}) share were fed different tokens. "
            "Expected rows with the same input. Check that both engines feed the tokens of their own requests."
        )
    return (
        f"Run a ({a.path}) and run b ({b.path}) have requests but no row in common. Expected rows of the same request "
        "and position. Record both runs to the end."
    )
