"""A whole decode step of a quantised model under a dispatch profile, against the native step of the same model.

All linear and attention sites of a step run in reference kernels, in turn with MLX's own. Weights are staged by the
first run and kept; prefill and the first steps are left out.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from detdiff.engines.mlx.taps.kernel_plan import StagedWeights
from detdiff.engines.mlx.taps.session import Session

from .decoding import scenario, untapped
from .paired import alternate, ratio, spread
from .real_models import smollm2

ROUNDS = 5
STEPS = 16
PROFILES = ("mlx-metal", "candle-metal", "ggml-metal")


def run() -> list[dict[str, Any]]:
    """One row per profile and batch: medians of milliseconds per decode step, and of the rounds' ratios."""
    loaded = smollm2("packed-f32")
    staged: StagedWeights = {}
    found = []
    for batch in (1, 4):
        sides = {}
        for name in ("native", *PROFILES):
            plan = {} if name == "native" else {"kernels": name}
            wanted = scenario(loaded, batch, STEPS, **plan)
            sides[name] = partial(
                untapped, loaded, wanted, Session(loaded.model, wanted.kernels, staged=staged)
            )
        alternate(sides, 1)
        times = alternate(sides, ROUNDS)
        found += [
            {
                "profile": name,
                "batch": batch,
                "native ms": round(1e3 * median(times["native"]), 1),
                "profile ms": round(1e3 * median(times[name]), 1),
                "profile / native": round(ratio(times[name], times["native"]), 3),
                "its rounds": spread(times[name], times["native"]),
            }
            for name in PROFILES
        ]
    return found
