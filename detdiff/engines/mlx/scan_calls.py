"""Recurrences and attention over latents as a model called them: what chosen rows and those before them were given, kept during a re-run,
and as they should have been.

Rows are those of the request alone: what lies beside them to fill the batch up has no part in its state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.taps.forward import Forward, handle
from detdiff.engines.mlx.taps.latent import LatentCall
from detdiff.engines.mlx.taps.operations import SCAN_ROWS
from detdiff.errors import OracleRefused
from detdiff.explain.attention_bounds import AttentionOperation, latent_roundings
from detdiff.explain.bounds import exact_weight, magnitude
from detdiff.explain.origins import Captured, OriginRow
from detdiff.explain.roundings import Float64
from detdiff.explain.scan_bounds import GatedDelta, GatedLinear, StateSpace
from detdiff_kernels import Affine

from .attention_calls import added, numbers

Inside = GatedDelta | GatedLinear | StateSpace | AttentionOperation
"""What is known of a composite."""


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

    dtype = "float32"
    """Of the state, whose bound is that of float32."""

    def operation(self) -> Inside:
        """The recurrence over the request's own rows up to this one. Raises OracleRefused for a state that is not float32."""
        if self.state.dtype != mx.float32:
            raise OracleRefused(
                f"The state is held in {str(self.state.dtype).rpartition('.')[2]}; the bound is that of float32."
            )
        before = self.given.get("h" if "scale" in self.given else "state")
        state = np.zeros(self.state.shape[1:]) if before is None else numbers(before[self.slot])
        if "scale" in self.given:
            q, k, v = (self._rows(name) for name in "qkv")
            decay, scale = numbers(self.given["g"]).reshape(-1), float(self.given["scale"])
            return GatedLinear(q, k, v, decay, scale, state, self.ends, _dtype(self.y))
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
        y = self.y[self.slot].swapaxes(0, 1) if "scale" in self.given else self.y[self.slot]
        parts = [y[self.row], *([self.state[self.slot]] if self.ends else [])]
        return np.concatenate([numbers(part).ravel() for part in parts])[None]

    def _rows(self, name: str) -> Float64:
        """(rows, heads, ...) up to this one."""
        array = self.given[name][self.slot]
        return numbers((array.swapaxes(0, 1) if "scale" in self.given else array)[self.first : self.row + 1])


def _dtype(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]


@dataclass(frozen=True, eq=False)
class LatentRow:
    """A row of attention over latents: the batch ``slot`` and the ``row`` of the queries."""

    call: LatentCall
    slot: int
    row: int

    def operation(self) -> AttentionOperation:
        """The attention of the row over keys and values that the layer's weights make of the latents, in float64."""
        call, slot, row = self.call, self.slot, self.row
        assert call.given is not None and call.latents is not None and call.y is not None
        queries, rotated = call.parts()
        latents = numbers(call.latents[slot, 0])
        to_keys, keys_size = _weights(call.embed)
        to_values, values_size = _weights(call.unembed)
        keys, values = (
            np.einsum("kr,hrn->hkn", latents, to_keys),
            np.einsum("kr,hvr->hkv", latents, to_values),
        )
        key_size = np.einsum("kr,hrn->hkn", np.abs(latents), keys_size)
        value_size = np.einsum("kr,hvr->hkv", np.abs(latents), values_size)
        q = numbers(queries[slot, :, row])
        if rotated is not None:
            rest = np.broadcast_to(numbers(rotated[slot]), (len(keys), len(latents), rotated.shape[-1]))
            keys, key_size = np.concatenate([keys, rest], -1), np.concatenate([key_size, np.abs(rest)], -1)
            q = np.concatenate([q, numbers(call.given["queries"][slot, :, row, q.shape[-1] :])], -1)
        rows = queries.shape[2]
        bias = added(call.given.get("mask"), slot, row, queries.shape[0], rows, len(latents))
        held = "scales" in call.embed
        own = latent_roundings(_dtype(call.y), len(latents), q.shape[-1], latents.shape[-1], held)
        return AttentionOperation(
            q[None],
            keys,
            values,
            float(call.given["scale"]),
            bias[:, None],
            key_size=key_size,
            value_size=value_size,
            roundings=own,
        )

    @property
    def dtype(self) -> str:
        """Of the output."""
        assert self.call.y is not None
        return _dtype(self.call.y)

    def output(self) -> Float64:
        """What came out behind the values' weights, [1, heads, width]."""
        assert self.call.y is not None
        return numbers(self.call.y[self.slot, :, self.row])[None]


def _weights(module: Any) -> tuple[Float64, Float64]:
    """A layer's weights [heads, outputs, inputs] of keys or values, and their sizes. Raises OracleRefused for codes that are not affine."""
    weight = module["weight"]
    if "scales" not in module:
        exact = numbers(weight)
        return exact, np.abs(exact)
    if getattr(module, "mode", "affine") != "affine":
        raise OracleRefused(
            f"The weights of latents are codes of the mode {module.mode}; affine ones are known."
        )
    flat = [np.array(part.astype(mx.float32)) for part in (module["scales"], module["biases"])]
    scales, biases = (part.reshape(-1, part.shape[-1]) for part in flat)
    packed = np.array(weight).reshape(-1, weight.shape[-1])
    codes = Affine(packed, scales, biases, int(module.bits), int(module.group_size))
    shape = (*weight.shape[:2], -1)
    return exact_weight(codes).reshape(shape), magnitude(codes).reshape(shape)


@dataclass(eq=False)
class ScanWatch:
    """Keeps the scans, and attention over latents, with rows that are ``wanted`` (request, position) while a session runs."""

    wanted: Collection[tuple[int, int]]
    rows: dict[tuple[str, int, int, int], ScannedRow | LatentRow] = field(default_factory=dict)
    """By the name of the module that computes, request, position and forward."""

    def latent(self, where: str, forward: Forward, call: LatentCall) -> None:
        """One call of attention over latents."""
        for segment in forward.segments:
            for position in range(segment.start, segment.start + segment.count):
                if (segment.request, position) in self.wanted:
                    row = segment.column + position - segment.start
                    key = where, segment.request, position, forward.index
                    self.rows[key] = LatentRow(call, segment.slot, row)

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


def scanned(captured: Captured, origin: OriginRow, place: int) -> tuple[Inside, Float64, str]:
    """The recurrence, or the attention over latents, inside a composite at which two runs diverge, what it gave in one of them, and its dtype; ``place`` is the row's
    in that run.

    Raises OracleRefused where there is none, or more than one.
    """
    watch = None if captured.watch is None else captured.watch.scans
    key = captured.computed_for(place), origin.position, captured.forward(place)
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
            f"The composite {name} has {len(found)} recurrences or attentions over latents that are known, and its error is judged by one. "
            "Judge the sites inside it."
        )
    row = next(iter(found.values()))
    return row.operation(), row.output(), row.dtype
