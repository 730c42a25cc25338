"""What recording costs: decoding with plain mlx-lm, with the untapped engine, and with digest capture.

A run's figure is the median time of its decode steps after the first few. Every step then pays for the digests of one
earlier forward, which recording defers by two, and none pays for the prefill's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from detdiff.engine import RecordOptions, record
from detdiff.engine.padded import PaddedComposer, run_padded
from detdiff.engine.work import prepare
from detdiff.instrument import Session
from detdiff.model import LoadedModel
from detdiff.scenario import Scenario

from .paired import alternate, ratio, spread
from .real_models import smollm2

ROUNDS = 5
STEPS = {1: 26, 4: 14}  # tokens of each request, by batch size
SKIPPED = 4  # the first steps: they carry the digests of the prefill
MODELS = {"bf16": "dense, bf16", "packed-f32": "4-bit blocks, f32"}
PROMPTS = (
    "Explain in plain words why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List five things to check before a long bicycle ride.",
    "What is the difference between weather and climate?",
)


class _Clock:
    """Median seconds of a decode step, from when each step's last token was known."""

    def __init__(self, batch: int, steps: int) -> None:
        self._batch = batch
        self._expected = steps
        self._tokens = 0
        self._steps: list[float] = []

    def token(self, *_: object) -> None:
        self._tokens += 1
        if self._tokens % self._batch == 0:
            self._steps.append(perf_counter())

    def step_seconds(self) -> float:
        if len(self._steps) != self._expected:
            raise RuntimeError(f"{len(self._steps)} steps were counted; {self._expected} were asked for")
        return median(after - before for before, after in pairwise(self._steps[SKIPPED:]))


def _scenario(loaded: LoadedModel, batch: int, steps: int) -> Scenario:
    """``batch`` requests at once, through mlx-lm's own generators; one request runs through ``generate_step``."""
    return Scenario.from_dict(
        {
            "model": str(loaded.path),
            "schedule": "serial" if batch == 1 else "static",
            "layout": "padded",
            "max_tokens": steps,
            "ignore_stop": True,
            "request": [{"prompt": prompt} for prompt in PROMPTS[:batch]],
        }
    )


class _Sides:
    """The three ways to run one scenario; each returns the median seconds of a decode step."""

    def __init__(self, loaded: LoadedModel, batch: int, steps: int) -> None:
        self._loaded = loaded
        self._scenario = _scenario(loaded, batch, steps)
        self._batch, self._steps = batch, steps

    def _clock(self) -> _Clock:
        return _Clock(self._batch, self._steps)

    def plain(self) -> float:
        """mlx-lm driven as its own documentation does it; nothing of detdiff runs."""
        clock = self._clock()
        prompts = [list(work.prompt) for work in prepare(self._scenario, self._loaded)]
        if len(prompts) == 1:
            for _ in generate_step(mx.array(prompts[0]), self._loaded.model, max_tokens=self._steps):
                clock.token()
            return clock.step_seconds()
        generator = BatchGenerator(self._loaded.model, max_tokens=self._steps)
        try:
            left = len(generator.insert(prompts))
            while left:
                for answer in generator.next()[1]:
                    clock.token()
                    left -= answer.finish_reason is not None
        finally:
            generator.close()
        return clock.step_seconds()

    def untapped(self) -> float:
        """What ``detdiff.engine.generate`` does, with a clock where it takes a token."""
        clock = self._clock()
        work = prepare(self._scenario, self._loaded)
        session = Session(self._loaded.model, self._scenario.kernels)
        with session.running(None):
            composer = PaddedComposer(work)
            session.compose = composer.compose
            run_padded(self._loaded.model, work, self._scenario.schedule, composer, clock.token)
        return clock.step_seconds()

    def recorded(self) -> float:
        """``record`` at the digest level, without its check that recording changed nothing."""
        clock = self._clock()
        with tempfile.TemporaryDirectory() as folder:
            options = RecordOptions(observe=0, progress=clock.token)
            record(self._scenario, Path(folder) / "trace", loaded=self._loaded, options=options)
        return clock.step_seconds()


def _sides(sides: _Sides) -> dict[str, Callable[[], float]]:
    return {"plain": sides.plain, "untapped": sides.untapped, "recorded": sides.recorded}


def _case(loaded: LoadedModel, batch: int) -> dict[str, Any]:
    # Loads weights into memory and compiles what compiles at first use.
    alternate(_sides(_Sides(loaded, batch, SKIPPED + 2)), 1)
    found = alternate(_sides(_Sides(loaded, batch, STEPS[batch])), ROUNDS)
    plain, untapped, recorded = found["plain"], found["untapped"], found["recorded"]
    return {
        "batch": "serial" if batch == 1 else str(batch),
        **{f"{name} ms": round(1e3 * median(times), 1) for name, times in found.items()},
        "untapped / plain": round(ratio(untapped, plain), 3),
        "recorded / untapped": round(ratio(recorded, untapped), 3),
        "its rounds": spread(recorded, untapped),
    }


def run() -> list[dict[str, Any]]:
    """One row per model and batch: medians of milliseconds per decode step, and medians of the rounds' ratios."""
    found = []
    for layout, name in MODELS.items():
        loaded = smollm2(layout)
        found += [{"model": name, **_case(loaded, batch)} for batch in (1, 4)]
    return found
