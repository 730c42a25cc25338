"""A re-run up to its first value that is not finite, padding included: which operation gave it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.taps.forward import Forward
from detdiff.engines.mlx.taps.sites import Arrays, SiteMap
from detdiff.explain.case import Side
from detdiff.explain.controls.finite import NotFinite

from .requests import prepare
from .reruns import Reruns, rows_of
from .serve import serve


class Found(Exception):
    """Ends a run at its first value that is not finite."""


class FiniteWatch:
    """A session's recording that stops at the first output with a NaN or an infinity, padding included."""

    def __init__(self, run: str) -> None:
        self.found: NotFinite | None = None
        self._run = run
        self._maps: dict[str, SiteMap] = {}
        self._forward: Forward | None = None
        self._entry = ""
        self.forwards = 0

    def of(self, sites: SiteMap, model: str) -> FiniteWatch:
        """Tell it the sites of a model; returns itself."""
        self._maps[model] = sites
        return self

    # What a session calls.

    def begin(self, forward: Forward, cache: Sequence[Any]) -> None:
        self._forward = forward
        self.forwards += 1

    def site(self, key: str, kind: str, inputs: Arrays, outputs: Arrays, parent: str | None) -> None:
        forward = self._forward
        if forward is None or not forward.logits_used and key == self._maps[forward.model].head:
            return
        for name, array in outputs:
            self._look(forward, key, kind, name, array)

    def _look(self, forward: Forward, key: str, kind: str, port: str, array: mx.array) -> None:
        if not mx.issubdtype(array.dtype, mx.floating):
            return
        wrong = ~mx.isfinite(array)
        if not mx.any(wrong).item():
            return
        sites = self._maps[forward.model]
        place = sites.index.get(key)
        axis = sites.axes.get(sites.ports.get((key, port), -1))
        row = -1
        if axis is not None and axis < array.ndim:
            where = np.asarray(mx.moveaxis(wrong, axis, 1)).reshape(*_leading(array, axis), -1).any(axis=2)
            slot, column = (int(i) for i in np.argwhere(where)[0])
            if forward.selected is not None and where.shape[1] == len(forward.selected) < forward.shape[1]:
                column = forward.selected[column]
            row = slot * forward.shape[1] + column
        owner = rows_of(forward)[row] if 0 <= row < forward.rows else None
        self.found = NotFinite(
            self._run,
            key if place is None else sites.sites[place].name,
            kind if place is None else sites.sites[place].kind,
            forward.index,
            row,
            owner is None,
            None if owner is None else owner.request,
            None if owner is None else owner.position,
            bool(mx.any(mx.isnan(array)).item()),
            self._entry,
        )
        raise Found

    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: list[tuple[Any, Any]]) -> None:
        if self._entry or self._forward is None:
            return
        for _, result in calls:
            for side, array in zip("KV", result[:2], strict=False):
                if not isinstance(array, mx.array) or not mx.issubdtype(array.dtype, mx.floating):
                    continue
                wrong = ~mx.isfinite(array)
                if mx.any(wrong).item():
                    slot, head, place = (int(i) for i in np.argwhere(np.asarray(wrong).any(axis=3))[0])
                    self._entry = f"{key}, {side}, slot {slot}, head {head}, place {place}"
                    return

    def call(self, key: str, taken: Any) -> None: ...
    def mask(self, layer: int | None, kind: str) -> None: ...
    def block_done(self, key: str) -> None: ...

    def end(self, forward: Forward, logits: mx.array) -> None:
        if forward.logits_used and bool(mx.any(mx.isnan(logits) | (logits == mx.inf)).item()):
            self._look(forward, "logits", "logits", "out", mx.where(logits == -mx.inf, 0.0, logits))
        self._forward = None


def _leading(array: mx.array, axis: int) -> tuple[int, int]:
    return int(array.shape[0]), int(array.shape[axis])


def watched_for_values(runs: Reruns, side: Side) -> FiniteWatch:
    scenario, sessions = runs.case.scenario(side), runs.sessions(side)
    watch = FiniteWatch(side)
    for model, sites in sessions.sites.items():
        watch.of(sites, model)
    runs.case.budget.begin()
    with contextlib.suppress(Found), sessions.running(watch, None):
        serve(scenario, sessions, prepare(scenario, runs.loaded), lambda *_: None)
    runs.case.budget.spend(watch.forwards)
    return watch
