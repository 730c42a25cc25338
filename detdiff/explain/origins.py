"""Every origin of two traces, not only the first of each request: which site, which row, on which paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.alignment import CommonPorts, RowPairs, pair_rows
from detdiff.compare.details import Runs
from detdiff.compare.digests import Scanner
from detdiff.compare.forwards import Call, RunLog
from detdiff.compare.origins import ROOT, SettledOrigins, Tally
from detdiff.compare.tokens import pair_requests
from detdiff.trace import Site, Trace

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Born:
    """One origin: ``site`` of the request with id ``request`` at ``position``, in these forwards and calls.

    ``row_a`` and ``row_b`` are places in each trace's row index. ``how`` is as in a divergence's origin; for a difference
    born between two sites it is ``composite`` and ``site`` the first that shows it.
    """

    site: Site
    how: str
    request: str
    position: int
    row_a: int
    row_b: int
    forward_a: int
    forward_b: int
    call_a: Call
    call_b: Call

    @property
    def group(self) -> tuple[str, str | None, str | None]:
        """Site kind and path pair."""
        return self.site.kind, self.call_a.path, self.call_b.path


class _Listing(Tally):
    """A tally that keeps which rows it counted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.claimed: list[tuple[int, Int64, Int64]] = []

    def claim(self, place: int, rows: Int64, at: Int64, forward_a: Int64) -> None:
        super().claim(place, rows, at, forward_a)
        self.claimed.append((place, rows.copy(), at.copy()))


def origins(a: Trace, b: Trace) -> list[Born]:
    """All of them, in run A's execution order. Raises NothingComparable."""
    pairing = pair_requests(a, b)
    ports = CommonPorts.of(a, b)
    pairs = pair_rows(a, b, pairing.pairs)
    runs = Runs(a, b, RunLog(a, "a"), RunLog(b, "b"))
    forward_a = a.row_index().forward[pairs.a].astype(np.int64)

    def calls(rows: Int64, place: int) -> tuple[Int64, Int64]:
        site = ports.sites[place]
        return (
            runs.log_a.call_numbers(pairs.a[rows], site.index_a),
            runs.log_b.call_numbers(pairs.b[rows], site.index_b),
        )

    tally = _Listing(ports, pairs, calls)
    scanner = Scanner(a, b, ports, pairs)
    for block in scanner.blocks():
        tally.add(block, forward_a)
    tally.settle(forward_a)
    late: dict[tuple[int, int], str] = {}
    rules = SettledOrigins(tally, ports, pairs, scanner)
    for found in rules.origins():
        late[found.row, found.place] = found.how
        tally.claim(found.place, np.array([found.row]), np.array([rules.place_of(found)]), forward_a)
    maker = _Maker(runs, ports, pairs, [(pair.id, pair.a, pair.b) for pair in pairing.pairs], late)
    born = [
        (int(forward_a[row]), int(where), int(row), maker.born(place, int(row), int(where)))
        for place, rows, at in tally.claimed
        for row, where in zip(rows.tolist(), at.tolist(), strict=True)
    ]
    return [each for *_, each in sorted(born, key=lambda item: item[:3])]


class _Maker:
    def __init__(
        self,
        runs: Runs,
        ports: CommonPorts,
        pairs: RowPairs,
        requests: Sequence[tuple[str, int, int]],
        late: dict[tuple[int, int], str],
    ) -> None:
        self._runs, self._ports, self._pairs, self._requests, self._late = runs, ports, pairs, requests, late

    def born(self, place: int, row: int, at: int) -> Born:
        leaf = place != ROOT and not self._ports.sites[place].descendants
        how = self._late.get((row, place), "leaf" if leaf else "composite")
        site = self._ports.sites[at if place == ROOT else place]
        request, number_a, number_b = self._requests[int(self._pairs.request[row])]
        position = int(self._pairs.position[row])
        row_a, row_b = int(self._pairs.a[row]), int(self._pairs.b[row])
        forward_a = int(self._runs.a.row_index().forward[row_a])
        forward_b = int(self._runs.b.row_index().forward[row_b])
        return Born(
            site.site,
            how,
            request,
            position,
            row_a,
            row_b,
            forward_a,
            forward_b,
            self._runs.log_a.call(forward_a, site.index_a, (number_a, position)),
            self._runs.log_b.call(forward_b, site.index_b, (number_b, position)),
        )
