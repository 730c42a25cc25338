"""The tool that counts verdicts over injected cases: what its table says, and that its pages can be out of date."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "verdict_matrix.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("verdict_matrix", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case(number: int, kind: str, verdict: str | None) -> SimpleNamespace:
    return SimpleNamespace(number=number, kind=kind, verdict=verdict)


def test_what_is_confused_is_counted(tool: Any) -> None:
    found = tool.matrix(
        {
            1: (case(1, "kernel switch", "numerics"), Counter({"numerics": 8, "bug": 1, "undetermined": 1})),
            6: (case(6, "leak", "bug"), Counter({"bug": 7, "numerics": 3})),
            18: (case(18, "nothing to compare", None), Counter({"undetermined": 10})),
        }
    )
    assert "| 1 | kernel switch | numerics |  | 8 | 1 |  |  | 1 |" in found
    assert "| 18 | nothing to compare | by compare |  |  |  |  |  | 10 |" in found
    assert found.endswith(
        "30 trials; 15 of 20 with a wanted verdict got it; 3 `bug` called `numerics`, 1 `numerics` called `bug`."
    )


def test_a_text_between_marks_is_replaced_and_nothing_else(tool: Any) -> None:
    assert tool.put("x\n<a>\nold\n<b>\ny", "<a>", "<b>", "new\\1") == "x\n<a>\nnew\\1\n<b>\ny"
    with pytest.raises(AssertionError, match="is not in"):
        tool.put("x", "<a>", "<b>", "new")


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, TOOL, "--rules", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run `python tools/verdict_matrix.py --rules`"


def test_the_page_has_a_matrix_of_every_case_without_confusion(tool: Any) -> None:
    text = tool.TARGET.read_text(encoding="utf-8")
    body = text.partition(tool.MATRIX_START)[2].partition(tool.MATRIX_END)[0]
    rows = [
        line.split("|")[1:-1] for line in body.splitlines() if line.startswith("| ") and line[2].isdigit()
    ]
    assert [int(row[0]) for row in rows] == list(range(1, 21))
    for row in rows:
        assert sum(int(cell) for cell in row[3:] if cell.strip()) >= tool.SEEDS, row
    assert "0 `bug` called `numerics`, 0 `numerics` called `bug`." in body
