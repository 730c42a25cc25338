"""Recurrences as a model called them: what chosen rows and those before them were given, kept during a re-run, and as they should have been.

Rows are those of the request alone: what lies beside them to fill the batch up has no part in its state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.taps.forward import Forward, handle
from detdiff.engines.mlx.taps.operations import SCAN_ROWS
from detdiff.errors import OracleRefused
from detdiff.explain.origins import Captured, OriginRow
from detdiff.explain.roundings import Float64
from detdiff.explain.scan_bounds import GatedDelta, StateSpace

from .attention_calls import numbers


@dataclass(frozen=True, eq=False)
class ScannedRow:
    """A row of a scan: the batch ``slot``, its ``row`` there and the request's ``first``, whether the forward ``ends`` with it, and what
    the scan was given and gave: y [slots, rows, ...] and the state after it."""

    given: Mapping[str, Any]
    slot: int
    first: int
    row: int
    ends: bool
    y: mx.array
    state: mx.array

    def operation(self) -> GatedDelta | StateSpace:
        """The recurrence over the request's own rows up to this one. Raises OracleRefused for a state that is not float32."""
        if self.state.dtype != mx.float32:
            raise OracleRefused(
                f"The state is held in {str(self.state.dtype).rpartition('.')[2]}; the bound is that of float32."
            )
        before = self.given.get("state")
        state = np.zeros(self.state.shape[1:]) if before is None else numbers(before[self.slot])
        if "hidden_states" in self.given:
            return self._state_space(state)
        heads = self.given["v"].shape[2]
        q, k, v, g, beta = (self._rows(name) for name in SCAN_ROWS["gated_delta"][:-1])
        q, k = (np.repeat(part, heads // part.shape[1], axis=1) for part in (q, k))
        return GatedDelta(q, k, v, g, beta, state, self.ends, _dtype(self.y))

    def _state_space(self, state: Float64) -> StateSpace:
        x, b, c, dt = (self._rows(name) for name in SCAN_ROWS["ssm_update"][:-1])
        b, c = (np.repeat(part, x.shape[1] // part.shape[1], axis=1) for part in (b, c))
        a, skip, bias = (numbers(self.given[name]).reshape(-1) for name in ("A_log", "D", "dt_bias"))
        limit = self.given.get("time_step_limit", (0.001, 100.0))
        return StateSpace(
            x,
            dt,
            b,
            c,
            -np.exp(a),
            bias,
            skip,
            (float(limit[0]), float(limit[1])),
            state,
            self.ends,
            _dtype(self.given["hidden_states"]),
            _dtype(self.given["B"]),
        )

    def output(self) -> Float64:
        """What the scan gave, [1, items]: the row's y and, where the forward ends with it, the state."""
        parts = [self.y[self.slot, self.row], *([self.state[self.slot]] if self.ends else [])]
        return np.concatenate([numbers(part).ravel() for part in parts])[None]

    def _rows(self, name: str) -> Float64:
        return numbers(self.given[name][self.slot, self.first : self.row + 1])


def _dtype(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]


@dataclass(eq=False)
class ScanWatch:
    """Keeps the scans with rows that are ``wanted`` (request, position) while a session runs."""

    wanted: Collection[tuple[int, int]]
    rows: dict[tuple[str, int, int, int], ScannedRow] = field(default_factory=dict)
    """By the name of the module that scans, request, position and forward."""

    def scan(
        self, where: str, forward: Forward, given: Mapping[str, Any], y: mx.array, state: mx.array
    ) -> None:
        """One scan: ``given`` as it was before, and what came out of it, which a model may go on with in place."""
        y, state = handle(y), handle(state)
        for segment in forward.segments:
            for position in range(segment.start, segment.start + segment.count):
                if (segment.request, position) in self.wanted:
                    row = segment.column + position - segment.start
                    self.rows[where, segment.request, position, forward.index] = ScannedRow(
                        given,
                        segment.slot,
                        segment.column,
                        row,
                        row == segment.column + segment.count - 1,
                        y,
                        state,
                    )


def scanned(
    captured: Captured, origin: OriginRow, forward: int
) -> tuple[GatedDelta | StateSpace, Float64, str]:
    """The recurrence inside a composite at which two runs diverge, what it gave in one of them, and its dtype.

    Raises OracleRefused where there is none, or more than one.
    """
    watch = None if captured.watch is None else captured.watch.scans
    key = captured.number(origin.request), origin.position, forward
    name = origin.site.name
    found = (
        {}
        if watch is None
        else {
            where: row
            for (where, *rest), row in watch.rows.items()
            if tuple(rest) == key
            and (name == where or name.startswith(f"{where}.") or where.startswith(f"{name}."))
        }
    )
    if len(found) != 1:
        raise OracleRefused(
            f"The composite {name} has {len(found)} recurrences that are known, and its error is judged by one. Judge the sites inside it."
        )
    row = next(iter(found.values()))
    return row.operation(), row.output(), "float32"
