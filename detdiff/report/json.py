"""Comparisons, verdicts and reports as JSON objects. ``docs/json-schema.md`` lists every key; ``saved`` reads them back.

JSON has no NaN and no infinities: such numbers are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.divergence import Divergence
from detdiff.compare.grids import Grid
from detdiff.explain.verdict import Verdict

from .document import Block, Report, Section, Texts, View
from .words import NAME, named

DIVERGENCE = "detdiff.divergence/2"


def key_of(kind: Any, name: str) -> str:
    """The key of a dataclass's field; some are called otherwise in JSON, where a key changes only with the schema's number."""
    return "verdict" if kind is Verdict and name == "kind" else {"sentence": "said"}.get(name, name)


def to_json(divergence: Divergence) -> dict[str, Any]:
    """The answer as JSON values only: ``json.dumps(..., allow_nan=False)`` takes it."""
    return {"schema": DIVERGENCE, **encoded(divergence)}


def encoded(value: Any) -> Any:
    """Dataclasses, mappings, sequences and numbers as JSON values; tuples become lists, rows of a map runs of cells."""
    if isinstance(value, Grid):
        return _grid(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {key_of(type(value), name): encoded(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


VERDICT = "detdiff.verdict/2"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values only: ``json.dumps(..., allow_nan=False)`` takes it."""
    made = {"schema": VERDICT, **encoded(replace(verdict, divergence=None))}
    return made if verdict.divergence is None else {**made, "divergence": to_json(verdict.divergence)}


REPORT: Final = "detdiff.report/2"
_LINE = 160
"""Characters of a value that stands on one line."""


def report_json(report: Report) -> dict[str, Any]:
    """The report as JSON values only: ``json.dumps(..., allow_nan=False)`` takes it.

    A verdict has its comparison in itself, so that ``divergence`` is null beside one; where a report has both and they
    are not the same, as after a replay, both are there.
    """
    verdict = report.verdict
    inside = verdict is not None and verdict.divergence is report.divergence
    return {
        "schema": REPORT,
        "kind": report.kind,
        "headline": report.headline,
        "advice": report.advice,
        "command": report.command,
        "sections": [_section(section) for section in report.sections],
        "divergence": None if report.divergence is None or inside else to_json(report.divergence),
        "verdict": None if verdict is None else verdict_json(verdict),
        "series": encoded(report.series),
    }


def report_json_text(report: Report) -> str:
    """The JSON object as text: what is long over several lines, but lists of numbers, which maps are full of, on one."""
    return f"{_text(report_json(report), '')}\n"


def _section(section: Section) -> dict[str, Any]:
    return {
        "id": section.id,
        "title": section.title,
        "folded": section.folded,
        "blocks": [_block(block) for block in section.blocks],
    }


def _block(block: Block) -> dict[str, Any]:
    found = {"type": type(block).__name__.lower(), **encoded(block)}
    if isinstance(block, Texts):
        # All tokens are in the series; here are those that matter.
        for run, words in (("a", block.a), ("b", block.b)):
            found[run] = [
                {"index": w.index, "text": w.text, "mark": w.mark}
                for w in words
                if w.mark in ("flip", "near")
            ]
    if isinstance(block, View) and block.request is not None and len(block.request) > NAME:
        found["request"] = named(block.request)
    return found


def _text(value: Any, indent: str) -> str:
    inner = f"{indent} "
    if isinstance(value, Mapping) and value:
        parts = [f"{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items()]
        return _joined("{", parts, "}", indent)
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return _joined("[", [_text(item, inner) for item in value], "]", indent)
    return json.dumps(value, allow_nan=False)


def _joined(start: str, parts: Sequence[str], end: str, indent: str) -> str:
    if sum(map(len, parts)) + 2 * len(parts) <= _LINE and not any("\n" in part for part in parts):
        return f"{start}{', '.join(parts)}{end}"
    lines = f",\n{indent} ".join(parts)
    return f"{start}\n{indent} {lines}\n{indent}{end}"


def _grid(grid: Grid) -> dict[str, Any]:
    return {
        "name": grid.name,
        "positions": grid.state.shape[1],
        "rows": list(grid.rows),
        "state": [_runs(row) for row in grid.state],
        "share": [_runs(row) for row in grid.share],
        "ulp": None if grid.ulp is None else [_known(row) for row in grid.ulp],
        "rel": None if grid.rel is None else [_known(row) for row in grid.rel],
    }


def _runs(row: NDArray[np.uint8]) -> list[list[int]]:
    """``[[value, how many], ...]``."""
    starts = np.flatnonzero(np.diff(row, prepend=row[:1] ^ 1))
    runs: list[list[int]] = np.column_stack([row[starts], np.diff(starts, append=len(row))]).tolist()
    return runs


def _known(row: NDArray[np.float32]) -> list[list[Any]]:
    """``[[position, value], ...]`` of those that are there, in few digits that give the same float32 again."""
    places = np.flatnonzero(~np.isnan(row)).tolist()
    return [[place, encoded(float(f"{row[place]:.9g}"))] for place in places]
