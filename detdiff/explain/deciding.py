"""The row that decides on each side: the flip's, found in the traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detdiff.trace import Trace

from .case import Case, Side
from .control import CannotRun

TARGET = "target"
"""The model of a forward that names none."""


@dataclass(frozen=True)
class DecidingRow:
    """The deciding row of a side: its request, position and forward; ``index`` is the token it chooses, None where the
    row's bits are asked for instead."""

    request: int
    position: int
    forward: int
    index: int | None


def deciding_row(case: Case, side: Side) -> DecidingRow:
    """The flip's row of the focus; without a flip its last compared row whose logits differ, or the very last one.

    Raises CannotRun where a side has none.
    """
    request, trace = case.focus, case.trace(side)
    number = case.number(side, request.id)
    if request.flip is not None:
        forward = request.flip.forward_a if side == "a" else request.flip.forward_b
        if forward is None:
            raise CannotRun(
                f"side {side} had stopped before the flip, so it has no forward to put entries into"
            )
        return DecidingRow(number, request.flip.position, forward, request.flip.index)
    if request.differing_entries is None:
        raise CannotRun(f"no row of {request.id} differs, so nothing was carried")
    position = request.differing_entries.alive_at
    logits = [
        digests_of(case.trace(each), case.number(each, request.id), [("logits", "out")]) for each in "ab"
    ]
    apart = [at for at, digest in logits[0].items() if at <= position and logits[1].get(at, digest) != digest]
    position = max(apart, default=position)
    here = forwards_of(trace, number, position)
    if not here:
        raise CannotRun(f"side {side} has no row of {request.id} at position {position}")
    return DecidingRow(number, position, here[-1], None)


def forwards_of(trace: Trace, request: int, position: int) -> list[int]:
    """The forwards of the target model that computed a row, in order."""
    index, lines = trace.row_index(), trace.forwards()
    here = np.flatnonzero((index.request == request) & (index.position == position))
    found = [int(index.forward[at]) for at in here]
    return [forward for forward in found if lines[forward].get("model", TARGET) == TARGET]


def digests_of(trace: Trace, request: int, ports: Sequence[tuple[str, str]]) -> dict[int, tuple[int, ...]]:
    """Digests of (site, port) pairs of a request's rows by position, the last write of each; rows without one of them are
    left out."""
    numbers = [trace.port_index(site, port) for site, port in ports]
    found: dict[int, tuple[int, ...]] = {}
    for shard in trace.shards:
        for table, columns in shard.tables.items():
            places = columns[numbers]
            if (places < 0).any():
                continue
            rows = shard.table_rows(table)
            mine = shard.rows.request[rows] == request
            digests = shard.digests(table)[:, places]
            positions = shard.rows.position[rows][mine].tolist()
            found.update(zip(positions, map(tuple, digests[mine].tolist()), strict=True))
    return found
