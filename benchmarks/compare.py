"""Times `compare` on two digest traces of 100,000 rows and 400 sites: ``python -m benchmarks.compare``.

Each case runs in a process of its own, so that its peak memory is its own. Reading both traces (opening them, and every
digest once) and comparing them (opening included) run in turn; figures are medians, and the ratio is the median of the
pairs' ratios. "bytes" is reading the files without looking at them. The files are in the page cache, which is the harder
case for compare: a disk would slow reading down and nothing else.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from tabulate import tabulate

from detdiff.compare import compare
from detdiff.trace import Generated, Rows, Site, Trace, TraceWriter, ports_of

PAIRS = 5
LAYERS = 22
CASES = ("identical", "sparse", "other order", "other order first", "dense", "origin")
BORN = 4  # the column of the first q projection's output


@dataclass(frozen=True)
class Workload:
    """How many ``requests`` of how many prompt and generated tokens; prompts are fed in chunks, and so many requests are
    ``together`` in a batch."""

    requests: int
    prompt: int
    tokens: int
    chunk: int
    together: int


LARGE = Workload(requests=8, prompt=2500, tokens=10_001, chunk=500, together=8)
# What shares an array in a recorded llama, so that the tables have as many columns as a real one's.
SAME = {
    "norm1.out": ("q.in", "k.in", "v.in", "attn.in"),
    "q.out": ("q_norm.in",),
    "q_norm.out": ("rope.q.in",),
    "rope.q.out": ("attention.in",),
    "k.out": ("rope.k.in",),
    "rope.k.out": ("write.k",),
    "v.out": ("write.v",),
    "read.read": ("read.written", "attention.kv"),
    "attention.out": ("o.in",),
    "o.out": ("attn.out",),
    "norm2.out": ("gate.in", "up.in", "mlp.in"),
    "down.out": ("mlp.out",),
}


def _layer(n: int) -> list[Site]:
    one = ("in",), ("out",)
    block, attn, mlp = f"layers.{n}", f"layers.{n}.attn", f"layers.{n}.mlp"
    names = ("q", "k", "v", "q_norm", "rope.q", "rope.k")
    kinds = ("linear", "linear", "linear", "norm", "rope", "rope")
    return [
        Site(f"{block}.norm1", "norm", n, *one, block),
        *(Site(f"{attn}.{name}", kind, n, *one, attn) for name, kind in zip(names, kinds, strict=True)),
        Site(f"{attn}.write", "cache_write", n, ("k", "v"), ("K.0", "K.1", "V.0", "V.1"), attn),
        Site(f"{attn}.read", "cache_read", n, ("written",), ("read",), attn),
        Site(f"{attn}.attention", "attention", n, ("in", "kv"), ("out",), attn),
        Site(f"{attn}.o", "linear", n, *one, attn),
        Site(attn, "attn_block", n, *one, block),
        Site(f"{block}.norm2", "norm", n, *one, block),
        *(Site(f"{mlp}.{name}", "linear", n, *one, mlp) for name in ("gate", "up", "down")),
        Site(mlp, "mlp", n, *one, block),
        Site(block, "block", n, *one),
    ]


def _sites() -> list[Site]:
    one = ("in",), ("out",)
    ends = (
        Site("norm", "norm", None, *one),
        Site("lm_head", "head", None, *one),
        Site("logits", "logits", None, *one),
    )
    return [
        Site("embed_tokens", "embedding", None, *one),
        *(s for n in range(LAYERS) for s in _layer(n)),
        *ends,
    ]


def _table(sites: Sequence[Site]) -> tuple[int, ...]:
    owner = {twin: name for name, twins in SAME.items() for twin in twins}
    columns: dict[str, int] = {}
    table = []
    for port in ports_of(sites):
        site = sites[port.site]
        prefix = "" if site.layer is None else f"layers.{site.layer}."
        short = site.name.removeprefix(prefix).removeprefix("attn.").removeprefix("mlp.") + f".{port.name}"
        table.append(columns.setdefault(prefix + owner.get(short, short), len(columns)))
    return tuple(table)


def _spans(load: Workload) -> Iterator[list[tuple[int, int, int]]]:
    """(request, start, count) of every forward: prompts in chunks, then one row of each request of a batch."""
    requests = range(load.requests)
    for group in (requests[at : at + load.together] for at in range(0, load.requests, load.together)):
        for r in group:
            yield from ([(r, start, load.chunk)] for start in range(0, load.prompt, load.chunk))
        for step in range(load.tokens - 1):
            yield [(r, load.prompt + step, 1) for r in group]


def write(path: Path, case: str, load: Workload = LARGE) -> None:
    """Write one trace; ``case`` says how it differs from the one of the case ``identical``.

    In ``dense`` and ``origin`` nearly everything differs: of a row's digests all, or all from its first projection on; in
    ``some`` that is so in every fourth request, and every hundredth flips in the middle.
    """
    if case.startswith("other order"):
        load = replace(load, together=1)
    sites = _sites()
    table = _table(sites)
    columns = max(table) + 1
    requests = [
        {"id": f"r{n}", "tokens": list(range(load.prompt)), "max_tokens": load.tokens}
        for n in range(load.requests)
    ]
    with TraceWriter(path, {"sites": sites, "requests": requests}) as writer:
        plan = {"path": "native", "rule": "", "rows": 1, "second_last": 1, "sites": f"0-{len(sites) - 1}"}
        number = writer.plan([plan])
        waiting: list[tuple[int, int, int, int]] = []
        forward = 0
        for spans in _spans(load):
            rows = [{"request": r, "slot": 0, "start": s, "count": n, "phase": "decode"} for r, s, n in spans]
            line = {
                "forward": forward,
                "phase": "decode",
                "layout": "packed",
                "shape": [1, sum(s[2] for s in spans)],
            }
            writer.forward({**line, "rows": rows, "plan": number, "caches": []})
            waiting += [(r, s, n, forward) for r, s, n in spans]
            forward += 1
            if sum(n for _, _, n, _ in waiting) >= load.chunk:
                _write_rows(writer, case, load, table, columns, waiting)
                waiting = []
        if waiting:
            _write_rows(writer, case, load, table, columns, waiting)
        writer.finish()


def _write_rows(
    writer: TraceWriter,
    case: str,
    load: Workload,
    table: tuple[int, ...],
    columns: int,
    spans: list[tuple[int, int, int, int]],
) -> None:
    request, position, forward = (
        np.concatenate(
            [
                np.full(n, r) if f is None else np.arange(s, s + n) if f else np.full(n, w)
                for r, s, n, w in spans
            ]
        )
        for f in (None, True, False)
    )
    # A row's digests follow from its request and position alone, whatever forward it is in.
    seeds = (request.astype(np.uint64) << np.uint64(32)) + position.astype(np.uint64)
    digests = (seeds[:, None] * np.uint64(0x9E3779B97F4A7C15)) ^ (
        np.arange(columns, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    )
    if case == "sparse":
        some = np.flatnonzero((request * load.tokens + position) % 1000 == 17)
        digests[some, position[some] % columns] += np.uint64(1)
    if case == "dense":
        digests[position > load.prompt // 2] += np.uint64(1)
    if case == "origin":
        digests[position > load.prompt // 2, BORN:] += np.uint64(1)
    if case == "some":
        some = np.flatnonzero((request % 4 == 3) & (position > load.prompt // 2))
        digests[some, BORN:] += np.uint64(1)
    request, position, forward = (array.astype(np.int32) for array in (request, position, forward))
    zero = np.zeros(len(request), np.int32)
    writer.rows(Rows(request, position, forward, zero, zero, zero, table, digests))
    chosen = np.flatnonzero(position >= load.prompt - 1)
    if len(chosen):
        top = np.broadcast_to(np.array([2.0, 1.0], np.float32), (len(chosen), 2))
        index = (position[chosen] - load.prompt + 1).astype(np.int32)
        flips = (request[chosen] % 100 == 3) & (index == load.tokens // 2) & (case == "some")
        token = flips.astype(np.int32)
        ids = np.stack([token, 1 - token], axis=1)
        made = Generated(request[chosen], index, token, forward[chosen], position[chosen], ids, top)
        writer.generated(made)


def read(*paths: Path) -> int:
    """Opens both traces and reads every digest once, in pieces that fit in the processor's cache."""
    size = 0
    for path in paths:
        for shard in Trace.open(path).shards:
            for table in shard.tables:
                rows, step = len(shard.table_rows(table)), max(1, (1 << 20) // (8 * shard.columns(table)))
                for start in range(0, rows, step):
                    size += shard.digests(table, start, start + step).nbytes
    return size


def _read_bytes(*paths: Path) -> None:
    """Every byte of every file of both traces into one buffer, unchecked: the least that any reader needs."""
    buffer = bytearray(1 << 20)
    for file in (file for path in paths for file in sorted(path.iterdir())):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def measure(a: Path, b: Path) -> dict[str, Any]:
    """Times and peak memory of comparing two traces in this process."""
    pairs = []
    for _ in range(PAIRS):
        times = [perf_counter()]
        _read_bytes(a, b)
        times.append(perf_counter())
        size = read(a, b)
        times.append(perf_counter())
        found = compare(Trace.open(a), Trace.open(b))
        times.append(perf_counter())
        pairs.append([stop - start for start, stop in pairwise(times)])
    return {
        "rows": found.compared.rows,
        "digests differing": found.compared.differing,
        "MB of digests": round(size / 1e6),
        "bytes s": round(median(raw for raw, _, _ in pairs), 3),
        "reading s": round(median(read for _, read, _ in pairs), 3),
        "compare s": round(median(compared for _, _, compared in pairs), 3),
        "ratio": round(median(compared / read for _, read, compared in pairs), 2),
        "peak MB": round(peak_mb()),
    }


def peak_mb() -> float:
    """Peak resident memory of this process in MB."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1e6 if sys.platform == "darwin" else 1e3)
    # Not ru_maxrss, which on Linux a process inherits from the one that started it.
    return float(status.split("VmHWM:")[1].split()[0]) / 1e3


def run() -> list[dict[str, Any]]:
    """One row a case. Target: ratio at most 2, peak at most 500 MB."""
    found = []
    with tempfile.TemporaryDirectory() as work:
        first = Path(work) / "a"
        write(first, "identical")
        for case in CASES:
            second = Path(work) / case.replace(" ", "-")
            write(second, case)
            a, b = (second, first) if case.endswith("first") else (first, second)
            command = [sys.executable, "-m", "benchmarks.compare", str(a), str(b)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append({"case": case, **json.loads(answer)})
            for file in second.iterdir():
                file.unlink()
    return found


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]))))
    else:
        print(tabulate(run(), headers="keys", tablefmt="github"))
