"""What recording llama.cpp costs: decoding untraced, stopped after every node, with digests, and recorded into a trace.

SmolLM2 with F16 weights, one thread, streams of their own. A callback that wants to see a node makes ggml's scheduler compute up to it and
wait; ``stopped`` is that alone, all nodes seen and none read.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from detdiff.engines.base import RunOptions
from detdiff.engines.llama_cpp.context import BatchRow, LlamaContext
from detdiff.engines.llama_cpp.engine import LlamaEngine
from detdiff.engines.llama_cpp.node_loops import MODE, STOP
from detdiff.engines.record import record
from detdiff.scenario import Request, Scenario, Schedule

from .paired import alternate, ratio, spread
from .real_models import smollm2_gguf

ROUNDS = 5
PROMPT = 32
STEPS = {1: 24, 8: 12}
SKIPPED = 2


class _DecodeSides:
    """The four ways to decode; each returns the median seconds of a step."""

    def __init__(self, engine: LlamaEngine, batch: int, steps: int) -> None:
        self._engine, self._batch, self._steps = engine, batch, steps
        random = np.random.default_rng(0)
        self._prompts = random.integers(10, 40_000, (batch, PROMPT)).tolist()
        self._scenario = Scenario(
            model=str(engine.model.path),
            engine="llama.cpp",
            requests=tuple(
                Request(id=f"r{n}", tokens=tuple(each), max_tokens=steps, ignore_stop=True)
                for n, each in enumerate(self._prompts)
            ),
            schedule=Schedule("static", "packed"),
        )

    def plain(self) -> float:
        with self._engine.prepared(self._scenario) as run:
            settings = run.context.settings
        context = LlamaContext(self._engine.model, settings)
        try:
            return self._decode(context, lambda rows: None)
        finally:
            context.close()

    def stopped(self) -> float:
        with self._engine.prepared(self._scenario) as run:

            def begin(rows: list[BatchRow]) -> None:
                run.nodes.state[MODE] = STOP

            return self._decode(run.context, begin)

    def digested(self) -> float:
        with self._engine.prepared(self._scenario) as run:

            def begin(rows: list[BatchRow]) -> None:
                run.nodes.begin(np.array([(row.sequence, row.position) for row in rows], np.int64))

            return self._decode(run.context, begin)

    def recorded(self) -> float:
        times: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            options = RunOptions(
                observe=0, durable=False, progress=lambda *_: times.append(time.perf_counter())
            )
            record(self._scenario, Path(folder) / "trace", engine=self._engine, options=options)
        steps = np.diff(np.array(times).reshape(-1, self._batch)[:, -1])
        return float(median(steps[SKIPPED:]))

    def _decode(self, context: LlamaContext, begin: Callable[[list[BatchRow]], None]) -> float:
        times = []
        rows = [
            BatchRow(token, n, sequence, n == PROMPT - 1)
            for sequence, prompt in enumerate(self._prompts)
            for n, token in enumerate(prompt)
        ]
        for step in range(self._steps):
            started = time.perf_counter()
            begin(rows)
            context.decode(rows)
            asked = [n for n, row in enumerate(rows) if row.answers]
            chosen = [int(context.logits(n).argmax()) for n in asked]
            times.append(time.perf_counter() - started)
            rows = [BatchRow(token, PROMPT + step, s, True) for s, token in enumerate(chosen)]
        return float(median(times[1 + SKIPPED :]))


def run() -> list[dict[str, Any]]:
    """One row per batch: medians of milliseconds per decode step, and medians of the rounds' ratios to untraced llama.cpp."""
    engine = LlamaEngine(smollm2_gguf("f16"))
    found = []
    for batch, steps in STEPS.items():
        sides = _DecodeSides(engine, batch, steps)
        ways = {
            "plain": sides.plain,
            "stopped": sides.stopped,
            "digested": sides.digested,
            "recorded": sides.recorded,
        }
        alternate(ways, 1)
        times = alternate(ways, ROUNDS)
        found.append(
            {
                "batch": batch,
                **{f"{name} ms": round(1e3 * median(each), 1) for name, each in times.items()},
                **{
                    f"{name} / plain": round(ratio(times[name], times["plain"]), 2)
                    for name in ("stopped", "digested", "recorded")
                },
                "its rounds": spread(times["recorded"], times["plain"]),
            }
        )
    return found
