#!/usr/bin/env python3
"""Write the tables of docs/verdicts.md: the rules, and the verdicts over injected cases.

python tools/verdict_matrix.py                       both; runs every case over ten seeds, for many minutes
python tools/verdict_matrix.py --rules               the rules alone
python tools/verdict_matrix.py --rules --check       exit status 1 when they are out of date
python tools/verdict_matrix.py --seeds 2 --cases 1,6 fewer trials; printed, not written
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from detdiff.explain.rules import TABLE_END, TABLE_START, table
from detdiff.explain.verdict import KINDS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "verdicts.md"
MATRIX_START, MATRIX_END = "<!-- matrix -->", "<!-- end of matrix -->"
SEEDS = 10
# What the cases without a verdict of their own may be called: their answer is that of `compare`.
SETTLED = "by compare"


def put(text: str, start: str, end: str, body: str) -> str:
    """``text`` with ``body`` between two marks."""
    found = re.compile(f"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
    assert len(found.findall(text)) == 1, f"{start} is not in {TARGET.name} once"
    return found.sub(lambda _: f"{start}\n{body}\n{end}", text)


def cases() -> dict[int, Any]:
    """The injected cases, which live with the tests."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]
    from cases import CASES

    found: dict[int, Any] = dict(sorted(CASES.items()))
    return found


def run(case: Any, seeds: Iterable[int]) -> Counter[str]:
    """How often each verdict was given."""
    from detdiff.explain import DECIDING, explain

    found: Counter[str] = Counter()
    for seed in seeds:
        trial = case.trial(seed)
        started = time.perf_counter()
        with trial.around:
            verdict = explain(
                trial.scenario_a, trial.scenario_b, controls=DECIDING, loaded=trial.loaded, draft=trial.draft
            )
        found[verdict.kind] += 1
        seconds = time.perf_counter() - started
        print(
            f"case {case.number}, seed {seed}: {verdict.kind} ({verdict.rule}), {seconds:.1f} s",
            file=sys.stderr,
        )
    return found


def matrix(results: dict[int, tuple[Any, Counter[str]]]) -> str:
    """The confusion matrix as a Markdown table, and what is confused in it."""
    lines = [
        f"| | kind | wanted | {' | '.join(KINDS)} |",
        f"|---|---|---|{'---|' * len(KINDS)}",
    ]
    for number, (case, found) in results.items():
        cells = " | ".join(str(found[kind] or "") for kind in KINDS)
        lines.append(f"| {number} | {case.kind} | {case.verdict or SETTLED} | {cells} |")
    trials = sum(sum(found.values()) for _, found in results.values())
    wanted = [(case, found) for case, found in results.values() if case.verdict is not None]
    right = sum(found[case.verdict] for case, found in wanted)
    confused = [
        f"{sum(found[given] for case, found in wanted if case.verdict == kind)} `{kind}` called `{given}`"
        for kind, given in (("bug", "numerics"), ("numerics", "bug"))
    ]
    of = sum(sum(found.values()) for _, found in wanted)
    lines += ["", f"{trials} trials; {right} of {of} with a wanted verdict got it; {', '.join(confused)}."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--cases", help="numbers, as 1,6,8")
    asked = parser.parse_args(arguments)
    if asked.check:
        text = TARGET.read_text(encoding="utf-8")
        return int(put(text, TABLE_START, TABLE_END, table()) != text)
    found = None
    if not asked.rules:
        every = cases()
        chosen = [int(number) for number in asked.cases.split(",")] if asked.cases else list(every)
        results = {number: (every[number], run(every[number], range(asked.seeds))) for number in chosen}
        found = matrix(results)
        if asked.cases or asked.seeds < SEEDS:
            print(found)
            return 0
    # Read now, as the page may have been edited while the cases ran.
    text = put(TARGET.read_text(encoding="utf-8"), TABLE_START, TABLE_END, table())
    if found is not None:
        text = put(text, MATRIX_START, MATRIX_END, found)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
