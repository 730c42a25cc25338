"""What a probe found: a plain value that text, JSON and the chart are made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .measures import Change, Error, Time, crossing
from .operation import Route
from .sweep import Finding

SCHEMA = "detdiff.probe/1"


@dataclass(frozen=True)
class Probe:
    """One operation over a range of M. Has no truth value; ask ``invariant``.

    ``classes`` is a partition of ``rows``: all M of one give row 0 the same bits, for each of ``seeds`` seeds.
    ``against_one`` has an entry for every M but 1; ``position``, ``neighbours`` and ``repeat`` one for every M
    at which something was found. ``errors`` has one per class, in the order of ``classes``, or is None where the
    float64 answer is not known; ``times`` one per M, or is None where no time was taken. ``paths`` are by M.
    """

    target: str
    on: str
    layout: str
    k: int
    n: int
    dtype: str
    output_dtype: str
    rows: tuple[int, ...]
    seeds: int
    runs: int
    classes: tuple[tuple[int, ...], ...]
    against_one: tuple[Change, ...]
    position: tuple[Finding, ...]
    neighbours: tuple[Finding, ...]
    repeat: tuple[Finding, ...]
    errors: tuple[Error, ...] | None
    times: tuple[Time, ...] | None
    paths: Mapping[int, tuple[Route, ...]]
    notes: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> NoReturn:
        raise TypeError("a Probe has no truth value; ask .invariant")

    @property
    def invariant(self) -> bool:
        """A row's bits depended on nothing but the row, whatever was tried."""
        return len(self.classes) == 1 and not (self.position or self.neighbours or self.repeat)

    @property
    def bits_change_at(self) -> tuple[int, ...]:
        """Every M at which row 0 has other bits than at the M swept before it."""
        home = {m: number for number, members in enumerate(self.classes) for m in members}
        return tuple(
            m for before, m in zip(self.rows, self.rows[1:], strict=False) if home[m] != home[before]
        )

    @property
    def time_crosses_at(self) -> int | None:
        """The M from which on one call costs less than row by row; None where none does, or nothing was timed."""
        return None if self.times is None else crossing(self.times)

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values; ``docs/probe.md`` lists the keys."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "on": self.on,
            "layout": self.layout,
            "k": self.k,
            "n": self.n,
            "dtype": self.dtype,
            "output_dtype": self.output_dtype,
            "invariant": self.invariant,
            "rows": list(self.rows),
            "seeds": self.seeds,
            "classes": [list(members) for members in self.classes],
            "against_one": [_plain(one) | {"equal": one.equal} for one in self.against_one],
            "position": {"matters": bool(self.position), "found": [_plain(f) for f in self.position]},
            "neighbours": {"matters": bool(self.neighbours), "found": [_plain(f) for f in self.neighbours]},
            "repeat": {
                "differs": bool(self.repeat),
                "runs": self.runs,
                "found": [_plain(f) for f in self.repeat],
            },
            "errors": None if self.errors is None else [_plain(one) for one in self.errors],
            "times": None
            if self.times is None
            else [_plain(one) | {"per_row": one.per_row} for one in self.times],
            "thresholds": {"bits": list(self.bits_change_at), "time": self.time_crosses_at},
            "paths": [
                {"rows": m, "parts": [_plain(route) for route in routes]} for m, routes in self.paths.items()
            ],
            "notes": list(self.notes),
            "environment": dict(self.environment),
        }


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON values, which have no NaN and no infinity."""
    found = dataclasses.asdict(value)
    return {
        key: list(item) if isinstance(item, tuple) else _number(item) if isinstance(item, float) else item
        for key, item in found.items()
    }


def _number(x: float) -> float | str:
    if math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
