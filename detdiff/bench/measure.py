"""Measuring policies: paired rounds in changing order, each token's time, and what each policy answers beside serial."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from detdiff.compare import Divergence, compare
from detdiff.engines.base import FORWARDS, TIMED, TOKENS, Engine, RunOptions
from detdiff.engines.record import record
from detdiff.engines.registry import SERVER
from detdiff.errors import PolicyUnusable
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .counts import CacheMemory, Counts, cache_memory, drafted, kernel_paths, recorded
from .policies import BASELINE, Policy
from .runs import TimedRun
from .simulate import simulate
from .workload import Workload

Progress = Callable[[str, int, int], None]
"""``progress(what, done, of)``."""
INCONCLUSIVE: Final = "inconclusive"


@dataclass
class PolicyResult:
    """What was measured of one policy. ``divergence`` is beside serial, None for serial itself, and ``own`` beside one request after the
    other with the policy's own kernels, draft and cache, where these are others than serial's; ``simulated`` says whether the
    counts are what was simulated; where that, or counting at all, was not possible they are None, and ``why`` is the reason."""

    policy: Policy
    runs: list[TimedRun] = field(default_factory=list)
    counts: Counts | None = None
    memory: CacheMemory | None = None
    divergence: Divergence | None = None
    own: Divergence | None = None
    simulated: bool | None = None
    why: str = ""
    texts: list[str] = field(default_factory=list)

    def pooled(self, name: str) -> list[float]:
        """The milliseconds of ``ttft``, ``tpot``, ``itl`` or ``e2el`` of all rounds."""
        return [x for run in self.runs for x in getattr(run.figures, name)]

    @property
    def flips(self) -> int:
        return 0 if self.divergence is None else sum(r.flip is not None for r in self.divergence.requests)

    @property
    def sameness(self) -> str:
        """``identical``, ``diverges, no flip``, ``flips k of n``, ``inconclusive`` where nothing that was compared differs and not all
        could be, or ``not compared`` where nothing was."""
        return "identical" if self.policy.name == BASELINE else _sameness(self.divergence)

    @property
    def invariance(self) -> str:
        """The same beside one request after the other as the policy itself computes it: ``identical`` where only the batch is another one
        and changes nothing."""
        return self.sameness if self.own is None else _sameness(self.own)


def _sameness(divergence: Divergence | None) -> str:
    if divergence is None:
        return "not compared"
    flips, count = sum(r.flip is not None for r in divergence.requests), len(divergence.requests)
    if flips:
        return f"flips {flips} of {count}"
    if divergence.inconclusive:
        return INCONCLUSIVE
    return "identical" if divergence.identical else "diverges, no flip"


@dataclass
class Measurement:
    """All policies of one workload; ``finished`` is False where it was interrupted."""

    workload: Workload
    results: list[PolicyResult]
    rounds: int
    environment: dict[str, Any]
    finished: bool = False


WALL: Final = "wall"
CLOCKS: Final[Mapping[str, Callable[[], float]]] = {WALL: time.perf_counter, "processor": time.process_time}
"""What seconds are: those that pass, or those that this process's threads compute, which no other job lengthens."""


def timed(engine: Engine, scenario: Scenario, clock: str = WALL) -> TimedRun:
    """Run a scenario without recording, in seconds of a clock of `CLOCKS`; arrivals and servers have the wall's alone.

    Raises PolicyUnusable for an engine that cannot.
    """
    now = CLOCKS[clock]
    run: Any = getattr(engine, "timed", None)
    if engine.name == SERVER:
        return _served(engine, scenario)
    if TIMED not in engine.capabilities or run is None:
        raise PolicyUnusable(
            f"The engine {engine.name} cannot be timed: it runs nothing without recording. Measure on mlx, transformers, llama.cpp or a "
            "server."
        )
    tokens: list[list[float]] = [[] for _ in scenario.requests]
    said: list[list[int]] = [[] for _ in scenario.requests]
    started = now()

    def on_start() -> None:
        nonlocal started
        started = now()

    def on_token(request: int, token: int) -> None:
        tokens[request].append(now() - started)
        said[request].append(token)

    came = run(scenario, on_start, on_token)
    seconds = now() - started
    return TimedRun(seconds, [0.0 if each is None else each - started for each in came], tokens, said)


def _served(engine: Engine, scenario: Scenario) -> TimedRun:
    """What a server's trace says of its times; recording asks nothing more of a server."""
    with tempfile.TemporaryDirectory(prefix="detdiff-bench-") as folder:
        trace = record(scenario, Path(folder) / "t", engine=engine, options=RunOptions(durable=False))
        answers = [] if TOKENS in trace.lacks else _tokens(trace)
    times = trace.header["times"]
    tokens = [list(times["requests"].get(request.id, ())) for request in scenario.requests]
    arriving = scenario.schedule.kind == "continuous"
    came = [float(request.arrival) if arriving else 0.0 for request in scenario.requests]
    return TimedRun(max((each[-1] for each in tokens if each), default=0.0), came, tokens, answers)


def answers(
    engine: Engine,
    found: Sequence[PolicyResult],
    workload: Workload,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Record each policy once: what it answers beside the first, and its counts beside those simulated. The traces are kept in
    ``folder``, by the policies' numbers."""
    options = RunOptions(observe=0, durable=False)
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="detdiff-bench-")))
        serial: list[tuple[Policy, Trace]] = []
        for number, result in enumerate(found):
            if progress is not None:
                progress(f"recording {result.policy.name}", number, len(found))
            trace = _recorded(engine, result.policy, where / str(number), options)
            result.texts = [engine.decode(tokens) for tokens in _tokens(trace)]
            _count(result, trace, workload)
            if not serial:
                serial.append((result.policy, trace))
                continue
            result.divergence = compare(serial[0][1], trace)
            alone = result.policy.alone(serial[0][0])
            known = next((each for each in serial if each[0].runs_as(alone)), None)
            if known is None:
                known = (alone, _recorded(engine, alone, where / f"{number}-alone", options))
                serial.append(known)
            if known is not serial[0]:
                result.own = compare(known[1], trace)


def _recorded(engine: Engine, policy: Policy, path: Path, options: RunOptions) -> Trace:
    with policy.held():
        return record(policy.scenario, path, engine=engine, options=options)


def _count(result: PolicyResult, trace: Trace, workload: Workload) -> None:
    if FORWARDS in trace.lacks:
        result.why = f"{trace.lacks[FORWARDS]}."
        return
    forwards = recorded(trace)
    counts = Counts.of(forwards, result.policy.slots, kernel_paths(trace))
    result.counts = replace(counts, drafted=drafted(trace))
    lengths = [(item.prompt_length, item.answer_length) for item in workload.items]
    result.memory = cache_memory(lengths, forwards)
    try:
        shapes = [(each.rows, each.shape) for each in simulate(result.policy.scenario, workload)]
        result.simulated = shapes == [(each.rows, each.shape) for each in forwards]
    except PolicyUnusable as error:
        result.why = str(error)


def _tokens(trace: Trace) -> list[list[int]]:
    """Each request's answer."""
    found = trace.generated(lens=False)
    return [[int(t) for t in found.token[found.request == n]] for n in range(len(trace.requests))]


def measure(
    engine: Engine,
    found: Sequence[PolicyResult],
    rounds: int,
    *,
    seed: int = 0,
    clock: str = WALL,
    progress: Progress | None = None,
) -> None:
    """Time every policy once in each round, after one that only warms up; the order changes from round to round.

    What was measured stays in ``found`` where this is interrupted.
    """
    order = random.Random(seed)
    total = (rounds + 1) * len(found)
    done = 0
    for number in range(rounds + 1):
        turn = list(found)
        order.shuffle(turn)
        for result in turn:
            if progress is not None:
                progress(
                    f"round {number} of {rounds}: {result.policy.name}"
                    if number
                    else f"warm-up: {result.policy.name}",
                    done,
                    total,
                )
            with result.policy.held():
                run = timed(engine, result.policy.scenario, clock)
            done += 1
            if number:
                result.runs.append(run)
