#!/usr/bin/env python3
"""Measure what docs/bench.md puts beside the sources' figures, and write it there from the runs' JSON.

python tools/bench_page.py measure DIR   runs the page's commands in DIR, each into a folder of its own (minutes)
python tools/bench_page.py write DIR     writes the page from the JSON in DIR

DIR has SMOL-Q8_0.gguf and SMOL-bf16, made as the page says.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from tabulate import tabulate

from detdiff.bench.counts import cache_memory
from detdiff.bench.policies import Policy
from detdiff.bench.simulate import simulate
from detdiff.bench.workload import WorkItem, Workload
from detdiff.scenario import Scenario

TARGET: Final = Path(__file__).resolve().parent.parent / "docs" / "bench.md"
LEVELS: Final = (2, 4, 8, 16)
_LENGTHS = (
    "--clock processor --requests 24 --prompt-lengths exponential:5 --answer-lengths exponential:6 --rounds 3"
)
_SHORT = (
    "--clock processor --requests 24 --prompt-lengths exponential:4 --answer-lengths exponential:4 --rounds 2"
)
_STATIC = " ".join(f"--policy static:{n}" for n in LEVELS)
_BOTH = f"{_STATIC} " + " ".join(f"--policy continuous:{n}" for n in LEVELS)
_LLAMA = "--model SMOL-Q8_0.gguf --engine llama.cpp"
_TORCH = "--model SMOL-bf16 --engine transformers --set engine.threads=1"
_SPLIT = "--clock processor --find-split --answer-lengths 8"
COMMANDS: Final = {
    "mlx": f"detdiff bench --model builtin {_LENGTHS} {_BOTH} -o mlx",
    "llama": f"detdiff bench {_LLAMA} --set engine.unified=true {_SHORT} {_BOTH} -o llama",
    "torch": f"detdiff bench {_TORCH} {_LENGTHS} {_BOTH} -o torch",
    "split-llama": f"detdiff bench {_LLAMA} {_SPLIT} --requests 8 --rounds 3 -o split-llama",
    "split-candle": f"detdiff bench --model builtin --set kernels=candle-metal --set layout=packed {_SPLIT} --requests 5 --rounds 3 -o split-candle",
    "split-mlx": f"detdiff bench --model builtin {_SPLIT} --requests 5 --rounds 3 -o split-mlx",
    "split-torch": f"detdiff bench {_TORCH} {_SPLIT} --requests 4 --rounds 2 -o split-torch",
    "sources": "detdiff bench --model builtin --set layout=packed --simulate --requests 256 --prompt-lengths 512 --answer-lengths exponential:128 "
    "--policy static:8 --policy continuous:8 -o sources",
}
NAMES: Final = {
    "mlx": "mlx, the built-in model",
    "llama": "llama.cpp, SmolLM2 in Q8_0, one thread",
    "torch": "transformers, SmolLM2 in bfloat16, one thread",
    "split-llama": "llama.cpp, SmolLM2 in Q8_0",
    "split-candle": "mlx, the built-in model, profile `candle-metal`",
    "split-mlx": "mlx, the built-in model",
    "split-torch": "transformers, SmolLM2 in bfloat16",
}
Json = Mapping[str, Any]


class Costs:
    """What a forward and a computed row cost an engine, in seconds, fitted to the times of its policies; no less than 0."""

    def __init__(self, policies: Sequence[Json]) -> None:
        points = [(*counted(each), seconds(each)) for each in policies]
        matrix = np.array([[forwards / t, rows / t] for forwards, rows, t in points])
        both = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
        if (both < 0).any():
            one = int(both.argmax())
            both = np.zeros(2)
            both[one] = np.linalg.lstsq(matrix[:, one : one + 1], np.ones(len(points)), rcond=None)[0][0]
        self.forward, self.row = (float(x) for x in both)
        self.worst = float(np.abs(matrix @ both - 1).max())

    def time(self, forwards: float, rows: float) -> float:
        return self.forward * forwards + self.row * rows


def counted(policy: Json) -> tuple[int, int]:
    """Forwards, and rows computed in them, padding included."""
    counts = policy["detdiff"]["counts"]
    return counts["forwards"], counts["rows"] + counts["padding"]


def seconds(policy: Json) -> float:
    return float(policy["total_output_tokens"]) / float(policy["detdiff"]["throughput"]["median"])


def spread(found: Json | None, form: str = ".2f") -> str:
    return (
        "-" if found is None else f"{found['median']:{form}} ({found['low']:{form}}–{found['high']:{form}})"
    )


def policies_of(found: Json) -> dict[str, Json]:
    return {each["label"]: each for each in found["policies"]}


def factors(found: Json) -> str:
    """Throughput of each policy over serial's and over naive batches, and what the counts explain of the latter."""
    by_name = policies_of(found)
    costs = Costs(list(by_name.values()))
    serial, rows = by_name["serial"], []
    for n in LEVELS:
        static, other = by_name[f"static:{n}"], by_name[f"continuous:{n}"]
        cells = [n]
        for each in (static, other):
            expected = costs.time(*counted(serial)) / costs.time(*counted(each))
            cells += [spread(each["detdiff"]["factor"]), f"{expected:.2f}", each["detdiff"]["answers"]]
        forwards, computed = counted(static)
        useful = static["detdiff"]["counts"]["rows"]
        mine = counted(other)
        waiting = costs.time(forwards, useful) / costs.time(mine[0], useful)
        counts = costs.time(forwards, computed) / costs.time(*mine)
        whole = seconds(static) / seconds(other)
        cells += [f"{x:.2f}" for x in (whole, waiting, counts / waiting, whole / counts)]
        rows.append(cells)
    headers = [
        "at once",
        "static to serial",
        "by counts",
        "answers",
        "continuous to serial",
        "by counts",
        "answers",
    ]
    headers += ["continuous to static", "waiting", "padding", "rest"]
    text = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
    fit = (
        f"A forward costs {costs.forward * 1e3:.2f} ms and a row of it {costs.row * 1e3:.2f} ms here, fitted to the {len(by_name)} policies "
        f"(the worst is {costs.worst:.0%} off)."
    )
    return f"{text}\n\n{fit} {memory(found, costs)}{where(found)}"


def memory(found: Json, costs: Costs) -> str:
    """What bigger batches gain where caches are paged: as many positions as contiguous caches of 4 requests take."""
    by_name = policies_of(found)
    first = by_name["serial"]
    lengths = list(zip(first["input_lens"], first["output_lens"], strict=True))
    budget = 4 * max(p + a for p, a in lengths)
    held = cache_memory(lengths, (), budget=budget).most_paged
    small = by_name["continuous:4"]
    assert held is not None
    nearest = min(LEVELS, key=lambda n: abs(n - held))
    large = by_name[f"continuous:{nearest}"]
    explained = costs.time(*counted(small)) / costs.time(*counted(large))
    return (
        f"Memory: {budget:,} positions hold 4 contiguous caches of the longest request, and in pages of 16 {held:.1f} requests on average; "
        f"{nearest} at once are {seconds(small) / seconds(large):.2f} times as fast as 4, of which the counts explain {explained:.2f}. "
    )


def where(found: Json) -> str:
    machine = found["environment"]
    rounds = (
        min((each["detdiff"]["rounds"] for each in found["policies"]), default=0)
        if "policies" in found
        else found["rounds"]
    )
    return (
        f"Medians of {rounds} paired rounds (least to largest), in processor seconds; {machine['chip']}, {machine['cores']} cores, load {machine['load']:.1f} before and "
        f"{machine['load_after']:.1f} after."
    )


def splits(all_found: Mapping[str, Json]) -> str:
    """Two requests at once by engine, and where one batch starts to pay."""
    rows = []
    for name in (name for name in COMMANDS if name.startswith("split-") and name in all_found):
        found = all_found[name]
        two = found["levels"][0]
        shown = [
            spread(two[way]["throughput"], ".1f") if way in two else "-"
            for way in ("serial", "whole", "split")
        ]
        pays = found["pays_from"] or f"more than {found['levels'][-1]['at_once']}"
        rows.append(
            [
                NAMES[name],
                *shown,
                f"{two['calls_to_row_by_row']:.2f}",
                pays,
                found["split_rows"] or "-",
                f"{found['environment']['load']:.1f}–{found['environment']['load_after']:.1f}",
            ]
        )
    headers = [
        "two at once, tokens/s",
        "one by one",
        "one batch",
        "rows split",
        "calls",
        "pays from",
        "split_rows",
        "load",
    ]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def crossing(found: Json) -> str:
    """All levels of one engine."""
    rows = [
        [
            each["at_once"],
            f"{each['calls_to_row_by_row']:.2f}",
            *(spread(each[way]["throughput"], ".1f") for way in ("serial", "whole", "split")),
            spread(each["gain"]),
        ]
        for each in found["levels"]
    ]
    headers = ["at once", "calls", "one by one", "one batch", "rows split", "batch to split"]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True) + f"\n\n{where(found)}"


def sources(found: Json) -> str:
    """The picture of 23, 8 and 4 times, in forwards: what waiting and memory explain where a forward costs the same whatever its rows."""
    by_name = policies_of(found)
    first = by_name["static:8"]["detdiff"]["counts"]
    lengths = list(zip(found["workload"]["input_lens"], found["workload"]["output_lens"], strict=True))
    items = tuple(WorkItem(*each) for each in lengths)
    held = cache_memory(lengths, (), budget=8 * max(p + a for p, a in lengths)).most_paged
    assert held is not None
    at_once = int(held)
    paged = simulate(_packed(at_once), Workload(items, "the same"))
    rows: list[Sequence[object]] = []
    for name, forwards in (
        ("naive, `static:8`", first["forwards"]),
        ("iteration by iteration, `continuous:8`", by_name["continuous:8"]["detdiff"]["counts"]["forwards"]),
        (
            f"and in pages, which hold {at_once} at once in the same memory, `continuous:{at_once}`",
            len(paged),
        ),
    ):
        rows.append((name, f"{forwards:,}", f"{first['forwards'] / forwards:.1f}"))
    headers = ["256 requests of 512 tokens, answers exponential with mean 128", "forwards", "times fewer"]
    waiting, both = (
        first["forwards"] / n for n in (by_name["continuous:8"]["detdiff"]["counts"]["forwards"], len(paged))
    )
    said = (
        f"Where a forward costs the same whatever its rows, {waiting:.1f} of 8 times is waiting, and {8 / waiting:.1f} times is left to explain; of 23 times "
        f"waiting and memory are {both:.1f}, and the {23 / both:.1f} times that are left must be kernels and the engine around them, as the source's own 4 times "
        "of an optimised model under the naive schedule are."
    )
    return f"{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}\n\n{said}"


def _packed(at_once: int) -> Scenario:
    keys = {"model": "builtin", "layout": "packed", "schedule": "continuous", "active": at_once}
    return Policy("", Scenario.from_dict({**keys, "request": [{"tokens": [0]}]})).scenario


def blocks(found: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """The page's blocks by name, of what was measured."""
    yield "commands", "\n".join(f"    {command}" for command in COMMANDS.values())
    for name in ("mlx", "llama", "torch"):
        if name in found:
            yield name, f"**{NAMES[name]}**\n\n{factors(found[name])}"
    if any(name.startswith("split-") for name in found):
        yield "splits", splits(found)
    if "split-llama" in found:
        yield "crossing", crossing(found["split-llama"])
    if "sources" in found:
        yield "sources", sources(found["sources"])


def replaced(page: str, found: Mapping[str, Json]) -> str:
    """The page with its blocks written anew."""
    for name, text in blocks(found):
        first, last = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = page.partition(first)
        _, found_end, after = rest.partition(last)
        if not found_end:
            raise SystemExit(f"The page has no block {name}; expected {first.strip()} and {last}.")
        page = f"{before}{first}{text}\n{last}{after}"
    return page


def measure(folder: Path, only: Sequence[str]) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    for name, command in COMMANDS.items():
        if not only or name in only:
            subprocess.run(shlex.split(command), cwd=folder, env=environment, check=True)


def loaded(folder: Path) -> dict[str, Json]:
    """The JSON of what was measured, by the commands' names."""
    paths = {
        name: folder / name / f"{'split' if name.startswith('split-') else 'bench'}.json" for name in COMMANDS
    }
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main() -> None:
    action, folder, *only = sys.argv[1:]
    if action == "measure":
        measure(Path(folder), only)
    else:
        TARGET.write_text(replaced(TARGET.read_text(), loaded(Path(folder))))


if __name__ == "__main__":
    main()
