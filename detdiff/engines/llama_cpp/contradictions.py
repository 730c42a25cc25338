"""What a batch was computed from, against what its rows should have been: tokens, positions, sequences, cache entries, logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from .node_loops import CHANGED, EVENTS, FOREIGN, Int64
from .nodes import NodeRecorder
from .sites import CacheLayer

MOST_TOLD: Final = 64
"""Events of a batch that are told one by one."""
Event = dict[str, Any]


@dataclass
class SequenceOwners:
    """Which request each sequence of the cache is served for, by number, and which one was last."""

    now: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)

    def begin(self, sequence: int, request: int) -> None:
        self.now[sequence] = request

    def end(self, sequence: int) -> None:
        self.before[sequence] = self.now.pop(sequence)

    def sequence(self, request: int) -> int:
        return next(sequence for sequence, each in self.now.items() if each == request)

    def of(self, owners: int, removed: bool) -> int:
        """The request of a cell's owners, a bit a sequence; -1 for none."""
        known = self.before if removed else self.now
        return next((request for s, request in known.items() if owners >= 0 and (owners >> s) & 1), -1)


def contradictions(
    nodes: NodeRecorder, table: Int64, owners: SequenceOwners, caches: Sequence[CacheLayer]
) -> Iterator[tuple[int, Event]]:
    """Pairs of a row's place in ``table`` int64 [rows, 4] (request, position, phase, token) and an event of its forward's line."""
    yield from _told(nodes, table, owners)
    for found in nodes.events[:MOST_TOLD].tolist():
        yield _noticed(nodes, found, table, owners, caches)
    more = int(nodes.state[EVENTS]) - MOST_TOLD
    if more > 0:
        yield 0, {"kind": "cache_more", "entries": more}


def _told(nodes: NodeRecorder, table: Int64, owners: SequenceOwners) -> Iterator[tuple[int, Event]]:
    """Rows that the graph was told otherwise: token, position, and the stream that its entries went to."""
    observed = nodes.observed[: len(table)]
    own = nodes.rows[: len(table), 0]
    for kind, found, expected in (
        ("token_fed", observed[:, 0], table[:, 3]),
        ("offset", observed[:, 1], table[:, 1]),
        ("sequence", observed[:, 3], own),
    ):
        for row in np.flatnonzero((found >= 0) & (found != expected)).tolist():
            request, position = table[row, :2].tolist()
            event = {"kind": kind, "request": request, "position": position}
            if kind == "sequence":
                yield row, {**event, "of": owners.now.get(int(found[row]), -1)}
            else:
                yield row, {**event, "found": int(found[row]), "expected": int(expected[row])}


def _noticed(
    nodes: NodeRecorder,
    found: Sequence[int],
    table: Int64,
    owners: SequenceOwners,
    caches: Sequence[CacheLayer],
) -> tuple[int, Event]:
    """What the callback noticed of a cache; see ``node_loops`` for the fields of ``found``."""
    kind, place, row, third, position, last, _ = found
    cache = caches[place]
    event: Event = {"layer": cache.layer}
    if kind == CHANGED:
        request = owners.of(last, removed=False)
        heads = cache.heads[0]
        event |= {
            "kind": "cache_changed",
            "entry": "K" if third < heads else "V",
            "head": third if third < heads else third - heads,
            "position": position,
            **({} if request < 0 else {"request": request}),
            **_written_for(nodes, found, owners),
        }
        return 0, event
    event |= {"request": int(table[row, 0]), "position": int(table[row, 1])}
    if kind == FOREIGN:
        removed = position < -1
        at = -2 - position if removed else position
        of = owners.of(last, removed) if at >= 0 else -1
        event |= {"kind": "cache_foreign", "cell": third, "at": at, "of": of, "ended": removed}
    else:
        event |= {"kind": "cache_missing", "first": third, "entries": last}
    return row, event


def _written_for(nodes: NodeRecorder, changed: Sequence[int], owners: SequenceOwners) -> dict[str, int]:
    """The request and position for which the entry was written that was found in a changed one's place."""
    _, place, cell, head, *_ = changed
    now = nodes.written[place, :, head]
    # Cells that changed too had other entries before.
    before = now.copy()
    for kind, layer, other, of_head, _, _, digest in nodes.events.tolist():
        if (kind, layer, of_head) == (CHANGED, place, head):
            before[other] = np.uint64(digest % (1 << 64))
    positions, masks = nodes.cells[place]
    for other in np.flatnonzero((before == now[cell]) & (positions != -1)).tolist():
        position, removed = int(positions[other]), bool(positions[other] < -1)
        of = owners.of(int(masks[other]), removed)
        if other != cell and of >= 0:
            return {"of": of, "at": -2 - position if removed else position}
    return {}


def other_logits(table: Int64, row: int, found: int, heads: Mapping[int, int]) -> Event | None:
    """An event where a token was chosen from logits of the digest ``found`` that the head did not give at this row; ``heads`` are the
    digests that it gave, by row."""
    if heads.get(row, found) == found:
        return None
    other = next((n for n, digest in heads.items() if digest == found), None)
    of, at = (-1, -1) if other is None else table[other, :2].tolist()
    return {
        "kind": "logits_read", "request": int(table[row, 0]), "position": int(table[row, 1]), "of": of, "at": at,
    }  # fmt: skip
