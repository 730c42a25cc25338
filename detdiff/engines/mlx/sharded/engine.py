"""ShardedEngine: a model of mlx-lm over several processes on this machine, behind the engine interface."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from detdiff.engines import base
from detdiff.engines.base import IMPORTED, Begin, RunOptions
from detdiff.errors import EngineRefuses
from detdiff.scenario import KernelPlan, Scenario
from detdiff.trace import Site, Trace, TraceWriter

from .joined import JoinedSites, join
from .processes import Processes
from .worker import ModelAsked

if TYPE_CHECKING:
    from detdiff.engines.mlx.engine import MlxEngine
    from detdiff.explain.controls.ranks import Piece
    from detdiff.explain.oracle import Operation
    from detdiff.explain.origins import Captured

    from .pieces import Pieces
    from .shares import SiteShares

CAPABILITIES: Final = frozenset(
    {
        *base.TRACE_CAPABILITIES,
        base.RESET,
        base.DTYPE,
        base.ORACLE,
        base.RANKS,
        base.SAMPLING,
        base.SERIAL,
        base.STATIC,
        base.CONTINUOUS,
        base.PREFILL_CHUNK,
        base.TEXT,
    }
)


@dataclass(eq=False)
class ShardedEngine:
    """``whole`` over ``size`` processes, which are started when the first scenario is run and kept for the next ones.

    ``whole`` stays loaded: it reads text, and the oracle takes its weights.
    """

    whole: MlxEngine
    size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = "mlx"
    capabilities: frozenset[str] = CAPABILITIES
    stateless: bool = True
    _processes: Processes | None = None
    _shares: list[SiteShares] = field(default_factory=list)
    """Of the last run, by process."""

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.whole.identity

    @property
    def processes(self) -> Processes:
        """The processes, running. Raises what loading and sharding the model raise there, and ProcessLost."""
        if self._processes is None or not self._processes.running:
            asked = ModelAsked(
                str(self.whole.loaded.path), self.settings.get("custom_code") is True, tuple(IMPORTED)
            )
            self._processes = Processes(asked, self.size)
        return self._processes

    def environment(self) -> dict[str, Any]:
        return {**self.whole.environment(), "processes": {"count": self.size, "backend": "ring, loopback"}}

    def lacks(self, capability: str) -> str:
        return f"the mlx engine over {self.size} processes has no {capability}"

    def encode(self, text: str, chat: bool) -> list[int]:
        return self.whole.encode(text, chat)

    def decode(self, ids: list[int]) -> str:
        return self.whole.decode(ids)

    def check(self, scenario: Scenario) -> None:
        """Raises EngineRefuses for what is not run over several processes."""
        wrong = next(
            (
                what
                for what, asked in (
                    ("layout packed", scenario.schedule.layout != "padded"),
                    ("a kernel plan", scenario.kernels != KernelPlan()),
                    ("a draft", scenario.speculation is not None),
                    ("an adapter", scenario.adapter_path is not None),
                    (f"task {scenario.task}", scenario.task != "generate"),
                )
                if asked
            ),
            None,
        )
        if wrong is not None:
            raise EngineRefuses(
                f"{wrong} cannot be run over {self.size} processes; expected layout padded, native kernels, task generate, no draft and no "
                "adapter, as mlx-lm's own generators run a sharded model. Leave it out, or record in one process (processes=1)."
            )
        self.whole.check(scenario)

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        """Have every process run the scenario, and join what they recorded. See ``base.Engine.run``.

        Whatever ends the run, what all processes have written is in the trace. Raises ProcessLost, and what they raise.
        """
        if options.overrides.patches or options.overrides.watch is not None:
            raise EngineRefuses(
                f"The mlx engine over {self.size} processes was asked to change or watch calls inside of a run; expected dtype or padding."
            )
        processes = self.processes
        shares: dict[int, SiteShares] = {}
        told = replace(options, progress=None)
        with tempfile.TemporaryDirectory(prefix="detdiff-ranks-") as folder:
            paths = [Path(folder) / f"rank-{rank}" for rank in range(self.size)]
            writers: list[TraceWriter] = []

            begun: dict[int, Mapping[str, Any]] = {}

            def on_message(rank: int, message: tuple[Any, ...]) -> None:
                if message[0] == "begun":
                    begun[rank], shares[rank] = message[1:]
                    if len(begun) == self.size:
                        self._shares = [shares[each] for each in range(self.size)]
                        joined = JoinedSites.of(self._shares)
                        own = {**begun[0], "sites": [site.to_json() for site in joined.sites]}
                        writers.append(begin(own))
                elif rank == 0 and message[0] == "token" and options.progress is not None:
                    options.progress(*message[1:])

            try:
                answers = processes.run([(scenario, told, path) for path in paths], on_message)
            except BaseException:
                if writers:
                    # What is left of the run must not replace what ended it.
                    with suppress(Exception):
                        join(writers[0], [Trace.open(path) for path in paths], self._shares)
                raise
            join(writers[0], [Trace.open(path) for path in paths], self._shares)
        observers = [answer["observer"] for answer in answers]
        unlike = next((each for each in observers if each.get("equal") is False), observers[0])
        return {**answers[0], "observer": unlike}

    def reset(self) -> None:
        """Ends the processes; the next run starts others."""
        if self._processes is not None:
            self._processes.end()
        self.whole.reset()

    def close(self) -> None:
        """Ends the processes."""
        if self._processes is not None:
            self._processes.end()

    @property
    def stop_tokens(self) -> Collection[int]:
        """Token ids that end a text."""
        return self.whole.stop_tokens

    def operation(
        self, site: Site, captured: Captured, request: str, rows: Sequence[int], scenario: Scenario
    ) -> Operation:
        """See ``explain.controls.oracle``: what the whole model's module makes of what its site was given."""
        return self._pieces().operation(site, captured, request, rows, scenario)

    def pieces(
        self, captured: Captured, places: Sequence[tuple[str, int, int]], scenario: Scenario
    ) -> Iterator[Piece | tuple[str, str]]:
        """See ``explain.controls.ranks``."""
        return self._pieces().of(captured, places, scenario)

    def _pieces(self) -> Pieces:
        from .pieces import Pieces

        return Pieces(self.whole, self._shares)
