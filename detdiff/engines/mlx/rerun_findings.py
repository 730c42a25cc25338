"""What is looked for in re-runs: the row that decides, found in the traces, with what must still happen for a trial to count; and the
first value that is not finite, padding included, with the operation that gave it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.taps.forward import Forward
from detdiff.engines.mlx.taps.sites import Arrays, SiteMap
from detdiff.engines.mlx.taps.unread import CacheUpdate
from detdiff.explain.case import Side
from detdiff.explain.control import CannotRun
from detdiff.explain.controls.finite import NotFiniteValue

from .requests import prepare
from .reruns import Mark, Rerun, Reruns, Row, rows_of
from .serve import serve


class RerunTarget(Protocol):
    """Decides about a run of side b."""

    def happened(self, run: Rerun) -> bool | None:
        """Whether it did; None while that is open."""
        ...

    @property
    def sentence(self) -> str: ...


@dataclass(frozen=True)
class FlipOf:
    """A request's token ``index``, or an earlier one, is another than run a's. ``tokens`` are run a's up to it; ``ends``
    says that run a had stopped before it."""

    id: str
    request: int
    index: int
    tokens: tuple[int, ...]
    ends: bool

    @property
    def sentence(self) -> str:
        return f"the flip of {self.id} at token {self.index}"

    def happened(self, run: Rerun) -> bool | None:
        got = run.tokens[self.request]
        if any(x != y for x, y in zip(got, self.tokens, strict=False)):
            return True
        if len(got) > len(self.tokens):
            return True if self.ends else False
        if len(got) == len(self.tokens) and not self.ends:
            return False
        if run.whole:
            return len(got) != len(self.tokens)
        return None


@dataclass(frozen=True)
class DivergenceOf:
    """What the row writes to the caches, or its logits, is not what run a's was."""

    id: str
    row: Row
    what: str
    digest: bytes
    forward: int

    @property
    def sentence(self) -> str:
        what = "cache entries" if self.what == "rows" else "logits"
        return f"the divergence of the {what} of {self.id} at position {self.row.position}"

    def happened(self, run: Rerun) -> bool | None:
        found = (run.watch.rows if self.what == "rows" else run.watch.logits).get(self.row)
        if found is None or (run.last <= self.forward and not run.whole):
            return None
        return found != self.digest


@dataclass(frozen=True)
class OutputOf:
    """The output of the first origin is not what run a's was."""

    id: str
    mark: Mark
    value: bytes
    forward: int

    @property
    def sentence(self) -> str:
        return f"the divergence of {self.mark.site} of {self.id} at position {self.mark.row.position}"

    def happened(self, run: Rerun) -> bool | None:
        found = run.watch.marks.get(self.mark)
        if found is None or (run.last <= self.forward and not run.whole):
            return None
        return found != self.value


def origin_port(runs: Reruns, side: Side) -> dict[tuple[str, str], Row]:
    """The first output port of the focus's origin, with its row in a side."""
    request = runs.case.focus
    origin = request.origin
    if origin is None:
        return {}
    sites = {site.name: site for site in runs.case.trace(side).sites}
    port = next((name for name in origin.ports if name in sites[origin.site].outputs), "out")
    model = "draft" if origin.site.startswith("draft.") else "target"
    return {(origin.site, port): Row(model, runs.case.number(side, request.id), origin.position)}


def flip_of(runs: Reruns) -> FlipOf | None:
    """The flip of the case's focus; None where nothing flipped."""
    request = runs.case.focus
    flip = request.flip
    if flip is None:
        return None
    generated = runs.case.a.generated()
    number = runs.case.number("a", request.id)
    mine = {
        int(index): int(token)
        for of, index, token in zip(generated.request, generated.index, generated.token, strict=True)
        if int(of) == number
    }
    tokens = tuple(mine[i] for i in range(flip.index + 1) if i in mine)
    return FlipOf(request.id, runs.case.number("b", request.id), flip.index, tokens, flip.a.token is None)


def divergence_of(runs: Reruns, a: Rerun, b: Rerun) -> DivergenceOf | OutputOf:
    """The first row of the focus, in b's order, whose cache entries or logits are not run a's; else its first origin.

    Raises CannotRun where none is.
    """
    request = runs.case.focus
    numbers = runs.case.number("a", request.id), runs.case.number("b", request.id)
    # The last token is not fed; what a run ahead or a rejected proposal wrote there was another one's.
    end = request.prompt_tokens + min(request.generated_a, request.generated_b) - 1
    for row in sorted(b.watch.rows, key=lambda row: (b.watch.forward_of[row], row.position)):
        if row.request != numbers[1] or row.position >= end:
            continue
        twin = row._replace(request=numbers[0])
        for what in ("rows", "logits"):
            mine, theirs = (getattr(run.watch, what).get(r) for run, r in ((a, twin), (b, row)))
            if mine is not None and theirs is not None and mine != theirs:
                return DivergenceOf(request.id, row, what, mine, b.watch.forward_of[row])
    for (site, port), row in origin_port(runs, "b").items():
        twin = row._replace(request=numbers[0])
        value, other = a.watch.marks.get(Mark(site, port, twin)), b.watch.marks.get(Mark(site, port, row))
        if value is not None and other is not None and value != other:
            return OutputOf(request.id, Mark(site, port, row), value, b.watch.forward_of[row])
    raise CannotRun(
        f"nothing that {request.id} wrote to a cache, none of its logits and no output of its first origin differ, so a re-run "
        "cannot see it diverge"
    )


class NotFiniteSeen(Exception):
    """Ends a run at its first value that is not finite."""


class FiniteWatch:
    """A session's recording that stops at the first output with a NaN or an infinity, padding included."""

    def __init__(self, run: str) -> None:
        self.found: NotFiniteValue | None = None
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
        self.found = NotFiniteValue(
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
        raise NotFiniteSeen

    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: list[CacheUpdate]) -> None:
        if self._entry or self._forward is None:
            return
        for call in calls:
            for side, array in zip("KV", call.result[:2], strict=False):
                if not isinstance(array, mx.array) or not mx.issubdtype(array.dtype, mx.floating):
                    continue
                wrong = ~mx.isfinite(array)
                if mx.any(wrong).item():
                    slot, head, place = (int(i) for i in np.argwhere(np.asarray(wrong).any(axis=3))[0])
                    self._entry = f"{key}, {side}, slot {slot}, head {head}, place {place}"
                    return

    def call(self, key: str, taken: Any) -> None: ...
    def attended(self, key: str, layer: int | None, keys: Any, mask: Any) -> None: ...
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
    with contextlib.suppress(NotFiniteSeen), sessions.running(watch, None):
        serve(scenario, sessions, prepare(scenario, runs.loaded), lambda *_: None)
    runs.case.budget.spend(watch.forwards)
    return watch
