"""What `explain` of the reference case takes, and which controls: as it is asked, and with every control by name.

A process of its own each, so that what one leaves loaded is no help to the other; processor time is that of all threads, loading included.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from .paired import alternate, spread

ROUNDS = 3
CASE = Path(__file__).parents[1] / "traces" / "reference-case"
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


def _measured(controls: tuple[str, ...]) -> tuple[float, dict[str, int]]:
    command = [sys.executable, "-m", "benchmarks.explained", *controls]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer["seconds"], answer["forwards"]


def run() -> list[dict[str, Any]]:
    """One row: medians of processor seconds, and the median share of a round."""
    forwards: dict[str, dict[str, int]] = {}

    def side(name: str, controls: tuple[str, ...]) -> float:
        seconds, forwards[name] = _measured(controls)
        return seconds

    found = alternate(
        {"as asked": lambda: side("as asked", ()), "every control": lambda: side("every control", EVERY)},
        ROUNDS,
    )
    mine, all_of_them = found["as asked"], found["every control"]
    share = median(a / b for a, b in zip(mine, all_of_them, strict=True))
    return [
        {
            **{f"{name} s": round(median(seconds), 1) for name, seconds in found.items()},
            "share %": round(100 * share),
            "its rounds": spread(mine, all_of_them),
            **{f"{name} forwards": sum(forwards[name].values()) for name in found},
        }
    ]


def main(controls: list[str]) -> None:
    """Explain the case in this process and print what it took."""
    from time import process_time

    from detdiff.explain import explain

    verdict = explain(CASE / "serial.toml", CASE / "continuous.toml", controls=controls or None)
    forwards = {control.name: control.forwards for control in verdict.controls}
    print(json.dumps({"seconds": process_time(), "forwards": forwards}))


if __name__ == "__main__":
    main(sys.argv[1:])
