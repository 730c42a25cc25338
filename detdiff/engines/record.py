"""record: a scenario in, a trace out, with whatever engine it names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from detdiff.engines.base import Engine, RunOptions
from detdiff.engines.registry import DEFAULT, as_engine, open_engine
from detdiff.errors import EngineUnusable
from detdiff.scenario import Scenario
from detdiff.trace import Trace, TraceWriter


def record(
    scenario: Scenario,
    path: Path | str,
    *,
    engine: Any = None,
    options: RunOptions | None = None,
) -> Trace:
    """Run ``scenario`` and write its trace to the new directory ``path``.

    ``engine`` is the scenario's engine where it is opened already (or an object that ``registry.as_engine`` takes). An
    interrupted run leaves every finished shard readable. Raises the subclasses of DetdiffError that opening, preparing,
    running and writing raise.
    """
    options = options or RunOptions()
    opened = open_engine(scenario) if engine is None else _engine(engine)
    opened.check(scenario)
    with ExitStack() as stack:

        def begin(own: Mapping[str, Any]) -> TraceWriter:
            writer = TraceWriter(Path(path), header(scenario, opened, own), durable=options.durable)
            begun.append(writer)
            return stack.enter_context(writer)

        begun: list[TraceWriter] = []
        more = opened.run(scenario, begin, options)
        if not begun:
            raise EngineUnusable(
                f"The engine {opened.name} ran without beginning a trace; expected it to call begin(own) once. Correct it."
            )
        begun[0].finish(complete=True, **more)
    return Trace.open(Path(path))


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
