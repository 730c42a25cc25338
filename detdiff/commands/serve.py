"""detdiff serve: a model behind the OpenAI API, until a signal ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from detdiff.commands.start import settled, wait_for_use
from detdiff.engines.registry import DEFAULT, open_engine
from detdiff.errors import DetdiffError, ScenarioConflict, ServeFailed
from detdiff.invariance.invariant import pinned_scenario
from detdiff.invariance.policies import DECODE
from detdiff.scenario import Scenario, located, parse_flags
from detdiff.scenario.keys import FLAG_KEYS, RUN_KEYS
from detdiff.trace import Place, Trace

if TYPE_CHECKING:
    from detdiff.serving.server import RunningServer

ACTIVE = 32
"""Requests at a time, where nothing else is said."""


@dataclass(frozen=True)
class ServeArguments:
    """The arguments of serve; ``flags`` are keys of a scenario without requests."""

    model: str
    flags: str
    host: str
    port: int
    trace: Place | None
    queue: int
    body_limit: int
    grace: float
    invariant: bool = False


def serve_scenario(model: str, flags: str) -> Scenario:
    """The scenario of a server, with one request that stands for all that will come.

    Packed and continuous where nothing else is said. Raises ScenarioError.
    """
    with located("--set"):
        given = parse_flags(flags)
        wrong = next(
            (name for name in given if name in FLAG_KEYS and name not in (*RUN_KEYS, "max_tokens")), None
        )
        if wrong is not None:
            raise ScenarioConflict(
                f"{wrong} is a setting of requests, which clients send with each; send it there, or leave it out."
            )
    for name, value in (("layout", "packed"), ("schedule", "continuous"), ("active", ACTIVE)):
        if name not in given and not (name == "active" and given.get("schedule") == "serial"):
            flags = f"{flags} {name}={value}"
    return Scenario.from_flags(model, ["the first request"], flags)


def served(
    asked: ServeArguments,
    on_start: Callable[[str, str], None],
    on_pinned: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve until a signal; what there is to say in the end. ``on_start(address, model)`` is called before the first request,
    ``on_pinned`` with what was pinned, where that is asked for.

    Raises ServeFailed without the server's libraries, and what opening the model and the address and running raise.
    """
    try:
        from detdiff.serving.app import ServerBounds
        from detdiff.serving.server import RunningServer, ServeOptions
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ServeFailed(
            f"detdiff serve needs the package {error.name!r}, which is not installed; expected starlette and uvicorn. Install "
            "them with pip install 'detdiff[serve]'."
        ) from None
    scenario = serve_scenario(asked.model, asked.flags)
    if scenario.engine == DEFAULT:
        wait_for_use("torch")
    engine = open_engine(scenario)
    settled()
    if asked.invariant:
        scenario, found = pinned_scenario(engine, scenario, price=DECODE)
        on_pinned(str(found))
    bounds = ServerBounds(asked.body_limit, asked.queue, parse_flags(asked.flags).get("max_tokens"))
    options = ServeOptions(asked.host, asked.port, bounds, asked.trace, asked.grace)
    server = RunningServer(engine, scenario, options)
    on_start(server.address, scenario.model)
    # Told to end by a signal, uvicorn ends as it should and then gives the signal back.
    try:
        server.serve_all()
    except KeyboardInterrupt:
        if server.model.driver.failure is not None:
            raise server.model.driver.failure from None
    return _ended(server, asked.trace)


def _ended(server: RunningServer, trace: Place | None) -> str:
    counts = server.model.driver.counts
    said = f"Stopped after {counts.ended.total()} requests and {counts.generated_tokens:,} tokens."
    if trace is None:
        return said
    try:
        found = Trace.open(trace)
    except DetdiffError as error:
        return f"{said} {error}"
    whole = "whole" if found.complete else "incomplete"
    return f"{said} The trace {trace} is {whole}: {len(found.requests)} requests, {len(found.forwards())} forwards."
