"""The tables of docs/bench.md are written from measured JSON: what the counts explain, and what is left."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("bench_page", ROOT / "tools" / "bench_page.py")
assert _SPEC is not None and _SPEC.loader is not None
page = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(page)

FORWARD, ROW = 0.004, 0.001
COUNTS = {
    "serial": (100, 300, 0),
    "static:2": (70, 300, 60),
    "continuous:2": (55, 300, 10),
    "static:4": (50, 300, 120),
    "continuous:4": (32, 300, 20),
    "static:8": (40, 300, 200),
    "continuous:8": (20, 300, 30),
    "static:16": (30, 300, 300),
    "continuous:16": (15, 300, 40),
}


def measured(slower: dict[str, float]) -> dict[str, Any]:
    """A measurement whose policies take what their forwards and rows cost, some ``slower`` than that."""
    policies = []
    for label, (forwards, rows, padding) in COUNTS.items():
        seconds = (FORWARD * forwards + ROW * (rows + padding)) * slower.get(label, 1.0)
        speed = {"median": 96 / seconds, "low": 96 / seconds, "high": 96 / seconds}
        own = {
            "counts": {"forwards": forwards, "rows": rows, "padding": padding},
            "throughput": speed,
            "factor": speed,
            "answers": "identical",
            "rounds": 3,
        }
        lens = {"input_lens": [5] * 16, "output_lens": [6] * 16}
        policies.append({"label": label, "total_output_tokens": 96, "detdiff": own, **lens})
    machine = {"chip": "a chip", "cores": 2, "load": 1.0, "load_after": 2.0}
    return {"policies": policies, "environment": machine}


def cells(text: str) -> dict[int, list[str]]:
    """The cells of a table by its first column."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {int(row[0]): row for row in rows[2:]}


def test_what_the_counts_explain_leaves_nothing_where_time_is_counts() -> None:
    found = page.factors(measured({}))
    assert (
        "A forward costs 4.00 ms and a row of it 1.00 ms here" in found and "(the worst is 0% off)" in found
    )
    for n in (2, 4, 8, 16):
        static, continuous = COUNTS[f"static:{n}"], COUNTS[f"continuous:{n}"]
        waiting = (FORWARD * static[0] + ROW * 300) / (FORWARD * continuous[0] + ROW * 300)
        row = cells(found)[n]
        assert float(row[-1]) == pytest.approx(1.0, abs=0.005)
        # And all of each factor over serial.
        serial = FORWARD * 100 + ROW * 300
        assert float(row[2]) == pytest.approx(
            serial / (FORWARD * static[0] + ROW * (300 + static[2])), abs=0.006
        )
        assert float(row[-3]) == pytest.approx(waiting, abs=0.006)
        assert float(row[-3]) * float(row[-2]) * float(row[-1]) == pytest.approx(float(row[-4]), rel=0.02)


def test_kernels_that_are_slower_stand_in_the_rest() -> None:
    # One policy of nine whose forwards take longer than its counts say, as those of another kernel do.
    row = cells(page.factors(measured({"continuous:2": 1.5})))[2]
    assert float(row[-1]) < 0.8 < float(row[-3])


def test_blocks_are_written_where_they_stand() -> None:
    text = (ROOT / "docs" / "bench.md").read_text()
    names = ["mlx", "llama", "torch", "splits", "crossing", "sources", "commands"]
    for name in names:
        assert f"<!-- begin {name} -->\n" in text and f"<!-- end {name} -->" in text
    # What the page says was run is what the tool runs.
    assert all(command in text for command in page.COMMANDS.values())
