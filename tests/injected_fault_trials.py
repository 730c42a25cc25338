"""Trials of the detector: one unit in the last place, injected at random, must be found there and nowhere else."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from runs import Ports, Runs, digests, model, scenario

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.scenario import Scenario
from detdiff.trace import Trace

SUITES = (
    ("llama", "bf16", "padded"),
    ("qwen3", "q4", "packed"),
    ("gemma3_text", "f32", "padded"),
    ("qwen3_moe", "f32", "packed"),
    ("llama", "f32", "packed"),
    ("qwen3", "f32", "padded"),
    ("gemma3_text", "bf16", "packed"),
    ("qwen3_moe", "q4", "padded"),
)


@dataclass(frozen=True)
class Ground:
    """What trials of one suite share: the sound run, and every row of every site that has an output."""

    base: Trace
    asked: Scenario
    digests: Ports
    places: tuple[tuple[int, int, str], ...]


class Trials:
    """Trial ``n`` is drawn from the seed and n, so that one can be repeated alone."""

    def __init__(self, runs: Runs, seed: int = 0) -> None:
        self._runs, self._seed = runs, seed
        self._grounds: dict[tuple[str, str, str], Ground] = {}

    def ground(self, suite: tuple[str, str, str]) -> Ground:
        if suite not in self._grounds:
            arch, fmt, layout = suite
            # 35 rows of a prompt at once: enough for an expert model to sort them by expert.
            lengths = (12, 3, 35) if arch == "qwen3_moe" else (12, 3, 21)
            asked = scenario("continuous", layout, arrivals=(0, 2, 5), lengths=lengths, max_tokens=6)
            base = self._runs.record(model(arch, fmt), asked)
            found = digests(base)
            fed = [len(r["tokens"]) + r["max_tokens"] - 1 for r in base.requests]
            places = sorted({key[:3] for key in found if key[3] == "out" and key[1] < fed[key[0]]})
            self._grounds[suite] = Ground(base, asked, found, tuple(places))
        return self._grounds[suite]

    def run(self, number: int) -> dict[str, Any]:
        """One trial: where the fault was injected, and what was found; ``found`` says whether that is right."""
        suite = SUITES[number % len(SUITES)]
        ground = self.ground(suite)
        draw = random.Random(f"{self._seed} {number}")
        request, position, site = draw.choice(ground.places)
        injected_fault = InjectedFault(site, request, position, draw.randrange(1 << 16))
        other = self._runs.record(
            model(*suite[:2]), ground.asked, RecordOptions(observe=0, faults=(injected_fault,))
        )
        divergence = compare(ground.base, other)
        named = [(r.id, r.origin.site, r.origin.position) for r in divergence.requests if r.origin]
        count = sum(origin.count for r in divergence.requests for origin in r.origins)
        right = named == [(f"r{request}", site, position)] and count == 1
        arch, fmt, layout = suite
        return {
            "trial": number,
            "architecture": arch,
            "format": fmt,
            "layout": layout,
            "site": site,
            "request": f"r{request}",
            "position": position,
            "element": injected_fault.element,
            "named": named,
            "origins": count,
            "found": right and not divergence.identical,
        }
