"""A trace of 1,000 requests of 2,000 tokens at 400 sites, recorded, compared and reported: ``python -m benchmarks sizes``.

Each step runs in a process of its own, so that its peak memory is its own. Side a has batches of 50, side b of 200; every
fourth request of b differs from its first projection on, from the middle of its prompt, and every hundredth flips. Two traces
of the whole size take 16 GB of disk: without so much room a tenth of the requests is measured, or what ``DETDIFF_BENCH_SHARE``
says. ``DETDIFF_BENCH_FOLDER`` says where.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from detdiff.compare import compare, series
from detdiff.report.build import build
from detdiff.report.html import html
from detdiff.trace import Trace

from .compare import Workload, peak_mb, read, write
from .pages import opened

REQUESTS, ROW_BYTES = 1000, 4100
WHOLE = Workload(requests=REQUESTS, prompt=400, tokens=1601, chunk=400, together=50)
ROUNDS = 3


def _share(folder: Path) -> float:
    """How much of the whole size is measured."""
    if "DETDIFF_BENCH_SHARE" in os.environ:
        return float(os.environ["DETDIFF_BENCH_SHARE"])
    needed = 2 * ROW_BYTES * REQUESTS * (WHOLE.prompt + WHOLE.tokens)
    return 1.0 if shutil.disk_usage(folder).free > 1.5 * needed else 0.1


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
    opens in 3 s."""
    rows = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("DETDIFF_BENCH_FOLDER")) as work:
        folder = Path(work)
        requests = max(4, round(REQUESTS * _share(folder)))
        steps = ["record a", "record b", *["read", "compare"] * ROUNDS, "report"]
        done: dict[str, list[dict[str, Any]]] = {}
        for step in steps:
            command = [sys.executable, "-m", "benchmarks.sizes", step, work, str(requests)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            done.setdefault(step, []).append(json.loads(answer))
            print(step, answer.strip(), file=sys.stderr, flush=True)
        reading = [each["processor s"] for each in done["read"]]
        for step, all_of in done.items():
            row: dict[str, Any] = {"requests": requests, "step": step}
            row |= {key: median(each[key] for each in all_of) for key in ("s", "processor s")}
            row["peak MB"] = max(each["peak MB"] for each in all_of)
            row["/ reading"] = None
            if step == "compare":
                row["/ reading"] = round(
                    median(c["processor s"] / r for c, r in zip(all_of, reading, strict=True)), 2
                )
            row["page MB"], row["open s"] = all_of[0].get("page MB"), None
            if step == "report":
                text = (folder / "report.html").read_text(encoding="utf-8")
                row["open s"] = round(opened({"report": text})["report"], 2)
            rows.append(row)
    return rows


if __name__ == "__main__":
    print(json.dumps(_step(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
