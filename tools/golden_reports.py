#!/usr/bin/env python3
"""Write the golden reports of tests/report/golden: an answer of each kind as JSON, and one of them in every format.

python tools/golden_reports.py                  after a change of the formats: from what the JSON reports hold
python tools/golden_reports.py --check          exit status 1 when they are out of date
python tools/golden_reports.py --record [CASE]  run the models again, one case or all; takes minutes

A run's last bits depend on the processor. So the answers that the reports are made of were made once, and are kept in the
JSON reports themselves; what the formats make of them is the same everywhere.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.json import report_json_text
from detdiff.report.markdown import markdown
from detdiff.report.saved import read_saved
from detdiff.report.text import report_text

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "report" / "golden"
WIDTH = 100
REFERENCE = ROOT / "traces" / "reference-case"
EVERY_FORMAT = "reference"
"""The case that is kept in every format; of the others the tests look at fields."""
SECONDS = 0.5
"""What every control is said to have taken, so that the same bits give the same report."""


@dataclass(frozen=True)
class Recipe:
    """How a case's answer comes about: two scenarios and what is injected. ``explained`` is false for a comparison alone."""

    scenarios: Callable[[], tuple[Any, Any]]
    command: str
    explained: bool = True
    fault: int | None = None


def _reference() -> tuple[Any, Any]:
    a, b = (_toml(REFERENCE / f"{name}.toml") for name in ("serial", "continuous"))
    return a.with_changes(lens=True), b.with_changes(lens=True)


def _short(**changes: Any) -> tuple[Any, Any]:
    a, b = (_toml(ROOT / "traces" / f"{name}.toml") for name in ("serial", "continuous"))
    return a.with_changes(**changes), b.with_changes(**changes)


def _left_out() -> tuple[Any, Any]:
    """Run b is not asked for the follower."""
    a, _ = _short()
    fewer = {**a.to_dict(), "request": a.to_dict()["request"][:1]}
    return a, type(a).from_dict(fewer)


def _toml(path: Path) -> Any:
    from detdiff.scenario import Scenario

    return Scenario.from_toml(path)


RECIPES: Mapping[str, Recipe] = {
    "reference": Recipe(
        _reference,
        "detdiff explain traces/reference-case/serial.toml traces/reference-case/continuous.toml",
    ),
    "kernel-switch": Recipe(_short, "detdiff explain traces/serial.toml traces/continuous.toml"),
    "bug": Recipe(lambda: _trial(6), "", fault=6),
    "configuration": Recipe(lambda: _trial(13), "", fault=13),
    "identical": Recipe(
        lambda: _short(split_rows=1024),
        'detdiff explain traces/serial.toml traces/continuous.toml --both "split_rows=1024"',
    ),
    "inconclusive": Recipe(_left_out, "detdiff compare a.toml b.toml", explained=False),
}


def _trial(number: int) -> tuple[Any, Any]:
    trial = _case(number)
    return trial.scenario_a, trial.scenario_b


def _case(number: int) -> Any:
    """An injected case, which lives with the tests."""
    for folder in ("tests/faults", "tests"):
        if str(ROOT / folder) not in sys.path:
            sys.path.insert(0, str(ROOT / folder))
    from cases import CASES

    return CASES[number].trial(3)


def record_answer(recipe: Recipe) -> str:
    """The JSON report of a case, run now. Paths are those of the repository, and times are set."""
    from detdiff.compare import compare
    from detdiff.compare.series import series
    from detdiff.engines.mlx.engine import RecordOptions, record
    from detdiff.engines.mlx.serve import Models
    from detdiff.explain import explain

    a, b = recipe.scenarios()
    trial = None if recipe.fault is None else _case(recipe.fault)
    speculative = a if a.speculation is not None else b
    models = Models.of(speculative, trial and trial.loaded, trial and trial.draft)
    with tempfile.TemporaryDirectory() as folder, nullcontext() if trial is None else trial.around:
        traces = tuple(
            record(
                scenario,
                Path(folder) / name,
                loaded=models.target,
                draft=models.draft,
                options=RecordOptions(observe=2),
            )
            for name, scenario in zip("ab", (a, b), strict=True)
        )
        verdict = None
        if recipe.explained:
            verdict = explain(*traces, loaded=models.target, draft=models.draft)
        divergence = compare(*traces) if verdict is None else verdict.divergence
        assert divergence is not None
        made = build(divergence, verdict, series(*traces, divergence), recipe.command)
        text = report_json_text(made).replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    return re.sub(r'("seconds": )(\[[^]]*\]|[-+.\de]+)', _timed, text)


def _timed(found: re.Match[str]) -> str:
    """Each number of seconds as ``SECONDS``."""
    return found[1] + re.sub(r"[-+.\de]+", str(SECONDS), found[2])


def texts(report: Report) -> dict[str, str]:
    """The report in every format."""
    return {
        "report.txt": report_text(report, width=WIDTH),
        "report.md": markdown(report),
        "report.json": report_json_text(report),
    }


def made(folder: Path) -> dict[str, str]:
    """The golden files of a case again, from what the JSON report holds."""
    kept = read_saved(folder / "report.json")
    found = texts(build(kept.divergence, kept.verdict, kept.series, kept.command))
    return found if folder.name == EVERY_FORMAT else {"report.json": found["report.json"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--record", nargs="*", choices=[*RECIPES, []], metavar="CASE", help="run the models again"
    )
    asked = parser.parse_args()
    if asked.record is not None:
        for name in asked.record or RECIPES:
            _write(TARGET / name, {"report.json": record_answer(RECIPES[name])})
            _write(TARGET / name, made(TARGET / name))
            print(f"{name}: recorded")
        return 0
    stale = []
    for name in RECIPES:
        found = made(TARGET / name)
        stale += [f"{name}/{file}" for file, text in found.items() if _read(TARGET / name / file) != text]
        if not asked.check:
            _write(TARGET / name, found)
    if stale:
        print(f"{'out of date' if asked.check else 'written'}: {', '.join(stale)}")
    return 1 if stale and asked.check else 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
