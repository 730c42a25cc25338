"""Runs the measurements: ``python -m benchmarks [NAME ...] [--markdown]``.

A missed target is said, in the table and below it, and is no failure: the exit status is 0 when everything could be
measured and 2 when something could not.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from tabulate import tabulate

from detdiff.errors import DetdiffError

from .paired import machine

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """One measurement and its target: ``met`` is None for a row that has none, ``shown`` what becomes of the rows."""

    name: str
    target: str
    met: Callable[[Row], bool | None]
    shown: Callable[[list[Row]], list[Row]] = list


def _injected_faults(rows: list[Row]) -> list[Row]:
    total = Counter((row["architecture"], row["layout"]) for row in rows)
    found = Counter((row["architecture"], row["layout"]) for row in rows if row["found"])
    return [
        {"architecture": key[0], "layout": key[1], "found": found[key], "trials": count}
        for key, count in sorted(total.items())
    ]


SERVING = {"served": 1.05, "streamed": 1.05, "recorded": 1.15}
BENCHMARKS = (
    Benchmark(
        "capture",
        "recorded / untapped at most 1.10; untapped / plain at most 1.02",
        lambda row: row["recorded / untapped"] <= 1.10 and row["untapped / plain"] <= 1.02,
    ),
    Benchmark(
        "contexts",
        "recorded / untapped at most 1.10 from 2,000 positions on, 1.15 in a model of the cache alone",
        lambda row: None if row["positions"] < 2000 else row["recorded / untapped"] <= row["at most"],
    ),
    Benchmark(
        "context_memory",
        "no more for a position of a long context than for one of the first",
        lambda row: row["of the first"] <= 1.1,
    ),
    Benchmark(
        "llama",
        "recorded / plain at most 1.5",
        lambda row: row["recorded / plain"] <= 1.5,
    ),
    Benchmark(
        "kernels",
        "at least MLX's speed, twice that from 8 rows on (median of the shapes)",
        lambda row: all(row[f"M {m}"] >= (2 if m >= 8 else 1) for m in (1, 2, 4, 8, 32)),
    ),
    Benchmark(
        "steps",
        "at most the native step",
        lambda row: row["profile / native"] <= 1.0,
    ),
    Benchmark(
        "compare",
        "at most 2 times the time of reading both traces once, at most 500 MB",
        lambda row: row["ratio"] <= 2 and row["peak MB"] <= 500,
    ),
    Benchmark(
        "sizes",
        "compare at most 2 times reading, every step at most 1 GB, a page of at most 2 MB that opens in 3 s",
        lambda row: (
            row["peak MB"] <= 1000
            and (row["/ reading"] or 0) <= 2
            and (row["page MB"] or 0) <= 2
            and (row["open s"] or 0) <= 3
        ),
    ),
    Benchmark("trace_size", "digest trace at most 1% of the full trace", lambda row: row["share %"] <= 1),
    Benchmark(
        "injected_faults",
        "every injected fault found as exactly that origin",
        lambda row: row["found"] == row["trials"],
        _injected_faults,
    ),
    Benchmark(
        "minimal_change",
        "every injected fault named exactly, re-runs at most 10% of starting each from the prompt",
        lambda row: row["named exactly"] == row["trials"] and row["share %"] <= 10,
    ),
    Benchmark(
        "explained",
        "as it is asked at most half of the processor time of the state before",
        lambda row: row["share %"] <= 50 if row["explain"] == "as asked" else None,
    ),
    Benchmark(
        "fragility",
        "flips seen within three standard deviations of those predicted, in every bin",
        lambda row: row["off by"] <= 3,
    ),
    Benchmark(
        "invariant",
        "a pinned decode step at most 1.3 of the model as it is",
        lambda row: row["price"] <= 1.3,
    ),
    Benchmark(
        "client",
        "asked at most 2 % of a core at 1,000 tokens a second, which is 20 us a token",
        lambda row: row["of a core at 1,000 tokens/s, %"] <= 2,
    ),
    Benchmark(
        "serve",
        "served and streamed at most 1.05 of direct, recorded at most 1.15",
        lambda row: None if row["way"] == "direct" else row["/ direct"] <= SERVING[row["way"]],
    ),
    Benchmark(
        "sweep",
        "two processes at least 1.7 times as fast as one; a cluster at most 1.15 of two processes",
        lambda row: {
            "--jobs 2": lambda: row["one process / this"] >= 1.7,
            "--ray": lambda: row["this / --jobs 2"] <= 1.15,
        }.get(row["way"], lambda: None)(),
    ),
    Benchmark("pages", "open and usable in 3 s", lambda row: row["seconds"] <= 3),
    Benchmark("plugin", "an unused plugin costs at most 5 ms a run", lambda row: row["difference ms"] <= 5),
)


def measure(benchmark: Benchmark) -> str:
    """Run one benchmark; its target, machine, table and verdict as Markdown.

    Raises what the benchmark raises: DetdiffError, or subprocess.CalledProcessError when a model cannot be fetched.
    """
    where, start = machine(), perf_counter()
    rows = benchmark.shown(importlib.import_module(f"benchmarks.{benchmark.name}").run())
    verdicts = [benchmark.met(row) for row in rows]
    words = {True: "met", False: "missed", None: ""}
    table = [{**row, "target": words[verdict]} for row, verdict in zip(rows, verdicts, strict=True)]
    missed = verdicts.count(False)
    said = f"missed in {missed} of {len(rows) - verdicts.count(None)} rows" if missed else "met"
    return "\n\n".join(
        [
            f"`python -m benchmarks {benchmark.name}`, {perf_counter() - start:.0f} s on {where}.",
            tabulate(table, headers="keys", tablefmt="github", disable_numparse=False, floatfmt=".4g"),
            f"Target: {benchmark.target}: {said}.",
        ]
    )


def refresh(page: str, name: str, text: str) -> str:
    """``page`` with the part between the markers of ``name`` replaced; ValueError when it has no such markers."""
    first, last = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = page.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise ValueError(
            f"{PAGE.name} has no part between {first.strip()} and {last}; add the two lines to it."
        )
    return f"{before}{first}\n{text}\n\n{last}{after}"


def main() -> int:
    """Run the command line; returns the exit status."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all without")
    parser.add_argument("--markdown", action="store_true", help=f"refresh the tables of docs/{PAGE.name} too")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    status = 0
    for benchmark in BENCHMARKS:
        if arguments.names and benchmark.name not in arguments.names:
            continue
        print(f"\n## {benchmark.name}\n", flush=True)
        try:
            text = measure(benchmark)
        except (DetdiffError, subprocess.CalledProcessError) as error:
            print(f"not measured: {error}", flush=True)
            status = 2
            continue
        print(text, flush=True)
        if arguments.markdown:
            PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8"), benchmark.name, text), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
