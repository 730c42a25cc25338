"""What recording a decode step holds at long contexts: the peak of a process that records, less that of one that does not.

Each is a process of its own, on caches that are full already; peaks are of the decode steps alone, which Linux alone can tell.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from .contexts import MODELS, SIDES, FilledCaches

CONTEXTS = (1000, 2000, 4000, 8000)
ROUNDS = 3


def _peak(model: str, positions: int, side: str) -> float:
    """MB of this process at their highest while it decodes."""
    # What MLX keeps for later is neither side's.
    mx.set_cache_limit(0)
    with tempfile.TemporaryDirectory() as folder:
        caches = FilledCaches(MODELS[model](), positions, Path(folder) / "trace", (side,))
        caches.side(side)
        Path("/proc/self/clear_refs").write_text("5")
        caches.side(side)
    return float(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3


def _measured(model: str, positions: int, side: str) -> float:
    command = [sys.executable, "-m", "benchmarks.context_memory", model, str(positions), side]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run() -> list[dict[str, Any]]:
    """One row per model and context: medians of MB, and what recording holds of each position beside the first context's."""
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        first = 0.0
        for positions in CONTEXTS:
            found = {side: [_measured(model, positions, side) for _ in range(ROUNDS)] for side in SIDES}
            more = median(recorded - untapped for untapped, recorded in zip(*found.values(), strict=True))
            first = first or more / positions
            rows.append(
                {
                    "model": model,
                    "positions": positions,
                    **{f"{side} MB": round(median(peaks), 1) for side, peaks in found.items()},
                    "more MB": round(more, 1),
                    "more kB a position": round(1e3 * more / positions, 2),
                    "of the first": round(more / positions / first, 2),
                }
            )
    return rows


if __name__ == "__main__":
    print(_peak(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
