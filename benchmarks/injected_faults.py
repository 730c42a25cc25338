"""Injected faults one unit in the last place at 300 random places and looks for it: ``python -m benchmarks.injected_faults``.

Four architectures, both layouts; request, position, site and element are drawn from a fixed seed. A trial counts when
compare names exactly that origin and no other one.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from injected_fault_trials import Trials  # noqa: E402
from runs import Runs  # noqa: E402

TRIALS = 300


def run(trials: int = TRIALS) -> list[dict[str, Any]]:
    """One row a trial: where the fault was injected, what was named, and whether that was exactly it."""
    with tempfile.TemporaryDirectory() as directory:
        series = Trials(Runs(Path(directory)))
        return [series.run(number) for number in range(trials)]


def main() -> None:
    rows = run()
    total = Counter((row["architecture"], row["layout"]) for row in rows)
    found = Counter((row["architecture"], row["layout"]) for row in rows if row["found"])
    table = [(*key, found[key], count) for key, count in sorted(total.items())]
    print(tabulate(table, headers=("architecture", "layout", "found", "trials")))
    print(f"{sum(found.values())} of {len(rows)} found as exactly that origin")
    missed = [row for row in rows if not row["found"]]
    if missed:
        print(tabulate(missed, headers="keys"))
        sys.exit(1)


if __name__ == "__main__":
    main()
