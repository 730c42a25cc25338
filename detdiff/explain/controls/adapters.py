"""The control ``adapters``: two sets of weights, one with an adapter: is each layer of both what the adapter's files make of it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from detdiff.engines.base import ADAPTERS, VALUES
from detdiff.scenario import Capture

from ..adapted import AdaptedLinear, AdapterMiss, PlainLinear, outputs_missed, weights_missed
from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control
from ..facts import Facts
from ..oracle import judge
from ..origins import Captured, dtype_of
from ..roundings import Arithmetic

ROWS: Final = 8
"""Positions of each request that are judged."""


@dataclass(frozen=True, eq=False)
class AdapterFigures(Figures):
    """``sites`` layers with the adapter of side ``of`` were judged in ``rows`` rows of each side; the first miss."""

    of: Side
    sites: int
    rows: int
    run: Side | None = None
    site: str | None = None
    place: str | None = None
    worst: float | None = None
    as_if: str | None = None


def _across(facts: Facts) -> bool:
    """Whether two sets of weights were asked for, of which one has an adapter."""
    found = facts.divergence
    return (
        found is not None
        and found.across_models
        and any("adapter" in run.model for run in (found.a, found.b))
    )


@control("adapters", after="repeat", needs=(ADAPTERS, VALUES), asked_by=_across)
def adapters(case: Case) -> Outcome:
    """Judge the layers of an adapter on both sides, each from its own inputs, beside the weights or fused into them.

    Result ``inside``, ``outside``, ``without`` (a side has the model's own weights and says so) or ``other_weights`` (other
    layers differ as well). Costs one re-run of each side. Raises CannotRun.
    """
    identities = {side: case.trace(side).model for side in "ab"}
    given = [side for side in "ab" if "adapter" in identities[side]]
    if not given:
        raise CannotRun("no side has an adapter")
    adapter: Mapping[str, Any] = identities[given[0]]["adapter"]
    if len(given) == 2 and identities["b"]["adapter"]["sha256"] != adapter["sha256"]:
        raise CannotRun("the sides have two different adapters")
    of, other = given[0], "b" if given[0] == "a" else "a"
    if other not in given and identities[other].get("weights_sha256") == adapter["base_weights_sha256"]:
        sentence = (
            f"run {other} has the model's own weights, without the adapter {adapter['name']} of run {of}"
        )
        return Outcome("without", sentence, AdapterFigures(of, 0, 0))
    engines: dict[str, Any] = {side: case.engine(side) for side in "ab"}
    layers: Mapping[str, AdaptedLinear] = engines[of].adapted()
    others = engines[of].weights_beside(engines[other], tuple(layers))
    if others:
        sentence = f"beside the adapter's layers the two models differ in {others}"
        return Outcome("other_weights", sentence, AdapterFigures(of, len(layers), 0))
    rows, first = 0, None
    for side in (of, other):
        captured = _captured(case, side, tuple(layers))
        judged, miss = _first_miss(captured, side, layers, engines[side])
        rows, first = max(rows, judged), first or miss
    figures = AdapterFigures(of, len(layers), rows)
    if first is None:
        sentence = (
            f"all {len(layers)} layers of the adapter {adapter['name']} are what its files make of them, on both sides, inside the bounds of "
            "an adapter beside its weights and of one that is fused"
        )
        return Outcome("inside", sentence, figures)
    told = {name: getattr(first, name) for name in ("run", "site", "place", "worst")}
    found = replace(figures, **told, as_if=first.as_if or None)
    return Outcome("outside", first.sentence, found)


def _captured(case: Case, side: Side, sites: Sequence[str]) -> Captured:
    scenario = case.scenario(side)
    ids = tuple(request.id for request in scenario.requests if request.use_adapter)
    if not ids:
        raise CannotRun(f"no request of run {side} uses the adapter")
    capture = Capture("window", requests=ids, positions=(0, ROWS - 1), sites=tuple(sites))
    return Captured(case.record(replace(scenario, capture=capture), side))


def _first_miss(
    captured: Captured, side: Side, layers: Mapping[str, AdaptedLinear], engine: Any
) -> tuple[int, AdapterMiss | None]:
    """How many rows were judged of each layer, and the first one in execution order that misses."""
    trace = captured.trace
    places = [
        (str(request["id"]), position)
        for request in trace.requests
        for position in range(ROWS)
        if request["id"] in trace.scenario["window_requests"]
        and captured.row(str(request["id"]), position) is not None
    ]
    rows = [row for place in places if (row := captured.row(*place)) is not None]
    for site in trace.sites:
        if site.name not in layers:
            continue
        given = [captured.needed(row, site, site.inputs[0]) for row in rows]
        made = [captured.needed(row, site, site.outputs[0]) for row in rows]
        backend: Any = trace.header["environment"].get("backend", "cpu")
        arithmetic = Arithmetic("native", dtype_of(made[0]), backend)
        x, output = (np.stack([value.numbers() for value in values]) for values in (given, made))
        into: PlainLinear | None = engine.fused_at(site.name)
        layer, where = layers[site.name], (side, site.name)
        miss = (
            outputs_missed(layer, x, output, arithmetic, places, where)
            if into is None
            else weights_missed(layer, into, where) or _sums_missed(into, x, output, arithmetic, where)
        )
        if miss is not None:
            return len(rows), miss
    return len(rows), None


def _sums_missed(
    into: PlainLinear, x: Any, output: Any, arithmetic: Arithmetic, where: tuple[str, str]
) -> AdapterMiss | None:
    """Whether a layer whose weights are right does not multiply by them."""
    found = judge(into.operation(x), output, arithmetic)
    if found.inside:
        return None
    return AdapterMiss(
        *where, f"row {found.where[0]} that was judged", found.worst, "", ("as its own weights make it",)
    )
