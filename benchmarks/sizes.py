"""A trace of 1,000 requests of 2,000 tokens at 400 sites, recorded, compared and reported: ``python -m benchmarks sizes``.

Each step runs in a process of its own, so that its peak memory is its own. Side a has batches of 50, side b of 200; every
fourth request of b differs from its first projection on, from the middle of its prompt, and every hundredth flips. All of it
ends within ``DETDIFF_BENCH_SECONDS`` (900): where recording a few requests says that the whole takes longer, or the disk has no
room for two traces of 8 GB, a tenth of the requests is measured, or what ``DETDIFF_BENCH_SHARE`` says, and a step that takes
longer all the same is ended. ``DETDIFF_BENCH_FOLDER`` says where.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from detdiff.compare import compare, series
from detdiff.errors import DetdiffError
from detdiff.report.build import build
from detdiff.report.html import html
from detdiff.trace import Trace

from .compare import Workload, peak_mb, read, write
from .pages import opened

REQUESTS, ROW_BYTES = 1000, 4100
WHOLE = Workload(requests=REQUESTS, prompt=400, tokens=1601, chunk=400, together=50)
ROUNDS = 3
SECONDS = float(os.environ.get("DETDIFF_BENCH_SECONDS", "900"))
FEW = 20
LIKE_RECORDINGS = 6
"""All steps take about as long as so many recordings of one side."""


def _requests(folder: Path, left: Callable[[], float]) -> int:
    """How many requests are measured."""
    if "DETDIFF_BENCH_SHARE" in os.environ:
        return max(4, round(REQUESTS * float(os.environ["DETDIFF_BENCH_SHARE"])))
    needed = 2 * ROW_BYTES * REQUESTS * (WHOLE.prompt + WHOLE.tokens)
    start = perf_counter()
    write(folder / "few", "identical", replace(WHOLE, requests=FEW))
    whole = (perf_counter() - start) * REQUESTS / FEW
    shutil.rmtree(folder / "few")
    fits = shutil.disk_usage(folder).free > 1.5 * needed and LIKE_RECORDINGS * whole < left()
    return REQUESTS if fits else REQUESTS // 10


def _step(what: str, folder: Path, requests: int) -> dict[str, Any]:
    """One step in this process: its seconds, peak memory and what it says of its size."""
    a, b, load = folder / "a", folder / "b", replace(WHOLE, requests=requests)
    found: dict[str, Any] = {}
    start, used = perf_counter(), process_time()
    if what == "record a":
        write(a, "identical", load)
    elif what == "record b":
        write(b, "some", replace(load, together=200))
    elif what == "read":
        found["GB"] = round(read(a, b) / 1e9, 2)
    elif what == "compare":
        answer = compare(a, b)
        found["GB"] = round(8 * answer.compared.digests / 1e9, 2)
        assert sum(request.flip is not None for request in answer.requests) == -(-(requests - 3) // 100)
        assert sum(not request.identical for request in answer.requests) == requests // 4
    else:
        traces = Trace.open(a), Trace.open(b)
        answer = compare(*traces)
        page = html(build(answer, None, series(*traces, answer), ""))
        (folder / "report.html").write_text(page, encoding="utf-8")
        found["page MB"] = round(len(page.encode()) / 1e6, 2)
    times = {"s": round(perf_counter() - start, 2), "processor s": round(process_time() - used, 2)}
    return {**times, "peak MB": round(peak_mb()), **found}


def run() -> list[dict[str, Any]]:
    """One row a step; the ratio is of processor time. Target: at most 2 times reading, 1 GB in each step, a page of 2 MB that
    opens in 3 s. Raises DetdiffError where a step does not end in time, or there is no Chromium."""
    end = perf_counter() + SECONDS

    def left() -> float:
        return end - perf_counter()

    with tempfile.TemporaryDirectory(dir=os.environ.get("DETDIFF_BENCH_FOLDER")) as work:
        folder = Path(work)
        requests = _requests(folder, left)
        done: dict[str, list[dict[str, Any]]] = {}

        def step(name: str) -> None:
            command = [sys.executable, "-m", "benchmarks.sizes", name, work, str(requests)]
            try:
                ended = subprocess.run(
                    command, check=True, capture_output=True, text=True, timeout=max(1, left())
                )
            except subprocess.TimeoutExpired:
                raise DetdiffError(
                    f"the step {name} of {requests} requests did not end within the {SECONDS:.0f} s of all steps; expected a quieter machine, or a "
                    "smaller DETDIFF_BENCH_SHARE."
                ) from None
            done.setdefault(name, []).append(json.loads(ended.stdout))
            print(name, ended.stdout.strip(), file=sys.stderr, flush=True)

        for name in ("record a", "record b"):
            step(name)
        for _ in range(ROUNDS):
            start = left()
            step("read")
            step("compare")
            if left() < 3 * (start - left()):
                # A report takes as long as two comparisons.
                break
        step("report")
        shown = opened({"report": (folder / "report.html").read_text(encoding="utf-8")})
    reading = [each["processor s"] for each in done["read"]]
    rows = []
    for name, all_of in done.items():
        row: dict[str, Any] = {"requests": requests, "step": name, "times": len(all_of)}
        row |= {key: median(each[key] for each in all_of) for key in ("s", "processor s")}
        row["peak MB"] = max(each["peak MB"] for each in all_of)
        ratios = [each["processor s"] / read for each, read in zip(all_of, reading, strict=False)]
        row["/ reading"] = round(median(ratios), 2) if name == "compare" else None
        row["page MB"] = all_of[0].get("page MB")
        row["open s"] = round(shown["report"], 2) if name == "report" else None
        rows.append(row)
    return rows


if __name__ == "__main__":
    print(json.dumps(_step(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
