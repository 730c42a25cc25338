"""What the pytest plugin costs a run that does not use it: one empty test, with the plugin and with it switched off."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from .paired import alternate

ROUNDS = 41


def run() -> list[dict[str, Any]]:
    """One row: medians of milliseconds of a whole run of pytest, and of the differences within a round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_empty.py").write_text("def test_empty(): pass\n", encoding="utf-8")
        # Started from here, so that no setting of another project is read.
        sides = {"with": partial(_seconds, folder), "without": partial(_seconds, folder, "-p", "no:detdiff")}
        alternate(sides, 2)
        times = alternate(sides, ROUNDS)
    differences = sorted(a - b for a, b in zip(times["with"], times["without"], strict=True))
    quarter = len(differences) // 4
    return [
        {
            "with ms": round(1e3 * median(times["with"]), 1),
            "without ms": round(1e3 * median(times["without"]), 1),
            "difference ms": round(1e3 * median(differences), 1),
            "middle half of the rounds": f"{1e3 * differences[quarter]:.1f} to {1e3 * differences[-quarter - 1]:.1f}",
        }
    ]


def _seconds(folder: Path, *arguments: str) -> float:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_empty.py"]
    start = perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return perf_counter() - start
