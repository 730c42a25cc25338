"""A Verdict as a JSON object and back. ``docs/json-schema.md`` lists every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from detdiff.errors import AnswerError
from detdiff.explain.control import Control
from detdiff.explain.fragility import Fragility
from detdiff.explain.verdict import KINDS, Evidence, Verdict

from .decode import SPECIAL, Decoder
from .json import encoded, from_json, to_json

SCHEMA = "detdiff.verdict/1"
_KEYS = (
    "schema",
    "verdict",
    "said",
    "rule",
    "advice",
    "missing",
    "evidence",
    "controls",
    "fragile",
    "divergence",
)


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


def verdict_from_json(answer: object) -> Verdict:
    """The inverse of ``verdict_json``; a detail that was a tuple is a list.

    Raises AnswerError for another schema, or a missing, unknown or ill-typed key.
    """
    decoder = Decoder(SCHEMA, "Explain the runs again with this version.")
    if not isinstance(answer, Mapping) or answer.get("schema") != SCHEMA:
        found = answer.get("schema") if isinstance(answer, Mapping) else type(answer).__name__
        raise AnswerError(f"The answer has schema {found!r}; expected {SCHEMA!r}. {decoder.again}")
    found = decoder.keys(answer, _KEYS, "answer")
    if found["verdict"] not in KINDS:
        raise decoder.error("answer.verdict", found["verdict"], f"and one of {', '.join(KINDS)} was expected")
    return Verdict(
        kind=found["verdict"],
        said=decoder.read(str, found["said"], "answer.said"),
        rule=decoder.read(str, found["rule"], "answer.rule"),
        advice=decoder.read(str, found["advice"], "answer.advice"),
        missing=decoder.read(tuple[str, ...], found["missing"], "answer.missing"),
        evidence=_detailed(decoder, Evidence, found["evidence"], "answer.evidence"),
        controls=_detailed(decoder, Control, found["controls"], "answer.controls"),
        fragile=decoder.read(tuple[Fragility, ...], found["fragile"], "answer.fragile"),
        divergence=None if found["divergence"] is None else from_json(found["divergence"]),
    )


def _detailed(decoder: Decoder, kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    items = decoder.read(tuple[kind, ...], value, where)
    return tuple(replace(item, detail=_numbers(item.detail)) for item in items)


def _numbers(value: Any) -> Any:
    """Details with the numbers that JSON has only as words. No detail says one of these words otherwise."""
    if isinstance(value, str):
        return SPECIAL.get(value, value)
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value
