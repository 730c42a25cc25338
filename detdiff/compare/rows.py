"""Which rows of two traces belong together: by model, request and position, the last write of each position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import NothingComparable
from detdiff.trace import PHASES, RowIndex, Trace

from .divergence import Finding
from .events import reused
from .requests import RequestPair

Int64 = NDArray[np.int64]

_LISTED = 8


@dataclass(frozen=True, eq=False)
class RowPairs:
    """Rows to compare, in run A's execution order: int64 [n] each.

    ``request`` is the place among the compared requests; ``stream`` is that for rows of the target, and more by the
    number of ``requests`` for rows of the draft; ``streams`` is how many there are. ``a`` and ``b`` index each trace's
    ``rows``.
    ``lacking`` int64 [requests] counts rows that fed or chose a common token and that only one run has.
    """

    request: Int64
    stream: Int64
    requests: int
    streams: int
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
    """Align by (model, request, position). Raises NothingComparable where no row is left."""
    limits = _Limits.of(requests)
    drafts = same_drafts(a, b)
    side_a = _surviving(a.row_index(), [pair.a for pair in requests], limits, drafts)
    side_b = _surviving(b.row_index(), [pair.b for pair in requests], limits, drafts)
    # Keys ascend on both sides, so looking one up in the other is cheaper than sorting both together.
    found = np.searchsorted(side_b.key, side_a.key)
    common = np.append(side_b.key, -1)[found] == side_a.key
    at_a, at_b = np.flatnonzero(common), found[common]
    rows_a, rows_b = side_a.row[at_a], side_b.row[at_b]
    same = a.row_index().token[rows_a] == b.row_index().token[rows_b]
    findings = _token_findings(a, b, requests, rows_a[~same], rows_b[~same])
    stream = (side_a.key[at_a] >> 32)[same]
    position = (side_a.key[at_a] & 0xFFFFFFFF)[same]
    rows_a, rows_b = rows_a[same], rows_b[same]
    if not len(rows_a):
        raise NothingComparable(_no_row(a, b, len(same)))
    order = np.argsort(rows_a, kind="stable")
    return RowPairs(
        request=(stream % len(requests))[order],
        stream=stream[order],
        requests=len(requests),
        streams=2 * len(requests) if len(stream) and int(stream.max()) >= len(requests) else len(requests),
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
        lacking=_lacking(
            requests,
            _not_reused(side_a.key[~common], b, [pair.b for pair in requests]),
            _not_reused(np.delete(side_b.key, at_b), a, [pair.a for pair in requests]),
        ),
        findings=findings,
    )


@dataclass(frozen=True, eq=False)
class _Side:
    """One trace's surviving rows up to each flip: ``key`` = stream << 32 | position, ascending."""

    key: Int64
    row: Int64
    superseded: int
    after: int


@dataclass(frozen=True, eq=False)
class _Limits:
    """The last position to compare of each request, int64 [requests]: of ``all`` rows, and of those that ``speculate``.

    A rejected proposal is written over by the token that took its place, but not where a request ends.
    """

    all: Int64
    speculate: Int64

    @classmethod
    def of(cls, requests: tuple[RequestPair, ...]) -> _Limits:
        limits = np.array([pair.limit for pair in requests], dtype=np.int64)
        return cls(limits, np.minimum(limits, _last_needed(requests)))


def same_drafts(a: Trace, b: Trace) -> bool:
    """Whether the rows of draft models can be compared: both runs have one, and nothing says that it is another."""
    of_a, of_b = a.header.get("draft"), b.header.get("draft")
    if not (isinstance(of_a, dict) and isinstance(of_b, dict)):
        return False
    return all(
        None in (found := (of_a.get(key), of_b.get(key))) or found[0] == found[1]
        for key in ("config_sha256", "weights_sha256")
    )


def _surviving(rows: RowIndex, numbers: list[int], limits: _Limits, drafts: bool) -> _Side:
    place = np.full(max(int(rows.request.max(initial=0)), *numbers) + 1, -1, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))
    of_row = place[rows.request]
    drafted = rows.phase == PHASES.index("draft")
    of_row = np.where(drafted & (of_row >= 0), of_row + len(numbers) if drafts else -1, of_row)
    mine = np.flatnonzero(of_row >= 0)
    key = (of_row[mine] << 32) | rows.position[mine].astype(np.int64)
    # Of rows with one key the last in execution order survives: search the reversed array.
    unique, last = np.unique(key[::-1], return_index=True)
    row = mine[len(mine) - 1 - last]
    request, position = (unique >> 32) % len(numbers), unique & 0xFFFFFFFF
    speculative = drafted[row] | (rows.phase[row] == PHASES.index("verify"))
    rejected = speculative & (position > limits.speculate[request]) & (position <= limits.all[request])
    after = position > limits.all[request]
    inside = ~(rejected | after)
    superseded = len(mine) - len(unique) + int(np.count_nonzero(rejected))
    return _Side(unique[inside], row[inside], superseded, int(np.count_nonzero(after)))


def _not_reused(keys: Int64, lacks: Trace, numbers: list[int]) -> Int64:
    """Of rows that a trace lacks those that it did not take over from another request.

    Taken over entries are compared where the request's own rows read them.
    """
    taken = reused(lacks)
    if not taken:
        return keys
    first_own = np.array([taken.get(number, 0) for number in numbers], dtype=np.int64)
    own: Int64 = keys[(keys & 0xFFFFFFFF) >= first_own[(keys >> 32) % len(numbers)]]
    return own


def _last_needed(requests: tuple[RequestPair, ...]) -> Int64:
    """The position of the row that chose each request's last common token; engines may run one row more."""
    return np.array(
        [r.prompt + max(1, min(len(r.steps_a), len(r.steps_b))) - 2 for r in requests], dtype=np.int64
    )


def _lacking(requests: tuple[RequestPair, ...], *one_sided_rows: Int64) -> Int64:
    one_sided = np.concatenate(one_sided_rows)
    one_sided = one_sided[(one_sided >> 32) < len(requests)]
    request = one_sided >> 32
    needed = (one_sided & 0xFFFFFFFF) <= _last_needed(requests)[request]
    counts: Int64 = np.bincount(request[needed], minlength=len(requests)).astype(np.int64)
    return counts


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
