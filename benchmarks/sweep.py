"""Sweeps: 64 cells of the built-in model by one process, by two, and on a Ray cluster of two processors that is up already.

The rounds alternate, and each way's workers are started anew, as a command does. The cluster's first sweep, which ships the source and
starts its workers, is not counted.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from detdiff.commands.sweep import SweepArguments, swept

GRID = Path(__file__).with_suffix(".toml")
ROUNDS = 3


@contextmanager
def _cluster() -> Iterator[bool]:
    if find_spec("ray") is None:
        yield False
        return
    import ray

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    environment = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        yield True
    finally:
        ray.shutdown()


def run() -> list[dict[str, Any]]:
    """A row for each way; seconds are medians of the rounds."""
    with tempfile.TemporaryDirectory() as place, _cluster() as there:
        ways: dict[str, dict[str, Any]] = {"--jobs 1": {"jobs": 1}, "--jobs 2": {"jobs": 2}}
        if there:
            ways["--ray"] = {"jobs": 2, "ray": "local"}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(-1, ROUNDS):
            for way, options in ways.items():
                if number < 0 and way != "--ray":
                    continue
                folder = Path(place) / f"{way}{number}"
                begun = perf_counter()
                swept(SweepArguments(GRID, folder, **options))
                if number >= 0:
                    seconds[way].append(perf_counter() - begun)
        median = {way: statistics.median(found) for way, found in seconds.items()}
        return [
            {
                "way": way,
                "seconds": each,
                "one process / this": median["--jobs 1"] / each,
                "this / --jobs 2": each / median["--jobs 2"],
            }
            for way, each in median.items()
        ]
