"""record: a scenario in, a trace out, with whatever engine it names; replay: both sides of a comparison run again.

Replay checks the digests and captures values where it matters: a long run then costs a digest trace, and still gets its
units in the last place.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from detdiff.compare import Divergence, RequestDivergence, compare
from detdiff.engines.base import Engine, RunOptions
from detdiff.engines.registry import (
    DEFAULT,
    as_engine,
    changed_imports,
    import_again,
    open_engine,
    same_engine,
)
from detdiff.engines.tasks import check_task
from detdiff.errors import EngineUnusable, ReplayError
from detdiff.scenario import Scenario
from detdiff.trace import Place, Trace, TraceWriter, place


def record(
    scenario: Scenario,
    path: Place | str,
    *,
    engine: Any = None,
    options: RunOptions | None = None,
) -> Trace:
    """Run ``scenario`` and write its trace to the new directory ``path``, or to an address of fsspec.

    ``engine`` is the scenario's engine where it is opened already (or an object that ``registry.as_engine`` takes). An
    interrupted run leaves every finished shard readable. Raises the subclasses of DetdiffError that opening, preparing,
    running and writing raise.
    """
    options, where = options or RunOptions(), place(path)
    opened = open_engine(scenario) if engine is None else _engine(engine)
    check_task(scenario, opened)
    opened.check(scenario)
    with ExitStack() as stack:

        def begin(own: Mapping[str, Any]) -> TraceWriter:
            writer = TraceWriter(where, header(scenario, opened, own), durable=options.durable)
            begun.append(writer)
            return stack.enter_context(writer)

        begun: list[TraceWriter] = []
        more = opened.run(scenario, begin, options)
        if not begun:
            raise EngineUnusable(
                f"The engine {opened.name} ran without beginning a trace; expected it to call begin(own) once. Correct it."
            )
        begun[0].finish(complete=True, **more)
    found = Trace.open(where)
    with suppress(TypeError):  # not all objects can be referred to weakly
        _RECORDED[found.path.resolve()] = weakref.ref(_what_ran(opened))
    return found


_RECORDED: dict[Place, weakref.ref[Any]] = {}


def _what_ran(engine: Engine) -> Any:
    """The object behind an engine, which may be wrapped more than once."""
    return getattr(engine, "given", engine)


def recorded_by(trace: Trace, engine: Engine) -> bool:
    """Whether this very engine, in this process, recorded ``trace``: the same code and weights as now."""
    found = _RECORDED.get(trace.path.resolve())
    return found is not None and found() is _what_ran(engine)


def header(scenario: Scenario, engine: Engine, own: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a trace that ``engine`` is about to write; ``own`` is what it says itself."""
    found: dict[str, Any] = {
        "scenario": scenario.to_dict(),
        "model": dict(engine.identity),
        "environment": engine.environment(),
        **own,
    }
    if engine.name != DEFAULT:
        found["engine"] = {"name": engine.name, "settings": dict(engine.settings)}
        if "engine" not in found["scenario"]:
            # An engine that was given opened: the trace's scenario is to name what ran it.
            found["scenario"]["engine"] = engine.name
    return found


def _engine(given: Any) -> Engine:
    found = as_engine(given)
    if found is None:
        raise EngineUnusable(
            f"A {type(given).__name__} is no engine; expected one, an object with generate(requests, schedule), a function, or a "
            "causal language model of transformers. Give one of them."
        )
    return found


NEIGHBOURS = 1  # positions captured on each side of a flip, an origin and a cache entry

Progress = Callable[[int, int], None]


def replay(
    a: Trace,
    b: Trace,
    divergence: Divergence | None = None,
    *,
    model: str | None = None,
    progress: Progress | None = None,
    across_models: bool = False,
) -> Divergence:
    """The divergence of ``a`` and ``b`` with magnitudes, from re-runs of both scenarios.

    ``divergence`` is what ``compare(a, b)`` gave, where it is known already; ``model`` says where the traces' model is
    now, when it is not where they were recorded with it. Values are captured around each
    request's flip, first origin and first differing cache entry. Nothing is re-run where nothing differs.
    Raises ReplayError when a re-run's model or digests are not those that the trace stored, and what loading
    and running raise.
    """
    if divergence is None:
        divergence = compare(a, b, across_models=across_models)
    for trace in (a, b):
        if not trace.complete:
            raise ReplayError(
                f"{trace.path} is incomplete, so a re-run cannot be checked against it. Expected a finished trace: record "
                "it again, or compare without replay."
            )
    places = {r.id: _positions(r) for r in divergence.requests if not r.identical}
    if not any(places.values()):
        return divergence
    scenario = Scenario.from_dict(a.scenario, where=f"the scenario of {a.path}")
    for id, positions in list(places.items()):
        # Rows that a turn kept are those of the turns before.
        for turn in scenario.turns_with(id):
            places[turn] = places.get(turn, set()) | positions
    options = RunOptions(values=places, progress=progress)
    import_again([trace.header["environment"] for trace in (a, b)])
    with tempfile.TemporaryDirectory(prefix="detdiff-replay-") as folder:
        again: list[Trace] = []
        opened: tuple[Scenario, Engine] | None = None
        for trace, side in ((a, "a"), (b, "b")):
            scenario = _moved(trace, model)
            # Both sides mostly name one engine, whose weights are staged once.
            if opened is None or not same_engine(opened[0], scenario):
                opened = scenario, open_engine(scenario)
            again.append(_run(scenario, opened[1], trace, Path(folder) / side, options))
        found = compare(*again, across_models=across_models)
        note = (
            f"replayed: both runs again, {found.compared.rows} rows; the digests are those of the traces, and values "
            "were captured around flip, origin and first cache entry"
        )
        others = changed_imports(a.header["environment"]) or changed_imports(b.header["environment"])
        told = [f"replayed with another {name} (--import) than was recorded with" for name in others]
        # The answer is about the traces that were asked about, not about the temporary ones.
        return replace(found, a=divergence.a, b=divergence.b, notes=(*divergence.notes, note, *told))


def _positions(request: RequestDivergence) -> set[int]:
    centres = [
        place.position for place in (request.flip, request.origin, request.cache_entry) if place is not None
    ]
    return {
        position
        for centre in centres
        for position in range(max(0, centre - NEIGHBOURS), centre + NEIGHBOURS + 1)
    }


def _moved(trace: Trace, model: str | None) -> Scenario:
    scenario = Scenario.from_dict(trace.scenario, where=f"the scenario of {trace.path}")
    return scenario if model is None else replace(scenario, model=model)


def _run(scenario: Scenario, engine: Engine, trace: Trace, path: Path, options: RunOptions) -> Trace:
    for key in ("config_sha256", "weights_sha256", "tokenizer_sha256"):
        if engine.identity.get(key) != trace.model.get(key):
            raise ReplayError(
                f"The model {scenario.model!r} has the {key.partition('_')[0]} hash {engine.identity.get(key)}; the trace "
                f"{trace.path} was recorded with {trace.model.get(key)}. Name the model it was recorded with, or record "
                "again."
            )
    again = record(scenario, path, engine=engine, options=options)
    check = compare(trace, again)
    if not check.identical:
        diverged = next((r for r in check.requests if not r.identical), None)
        where = "not everything could be compared"
        if diverged is not None and diverged.origin is not None:
            origin = diverged.origin
            where = f"the first difference is at {origin.site}, position {origin.position} of {diverged.id}"
        elif diverged is not None:
            where = f"request {diverged.id} diverges on the stage {diverged.stage}"
        raise ReplayError(
            f"A re-run of {trace.path} does not give the digests that it stored ({where}). Expected the same bits from "
            "the same scenario: either the machine or a version is another one (see the environment in `detdiff show`), "
            "or the run is not repeatable. Record both sides again on this machine."
        )
    return again
