"""Injected faults one path change or one unit in the last place in runs of 256 tokens: ``python -m benchmarks.minimal_change [TRIALS]``.

A trial counts when minimal_change names exactly the call, or minimal_change says that there is none and both patches name exactly the cache
entry. ``forwards`` are what all re-runs took after the two known runs, ``restarted`` what they would have taken from the
prompt, each to the end.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from control_trials import Series, Tried  # noqa: E402

TRIALS = 100
TOKENS = 256
REQUESTS = 2


def run(trials: int = TRIALS) -> list[dict[str, Any]]:
    """One row for each kind of inject."""
    with tempfile.TemporaryDirectory() as directory:
        series = Series(Path(directory), TOKENS, REQUESTS)
        return [
            _row("path change", series.path_change, trials),
            _row("unit in the last place", series.one_ulp, trials),
        ]


def _row(injected: str, trial: Callable[[int], Tried], trials: int) -> dict[str, Any]:
    tried = [trial(number) for number in range(trials)]
    forwards = sum(each.forwards for each in tried)
    restarted = sum(each.reruns * each.length for each in tried)
    return {
        "injected": injected,
        "named exactly": sum(each.right for each in tried),
        "trials": trials,
        "re-runs": sum(each.reruns for each in tried),
        "forwards": forwards,
        "restarted": restarted,
        "share %": 100 * forwards / restarted,
    }


def main() -> None:
    rows = run(int(sys.argv[1]) if len(sys.argv) > 1 else TRIALS)
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    if any(row["named exactly"] < row["trials"] or row["share %"] > 10 for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
