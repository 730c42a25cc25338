"""A report as a JSON object, and what it was made of back from one. ``docs/json-schema.md`` lists every key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .blocks import Block, Texts, View
from .content import Report, Section
from .json import encoded, to_json
from .series_json import series_json
from .verdict_json import verdict_json
from .words import NAME, named

SCHEMA: Final = "detdiff.report/1"
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
        "schema": SCHEMA,
        "kind": report.kind,
        "headline": report.headline,
        "advice": report.advice,
        "command": report.command,
        "sections": [_section(section) for section in report.sections],
        "divergence": None if report.divergence is None or inside else to_json(report.divergence),
        "verdict": None if verdict is None else verdict_json(verdict),
        "series": None if report.series is None else series_json(report.series),
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
