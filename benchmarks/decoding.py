"""Greedy decoding of a few prompts with a clock on its steps, for the measurements of whole models.

A run's figure is the median time of its decode steps after the first few.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.requests import prepare
from detdiff.engines.mlx.serve import Sessions, run_unrecorded
from detdiff.engines.mlx.taps.session import Session
from detdiff.scenario import Scenario

SKIPPED = 4  # the first steps: they carry the digests of the prefill
PROMPTS = (
    "Explain in plain words why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List five things to check before a long bicycle ride.",
    "What is the difference between weather and climate?",
)


class Clock:
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


def scenario(loaded: LoadedModel, batch: int, steps: int, **more: Any) -> Scenario:
    """``batch`` requests at once, through mlx-lm's own generators; one request runs through ``generate_step``."""
    return Scenario.from_dict(
        {
            "model": str(loaded.path),
            "schedule": "serial" if batch == 1 else "static",
            "layout": "padded",
            "max_tokens": steps,
            "ignore_stop": True,
            "request": [{"prompt": prompt} for prompt in PROMPTS[:batch]],
            **more,
        }
    )


def untapped(loaded: LoadedModel, wanted: Scenario, session: Session | None = None) -> float:
    """Seconds of a step of what ``detdiff.engines.mlx.engine.generate`` does, in a session of the scenario's kernel plan."""
    clock = Clock(len(wanted.requests), wanted.requests[0].max_tokens)
    sessions = Sessions(session or Session(loaded.model, wanted.kernels))
    run_unrecorded(wanted, sessions, prepare(wanted, loaded), None, clock.token)
    return clock.step_seconds()
