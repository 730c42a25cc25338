"""Which rows an operation gets wrong, in the terms that tell faults from rounding: only rows from 1 on, only one token, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from detdiff.compare.alignment import CommonPorts, pair_rows
from detdiff.compare.digests import Scanner
from detdiff.compare.tokens import pair_requests
from detdiff.trace import Trace


@dataclass(frozen=True)
class Seat:
    """Where a row lay in its forward. ``row`` is its batch row when padded and its column when packed; ``tokens`` the
    columns of each batch row, ``rows`` all rows M, padding included; ``chunk`` counts the request's prefill forwards."""

    row: int
    tokens: int
    rows: int
    padded: bool
    chunk: int
    phase: str


CANDIDATES: tuple[tuple[str, Callable[[Seat], bool]], ...] = (
    ("only rows from 1 on", lambda seat: seat.row >= 1),
    ("only where a forward has one token a row (T = 1)", lambda seat: seat.tokens == 1),
    ("only padded rows", lambda seat: seat.padded),
    ("only from the second prefill chunk on", lambda seat: seat.chunk >= 2),
)


def pattern_of(affected: Iterable[Seat], spared: Iterable[Seat]) -> str:
    """What all affected rows have in common and not all spared ones; empty where nothing tells them apart.

    Spared rows had equal inputs in both runs too, and equal outputs.
    """
    hit, free = list(affected), list(spared)
    if not hit:
        return ""
    found = [
        (words, holds)
        for words, holds in CANDIDATES
        if all(map(holds, hit)) and not all(map(holds, free)) and free
    ]
    words = [each for each, _ in found]
    low, high = min(seat.rows for seat in hit), max(seat.rows for seat in hit)
    others = [seat for seat in free if all(holds(seat) for _, holds in found)]
    within = [seat for seat in others if low <= seat.rows <= high]
    if len(within) < len(others) or not any(low <= seat.rows <= high for seat in free):
        words.append(f"only M from {low} to {high}" if high > low else f"only M = {low}")
        others = within
    if not words:
        return f"{len(hit)} of {len(hit) + len(free)} rows with equal inputs, in no pattern of rows, lengths or chunks"
    every = "every such row" if not others else f"{len(hit)} of {len(hit) + len(others)} such rows"
    return f"{', '.join(words)} ({every})"


def pattern(a: Trace, b: Trace, site: str, run: str) -> str:
    """The pattern of the rows at which ``site`` has equal inputs and other outputs, as they lay in run ``run``."""
    pairing = pair_requests(a, b)
    ports = CommonPorts.of(a, b)
    pairs = pair_rows(a, b, pairing.pairs)
    place = next((n for n, common in enumerate(ports.sites) if common.site.name == site), None)
    if place is None:
        return ""
    common = ports.sites[place]
    hit: list[int] = []
    free: list[int] = []
    for block in Scanner(a, b, ports, pairs).blocks():
        given, made = (
            [pair for pair in block.columns.pair[list(numbers)].tolist() if pair >= 0]
            for numbers in (common.inputs, common.outputs)
        )
        if not made:
            continue
        differ = block.differ
        equal = ~differ[:, given].any(axis=1)
        other = differ[:, made].any(axis=1)
        hit += block.rows[equal & other].tolist()
        free += block.rows[equal & ~other].tolist()
    trace, rows = (a, pairs.a) if run == "a" else (b, pairs.b)
    seats = _Seats(trace)
    return pattern_of((seats.of(int(rows[n])) for n in hit), (seats.of(int(rows[n])) for n in free))


class _Seats:
    def __init__(self, trace: Trace) -> None:
        self._forwards = trace.forwards()
        self._index = trace.row_index()
        self._chunks = _chunks(trace)

    def of(self, row: int) -> Seat:
        request, forward, position = (
            int(field[row]) for field in (self._index.request, self._index.forward, self._index.position)
        )
        line = self._forwards[forward]
        slots, length = line["shape"]
        column = 0
        for segment in line["rows"]:
            inside = 0 <= position - segment["start"] < segment["count"]
            if segment["request"] == request and inside:
                own = column + position - segment["start"] if line["layout"] == "packed" else segment["slot"]
                return Seat(
                    own,
                    int(length),
                    int(slots * length),
                    _padding(line, segment["slot"]),
                    self._chunks.get((request, forward), 0),
                    segment["phase"],
                )
            column += segment["count"]
        raise KeyError((request, position))


def _padding(line: dict[str, object], slot: int) -> bool:
    notes = line["caches"]
    assert isinstance(notes, list)
    return any(slot < len(note["left_padding"]) and note["left_padding"][slot] > 0 for note in notes)


def _chunks(trace: Trace) -> dict[tuple[int, int], int]:
    """Which of a request's prefill forwards each is, from 1."""
    seen: dict[int, int] = {}
    found = {}
    index = trace.row_index()
    prefill = np.flatnonzero(index.phase == 0)
    keys = dict.fromkeys(zip(index.request[prefill].tolist(), index.forward[prefill].tolist(), strict=True))
    for request, forward in keys:
        seen[request] = seen.get(request, 0) + 1
        found[request, forward] = seen[request]
    return found


__all__ = ["CANDIDATES", "Seat", "pattern", "pattern_of"]
