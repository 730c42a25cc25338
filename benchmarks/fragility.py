"""Whether predicted flips happen: SmolLM2-135M over many prompts, one kernel for all rows against another.

How far margins move is measured on one half of the prompts and the flips of the other half are predicted from it, and the
other way round, so that no prompt predicts itself.
"""

from __future__ import annotations

import tempfile
from math import sqrt
from pathlib import Path
from typing import Any

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.model import LoadedModel
from detdiff.explain.verdict import Fragility, MarginMovements, fragility
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from .real_models import smollm2

TOKENS = 32
SUBJECTS = "bread gravity dragons gardens chess bridges volcanoes whales clocks paper tea mountains trains bees".split()
FORMS = (
    "How does {} work?",
    "Tell me a story about {}.",
    "Why do people like {}?",
    "Give me three facts about {}.",
)
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]
PATHS = {"a": "candle-metal/mv", "b": "candle-metal/mm"}
BINS = (0.0, 0.002, 0.01, 0.05, 0.15, 0.3, 0.51)


def _trace(folder: Path, loaded: LoadedModel, side: str, prompts: list[str]) -> Trace:
    flags = f"layout=packed schedule=static max_tokens={TOKENS} chat"
    keys = Scenario.from_flags("builtin", prompts, flags).to_dict()
    scenario = Scenario.from_dict(keys | {"rule": [{"site": "*", "path": PATHS[side]}]})
    return record(scenario, folder / side, loaded=loaded, options=RecordOptions(observe=0))


def _half(
    loaded: LoadedModel, prompts: list[str]
) -> tuple[tuple[Fragility, ...], MarginMovements, dict[str, int]]:
    """Every token up to each flip, how far margins moved, and where requests flip."""
    with tempfile.TemporaryDirectory() as folder:
        a, b = (_trace(Path(folder), loaded, side, prompts) for side in "ab")
        flips = {
            request.id: request.flip.index for request in compare(a, b).requests if request.flip is not None
        }
        return fragility(a, b), MarginMovements.between(a, b), flips


def run() -> list[dict[str, Any]]:
    """One row per bin of predicted chances: tokens, flips predicted and flips seen."""
    loaded = smollm2("packed-bf16")
    halves = [_half(loaded, prompts) for prompts in (PROMPTS[::2], PROMPTS[1::2])]
    outcomes: list[tuple[float, bool]] = []
    for (tokens, _, flips), (_, movements, _) in (halves, reversed(halves)):
        outcomes += [
            (movements.chance(token.margin), flips.get(token.request) == token.index) for token in tokens
        ]
    rows = []
    for low, high in [*zip(BINS[:-1], BINS[1:], strict=True), (BINS[0], BINS[-1])]:
        inside = [(chance, flipped) for chance, flipped in outcomes if low <= chance < high]
        if inside:
            predicted, seen = sum(chance for chance, _ in inside), sum(flipped for _, flipped in inside)
            spread = sqrt(sum(chance * (1 - chance) for chance, _ in inside))
            rows.append(
                {"predicted chance": f"{low:g} to {min(high, 0.5):g}", "tokens": len(inside)}
                | {"flips predicted": predicted, "give or take": spread, "flips seen": seen}
                | {"off by": abs(seen - predicted) / spread}
            )
    return rows
