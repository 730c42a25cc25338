"""The row that decides: that of the flip, or the last one whose logits differ. Found in the traces alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detdiff.engines.mlx.instrument.forward import TARGET
from detdiff.trace import Trace

from .case import Case, Side
from .control import CannotRun
from .watch import Row


@dataclass(frozen=True)
class Place:
    """The deciding row of a side: its request, position and forward; ``index`` is the token it chooses, None where the
    row's bits are asked for instead."""

    request: int
    position: int
    forward: int
    index: int | None

    @property
    def row(self) -> Row:
        return Row(TARGET, self.request, self.position)


def place(case: Case, side: Side) -> Place:
    """The flip's row of the focus; without a flip its last compared row whose logits differ, or the very last one.

    Raises CannotRun where a side has none.
    """
    request = case.focus
    number = case.number(side, request.id)
    if request.flip is not None:
        forward = request.flip.forward_a if side == "a" else request.flip.forward_b
        if forward is None:
            raise CannotRun(
                f"side {side} had stopped before the flip, so it has no forward to put entries into"
            )
        return Place(number, request.flip.position, forward, request.flip.index)
    if request.carriers is None:
        raise CannotRun(f"no row of {request.id} differs, so nothing was carried")
    position = request.carriers.alive_at
    logits = [_logits(case.trace(each), case.number(each, request.id)) for each in "ab"]
    apart = [at for at, digest in logits[0].items() if at <= position and logits[1].get(at, digest) != digest]
    position = max(apart, default=position)
    index = case.trace(side).row_index()
    here = np.flatnonzero((index.request == number) & (index.position == position))
    here = here[
        [case.trace(side).forwards()[int(n)].get("model", TARGET) == TARGET for n in index.forward[here]]
    ]
    if not len(here):
        raise CannotRun(f"side {side} has no row of {request.id} at position {position}")
    return Place(number, position, int(index.forward[here[-1]]), None)


def _logits(trace: Trace, request: int) -> dict[int, int]:
    """Digests of a request's logits by position, the last write of each."""
    port = trace.port_index("logits", "out")
    found: dict[int, int] = {}
    for shard in trace.shards:
        for number, table in shard.tables.items():
            if table[port] < 0:
                continue
            rows = shard.table_rows(number)
            mine = shard.rows.request[rows] == request
            digests = shard.digests(number)[:, table[port]]
            found.update(zip(shard.rows.position[rows][mine].tolist(), digests[mine].tolist(), strict=True))
    return found
