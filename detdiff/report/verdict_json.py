"""A Verdict as a JSON object. ``docs/json-schema.md`` lists every key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from detdiff.explain.control import Control
from detdiff.explain.verdict import Evidence, Verdict

from .json import encoded, to_json

SCHEMA = "detdiff.verdict/1"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values only: ``json.dumps(..., allow_nan=False)`` takes it."""
    return {
        "schema": SCHEMA,
        "verdict": verdict.kind,
        "said": verdict.said,
        "rule": verdict.rule,
        "advice": verdict.advice,
        "missing": list(verdict.missing),
        "evidence": [_evidence(each) for each in verdict.evidence],
        "controls": [_control(each) for each in verdict.controls],
        "fragile": [encoded(asdict(each)) for each in verdict.fragile],
        "divergence": None if verdict.divergence is None else to_json(verdict.divergence),
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "fact": evidence.fact,
        "said": evidence.said,
        "decided": evidence.decided,
        "detail": encoded(evidence.detail),
    }


def _control(control: Control) -> dict[str, Any]:
    return {
        "name": control.name,
        "result": control.result,
        "said": control.said,
        "forwards": control.forwards,
        "seconds": control.seconds,
        "detail": encoded(control.detail),
    }
