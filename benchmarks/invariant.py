"""What invariance costs: a decode step under the pins that were found here over that of the model as it is, at batch 1, 4, 8 and 16."""

from __future__ import annotations

from typing import Any

import detdiff
from detdiff.engines.mlx.model import load
from detdiff.engines.transformers.linear_sites import load_torch

from .real_models import smollm2

COMPOSITIONS = 20


def run() -> list[dict[str, Any]]:
    """A row for each engine, model and batch. Raises what loading the models raises."""
    real = smollm2("bf16")
    return [
        *_rows("mlx", "builtin", load("builtin")),
        *_rows("mlx", "SmolLM2 bf16", real),
        *_rows("transformers", "SmolLM2 bf16", load_torch(real.path)),
    ]


def _rows(engine: str, name: str, model: Any) -> list[dict[str, Any]]:
    with detdiff.invariant(model, compositions=COMPOSITIONS) as found:
        policies = sorted({str(each.policy) for each in found.pinned})
    return [
        {
            "engine": engine,
            "model": name,
            "batch": each.batch,
            "native ms": round(1e3 * each.native, 2),
            "pinned ms": round(1e3 * each.pinned, 2),
            "price": round(each.ratio, 3),
            "quartiles": f"{each.low:.2f} to {each.high:.2f}",
            "policies": "; ".join(policies),
        }
        for each in found.price
    ]
