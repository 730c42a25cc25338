"""What `explain` of the reference case takes: as it is asked, with every control by name, and in the state of this repository
before controls that no rule reads any more were left out.

A process of its own each, so that what one leaves loaded is no help to the other; processor time is that of all threads, loading
included. The state before comes from the clone's history; a copy without it is not measured.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .paired import alternate, spread

ROUNDS = 3
ROOT = Path(__file__).parents[1]
BEFORE = "a9ad9088"
# Those that said something when nothing was left out.
EVERY = (
    "repeat",
    "oracle",
    "pin_kernels",
    "neighbour_content",
    "minimal_change",
    "patch_in",
    "patch_out",
    "neighbour_length",
    "dtype",
)
# Runs in both states, whose packages have these two modules' names alone in common.
EXPLAIN = """
import json, sys
from time import process_time
from detdiff.explain import explain

verdict = explain(sys.argv[1], sys.argv[2], controls=sys.argv[3:] or None)
print(json.dumps({"seconds": process_time(), "forwards": sum(c.forwards for c in verdict.controls), "kind": verdict.kind}))
"""


def run() -> list[dict[str, Any]]:
    """A row for each side: medians of processor seconds, and its share of the state before in each round.

    Raises subprocess.CalledProcessError where the clone has no such state, or a side cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        _restore(BEFORE, Path(folder))
        forwards: dict[str, int] = {}

        def side(name: str, root: Path, controls: tuple[str, ...]) -> float:
            answer = _explained(root, controls)
            forwards[name] = answer["forwards"]
            return float(answer["seconds"])

        found = alternate(
            {
                name: partial(side, name, root, controls)
                for name, root, controls in (
                    ("before", Path(folder), ()),
                    ("every control", ROOT, EVERY),
                    ("as asked", ROOT, ()),
                )
            },
            ROUNDS,
        )
    before = found["before"]
    return [
        {
            "explain": name,
            "processor s": round(median(seconds), 1),
            "forwards": forwards[name],
            "share %": round(100 * median(a / b for a, b in zip(seconds, before, strict=True))),
            "its rounds": spread(seconds, before),
        }
        for name, seconds in found.items()
    ]


def _restore(revision: str, folder: Path) -> None:
    """This repository's files of another state, in ``folder``."""
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")


def _explained(root: Path, controls: tuple[str, ...]) -> dict[str, Any]:
    case = root / "traces" / "reference-case"
    command = [
        sys.executable,
        "-c",
        EXPLAIN,
        *(str(case / f"{side}.toml") for side in ("serial", "continuous")),
        *controls,
    ]
    paths = os.pathsep.join(map(str, (root, root / "kernels")))
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True, text=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
