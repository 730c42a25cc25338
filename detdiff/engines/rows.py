"""Rows of a trace from digests by (request, position): what engines without a recorder of their own write with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import RunOptions
from detdiff.scenario import Request, Scenario
from detdiff.trace import PHASES, Rows, TraceWriter, Value, digest_rows

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Wanted = Callable[[str, int, str], bool]
"""Whether the values of (request id, position, site) are kept."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of one forward, int64 [n] each: request, position, slot, phase (index into PHASES) and input token."""

    request: Int64
    position: Int64
    slot: Int64
    phase: Int64
    token: Int64

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, eq=False)
class PortRows:
    """What one port holds in a forward: ``rows`` int64 [m], places in the row table in ascending order, ``digests`` uint64
    [m], and, where ``kept`` bool [m] says so, the values ``data`` [m, ...] in storage form."""

    rows: Int64
    digests: UInt64
    data: NDArray[Any] | None = None
    dtype: str = ""
    kept: NDArray[np.bool_] | None = None


def port_rows(rows: Int64, data: NDArray[Any], dtype: str, kept: NDArray[np.bool_] | None = None) -> PortRows:
    """The port of values [m, ...]; ``kept`` says whose values stay beside their digests."""
    return PortRows(rows, digest_rows(data, dtype), None if kept is None else data, dtype, kept)


def write_rows(
    writer: TraceWriter, forward: int, table: RowTable, ports: Mapping[int, PortRows], count: int
) -> None:
    """Write the rows of a logged forward; ``ports`` by their number, ``count`` of them in the trace's sites.

    Rows without any port are left out.
    """
    present = np.zeros((len(table), count), np.bool_)
    place = {port: np.full(len(table), -1, np.int64) for port in ports}
    for port, found in ports.items():
        present[found.rows, port] = True
        place[port][found.rows] = np.arange(len(found.rows))
    patterns, group = np.unique(present, axis=0, return_inverse=True)
    group = group.reshape(-1)
    for number in dict.fromkeys(group.tolist()):
        columns = np.flatnonzero(patterns[number])
        if not len(columns):
            continue
        mine = np.flatnonzero(group == number)
        order = np.full(count, -1, np.int64)
        order[columns] = np.arange(len(columns))
        digests = np.stack([ports[port].digests[place[port][mine]] for port in columns.tolist()], axis=1)
        values = {}
        for column, port in enumerate(columns.tolist()):
            found = ports[port]
            if found.kept is None or found.data is None:
                continue
            at = place[port][mine]
            kept = np.flatnonzero(found.kept[at])
            if len(kept):
                values[column] = Value(kept.astype(np.int32), found.data[at[kept]], found.dtype)

        def int32(array: Int64, mine: Int64 = mine) -> NDArray[np.int32]:
            return array[mine].astype(np.int32)

        writer.rows(
            Rows(
                int32(table.request),
                int32(table.position),
                np.full(len(mine), forward, np.int32),
                int32(table.slot),
                int32(table.phase),
                int32(table.token),
                tuple(order.tolist()),
                digests,
                values,
            )
        )


def wanted_values(scenario: Scenario, options: RunOptions) -> Wanted | None:
    """Which values are kept beside digests; None: none at all."""
    capture = scenario.capture
    if options.values is not None:
        places = {id: frozenset(positions) for id, positions in options.values.items()}
        return lambda request, position, site: position in places.get(request, ())
    if capture.level == "full":
        return lambda request, position, site: True
    if capture.level != "window":
        return None
    span = capture.positions or (0, 1 << 31)

    def inside(request: str, position: int, site: str) -> bool:
        return (
            (not capture.requests or request in capture.requests)
            and span[0] <= position <= span[1]
            and (not capture.sites or any(fnmatchcase(site, pattern) for pattern in capture.sites))
        )

    return inside


def request_header(request: Request, tokens: Sequence[int]) -> dict[str, Any]:
    """A request in a trace's header."""
    return {
        "id": request.id,
        "tokens": list(tokens),
        "max_tokens": request.max_tokens,
        "arrival": request.arrival,
        "ignore_stop": request.ignore_stop,
        "sampling": dict(vars(request.sampling)),
    }


def forward_line(
    number: int,
    spans: Sequence[tuple[int, int, int, int]],
    shape: tuple[int, int],
    plan: int,
    prompts: Sequence[int],
) -> dict[str, Any]:
    """The line of the padded forward ``number``: ``spans`` are (request, slot, start, count); ``prompts`` the prompts' lengths."""
    rows = [
        {
            "request": request,
            "slot": slot,
            "start": start,
            "count": count,
            "phase": PHASES[0] if start < prompts[request] else PHASES[1],
        }
        for request, slot, start, count in spans
    ]
    phases = {row["phase"] for row in rows}
    return {
        "forward": number,
        "phase": phases.pop() if len(phases) == 1 else "mixed",
        "layout": "padded",
        "shape": list(shape),
        "rows": rows,
        "plan": plan,
        "caches": [],
    }
