"""What recording costs: decoding with plain mlx-lm, with the untapped engine, and with digest capture.

Time per decode step is the mean over the steps after the first few, so that whatever recording defers (it digests
two forwards later) is paid inside the time measured, and prefill is not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from detdiff.engine import RecordOptions, record
from detdiff.engine.padded import PaddedComposer, run_padded
from detdiff.engine.work import OnToken, prepare
from detdiff.instrument import Session
from detdiff.model import LoadedModel
from detdiff.scenario import Scenario

from .paired import alternate, ratio, spread
from .real_models import smollm2

ROUNDS = 7
STEPS = 36
SKIPPED = 4  # the first steps: they carry the digests of the prefill
MODELS = {"bf16": "dense, bf16", "packed-f32": "4-bit blocks, f32"}
PROMPTS = (
    "Explain in plain words why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List five things to check before a long bicycle ride.",
    "What is the difference between weather and climate?",
)


class _Clock:
    """Mean seconds of a decode step, from when each step's last token was known."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._tokens = 0
        self._steps: list[float] = []

    def token(self, *_: object) -> None:
        self._tokens += 1
        if self._tokens % self._batch == 0:
            self._steps.append(perf_counter())

    def step_seconds(self) -> float:
        if len(self._steps) != STEPS:
            raise RuntimeError(f"{len(self._steps)} steps were counted and {STEPS} were asked for")
        return (self._steps[-1] - self._steps[SKIPPED]) / (STEPS - 1 - SKIPPED)


def scenario(loaded: LoadedModel, batch: int) -> Scenario:
    """``batch`` requests at once, through mlx-lm's own generators; one request runs through ``generate_step``."""
    return Scenario.from_dict(
        {
            "model": str(loaded.path),
            "schedule": "serial" if batch == 1 else "static",
            "layout": "padded",
            "max_tokens": STEPS,
            "ignore_stop": True,
            "chat": True,
            "request": [{"prompt": prompt} for prompt in PROMPTS[:batch]],
        }
    )


def _plain(loaded: LoadedModel, prompts: list[list[int]]) -> float:
    """mlx-lm driven as its own documentation does it; nothing of detdiff runs."""
    clock = _Clock(len(prompts))
    if len(prompts) == 1:
        for _ in generate_step(mx.array(prompts[0]), loaded.model, max_tokens=STEPS):
            clock.token()
        return clock.step_seconds()
    generator = BatchGenerator(loaded.model, max_tokens=STEPS)
    try:
        left = len(generator.insert(prompts))
        while left:
            for answer in generator.next()[1]:
                clock.token()
                left -= answer.finish_reason is not None
    finally:
        generator.close()
    return clock.step_seconds()


def _untapped(loaded: LoadedModel, asked: Scenario) -> float:
    """What ``detdiff.engine.generate`` does, with a clock where it takes a token."""
    clock = _Clock(len(asked.requests))
    work = prepare(asked, loaded)
    session = Session(loaded.model, asked.kernels)
    with session.running(None):
        composer = PaddedComposer(work)
        session.compose = composer.compose
        on_token: OnToken = clock.token
        run_padded(loaded.model, work, asked.schedule, composer, on_token)
    return clock.step_seconds()


def _recorded(loaded: LoadedModel, asked: Scenario) -> float:
    clock = _Clock(len(asked.requests))
    with tempfile.TemporaryDirectory() as folder:
        options = RecordOptions(observe=0, progress=clock.token)
        record(asked, Path(folder) / "trace", loaded=loaded, options=options)
    return clock.step_seconds()


def _case(loaded: LoadedModel, batch: int) -> dict[str, Any]:
    asked = scenario(loaded, batch)
    prompts = [list(work.prompt) for work in prepare(asked, loaded)]
    sides: dict[str, Callable[[], float]] = {
        "plain": lambda: _plain(loaded, prompts),
        "untapped": lambda: _untapped(loaded, asked),
        "recorded": lambda: _recorded(loaded, asked),
    }
    found = alternate(sides, ROUNDS)
    plain, untapped, recorded = found["plain"], found["untapped"], found["recorded"]
    return {
        "batch": "serial" if batch == 1 else str(batch),
        **{f"{name} ms": round(1e3 * median(times), 1) for name, times in found.items()},
        "untapped / plain": round(ratio(untapped, plain), 3),
        "recorded / untapped": round(ratio(recorded, untapped), 3),
        "spread of the latter": spread(recorded, untapped),
    }


def run() -> list[dict[str, Any]]:
    """One row per model and batch: medians of milliseconds per decode step, and medians of the rounds' ratios."""
    found = []
    for layout, name in MODELS.items():
        loaded = smollm2(layout)
        found += [{"model": name, **_case(loaded, batch)} for batch in (1, 4)]
    return found
