"""What invariance costs: a decode step under the pins that were found here over that of the model as it is, at batch 1, 4, 8 and 16."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import detdiff
from detdiff.engines.mlx.model import load
from detdiff.engines.transformers.linear_sites import load_torch

from .real_models import smollm2

COMPOSITIONS = 2
"""The price is measured here; `tests/test_invariant.py` checks compositions by the hundred."""
MODELS: dict[tuple[str, str], Callable[[], Any]] = {
    ("mlx", "builtin"): lambda: load("builtin"),
    ("mlx", "SmolLM2 f32"): lambda: smollm2("f32"),
    ("mlx", "SmolLM2 bf16"): lambda: smollm2("bf16"),
    ("transformers", "SmolLM2 bf16"): lambda: load_torch(smollm2("bf16").path),
}


def run() -> list[dict[str, Any]]:
    """A row for each engine, model and batch. Raises what loading the models raises."""
    return [row for (engine, name), model in MODELS.items() for row in _rows(engine, name, model())]


def _rows(engine: str, name: str, model: Any) -> list[dict[str, Any]]:
    start = perf_counter()

    def told(what: str, done: int, total: int) -> None:
        if done == total:
            print(f"{engine}, {name}: {what} after {perf_counter() - start:.0f} s", file=sys.stderr)

    with detdiff.invariant(model, compositions=COMPOSITIONS, on_step=told) as found:
        policies = sorted({f"{each.group.kind} {each.policy}" for each in found.pinned})
    return [
        {
            "engine": engine,
            "model": name,
            "batch": each.batch,
            "native ms": round(1e3 * each.native, 2),
            "pinned ms": round(1e3 * each.pinned, 2),
            "price": round(each.ratio, 3),
            "quartiles": f"{each.low:.2f} to {each.high:.2f}",
            "rounds": each.rounds,
            "policies": "; ".join(policies),
        }
        for each in found.price
    ]
