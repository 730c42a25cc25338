"""Sweeps: 64 cells of the built-in model by one process and by two, as commands; then by two and on a Ray cluster of two processors that
is up already, since a cluster that waits takes of both processors too.

The rounds alternate, and each way's workers are started anew. The cluster's first sweep, which ships the source and starts its workers,
is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from detdiff.commands.sweep import SweepArguments, swept

from .paired import alternate, ratio, spread

GRID = Path(__file__).with_suffix(".toml")
ROUNDS = 3
TOKENS = (24, 64)
"""Of each of a cell's two requests. Starting a worker takes as long as ten cells of the fewer."""
DIFFERS = 1
"""The exit status of a sweep in which something differs, as the cells of the other profile do."""


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
    """A row for each way; seconds are medians of the rounds, ratios those of the rounds' own."""
    with tempfile.TemporaryDirectory() as work:
        place, number = Path(work), count()

        def command(grid: Path, jobs: int) -> float:
            folder = str(place / str(next(number)))
            asked = ["-m", "detdiff.cli", "sweep", str(grid), "-o", folder, "--jobs", str(jobs)]
            begun = perf_counter()
            ended = subprocess.run([sys.executable, *asked], capture_output=True)
            if ended.returncode != DIFFERS:
                raise subprocess.CalledProcessError(ended.returncode, asked, ended.stdout, ended.stderr)
            return perf_counter() - begun

        def here(ray: str | None) -> float:
            begun = perf_counter()
            swept(SweepArguments(GRID, place / str(next(number)), jobs=2, ray=ray))
            return perf_counter() - begun

        rows: list[dict[str, Any]] = []
        for tokens in TOKENS:
            grid = place / f"{tokens}.toml"
            grid.write_text(GRID.read_text().replace("max_tokens = 24", f"max_tokens = {tokens}"))
            found = alternate({f"--jobs {jobs}": partial(command, grid, jobs) for jobs in (1, 2)}, ROUNDS)
            rows += [
                {
                    "tokens": tokens,
                    "way": way,
                    "seconds": median(seconds),
                    "one process / this": ratio(found["--jobs 1"], seconds),
                    "of rounds": spread(found["--jobs 1"], seconds),
                }
                for way, seconds in found.items()
            ]
        with _cluster() as there:
            if there:
                here("local")
                found = alternate({"two": partial(here, None), "ray": partial(here, "local")}, ROUNDS)
                rows.append(
                    {
                        "tokens": TOKENS[0],
                        "way": "--ray",
                        "seconds": median(found["ray"]),
                        "this / --jobs 2": ratio(found["ray"], found["two"]),
                        "of rounds": spread(found["ray"], found["two"]),
                    }
                )
        return rows
