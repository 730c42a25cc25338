"""What recording costs: decoding with plain mlx-lm, with the untapped engine, and with digest capture.

Every step that counts pays for the digests of one earlier forward, which recording defers by two, and none pays for the
prefill's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.requests import prepare

from .decoding import SKIPPED, Clock, scenario, untapped
from .paired import alternate, ratio, spread
from .real_models import smollm2

ROUNDS = 5
STEPS = {1: 26, 4: 14}  # tokens of each request, by batch size
MODELS = {"bf16": "dense, bf16", "packed-f32": "4-bit blocks, f32"}


class _Sides:
    """The three ways to run one scenario; each returns the median seconds of a decode step."""

    def __init__(self, loaded: LoadedModel, batch: int, steps: int) -> None:
        self._loaded = loaded
        self._scenario = scenario(loaded, batch, steps)
        self._batch, self._steps = batch, steps

    def _clock(self) -> Clock:
        return Clock(self._batch, self._steps)

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
        """What ``detdiff.engines.mlx.engine.generate`` does, with a clock where it takes a token."""
        return untapped(self._loaded, self._scenario)

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
