"""One process of several that run a model: loads it, keeps its share, and runs scenarios that it is told, each into a trace of its own.

Started by ``processes.Processes`` as ``python -m detdiff.engines.mlx.sharded.worker CONNECTION LIFELINE``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from detdiff.engines.base import RunOptions
from detdiff.errors import DetdiffError
from detdiff.scenario import Scenario

SHARD_FORWARDS = 4
"""A process may be ended at any time, and what it wrote is to be read then."""


@dataclass(frozen=True)
class ModelAsked:
    """What a process is to load: as ``engine.open_mlx`` takes it. ``imports`` are the user's modules, imported before."""

    model: str
    custom_code: bool
    imports: tuple[str, ...]


def main(connection: Connection, lifeline: int) -> None:
    """Serve until the parent closes the connection."""
    # A process that waits for another one inside of mlx hears of nothing else.
    threading.Thread(target=_ends_with, args=(lifeline,), daemon=True).start()
    try:
        served = _Served.opened(connection.recv())
    except (DetdiffError, RuntimeError, ImportError) as error:
        connection.send(_failed(error))
        return
    connection.send(("ready", served.rank))
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        try:
            more = served.run(connection, *asked)
        except (DetdiffError, RuntimeError, ValueError, OSError) as error:
            connection.send(_failed(error))
        else:
            connection.send(("done", more))


def _ends_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _failed(error: BaseException) -> tuple[str, str, str]:
    name = type(error).__name__ if isinstance(error, DetdiffError) else ""
    return "failed", name, str(error)


class _Served:
    """A share of a model, ready to run."""

    def __init__(self, loaded: Any, group: Any) -> None:
        self._loaded, self._group = loaded, group
        self.rank = int(group.rank())

    @classmethod
    def opened(cls, asked: ModelAsked) -> _Served:
        import mlx.core as mx

        from detdiff.engines.mlx.model import load
        from detdiff.engines.mlx.taps.session import Session
        from detdiff.engines.registry import import_before_runs

        from .shares import ModelShare, shard

        group = mx.distributed.init(strict=True, backend="ring")
        for name in asked.imports:
            import_before_runs(name)
        loaded = load(asked.model, custom_code=asked.custom_code)
        share = ModelShare(Session(loaded.model).sites, group.rank(), group.size())
        shard(loaded.model, group)
        mx.eval(loaded.model.parameters())
        share.placed(Session(loaded.model).sites)
        return cls(replace(loaded, share=share), group)

    def run(
        self, connection: Connection, scenario: Scenario, options: RunOptions, folder: Path
    ) -> Mapping[str, Any]:
        """Run a scenario into the new directory ``folder``; ``(told, first of pair)`` of progress go to the parent."""
        from detdiff.engines.record import header
        from detdiff.engines.registry import mlx_engine
        from detdiff.trace import TraceWriter

        engine = mlx_engine(self._loaded)
        with ExitStack() as stack:
            begun: list[TraceWriter] = []

            def begin(own: Mapping[str, Any]) -> TraceWriter:
                told = header(scenario, engine, own)
                writer = TraceWriter(folder, told, durable=False, shard_forwards=SHARD_FORWARDS)
                begun.append(stack.enter_context(writer))
                connection.send(("begun", dict(own), self._loaded.share.last))
                return writer

            faults = [each for each in options.faults if hasattr(each, "in_process")]
            others = tuple(each for each in options.faults if each not in faults)
            for fault in faults:
                stack.enter_context(fault.in_process(self._loaded.model, self._group))

            def progress(count: int, total: int) -> None:
                connection.send(("token", count, total))

            more = engine.run(scenario, begin, replace(options, faults=others, progress=progress))
            begun[0].finish(complete=True, **more)
        return more


def asked_of(arguments: Iterable[str]) -> tuple[Connection, int]:
    """The connection and the lifeline that the process was started with."""
    connection, lifeline = map(int, arguments)
    return Connection(connection), lifeline


if __name__ == "__main__":
    from detdiff.engines.mlx.sharded.worker import asked_of, main

    main(*asked_of(sys.argv[1:]))
