"""The shipped JSON Schema is the answers' own, takes every answer, and refuses one that breaks it."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_verdict_report import verdict
from test_verdict_rules import CASES

from detdiff.explain.rules import decide
from detdiff.report import verdict_json

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import json_schema  # noqa: E402


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(json_schema.FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "traces" / "answer.json").read_text())
    return found


def test_the_shipped_file_is_what_the_answers_are() -> None:
    assert json_schema.FILE.read_text() == json_schema.text(), (
        "run python tools/json_schema.py and look at what changed"
    )
    assert json.loads(json_schema.text()) == json_schema.schema()


def test_the_stored_answer_is_valid(validator: Any) -> None:
    validator.validate(stored())


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_of_every_rule_is_valid(validator: Any, name: str) -> None:
    validator.validate(json.loads(json.dumps(verdict_json(decide(CASES[name][0]())))))


def test_a_verdict_with_every_control_is_valid(validator: Any) -> None:
    validator.validate(json.loads(json.dumps(verdict_json(verdict()))))


def without(answer: dict[str, Any]) -> None:
    del answer["requests"][0]["rows"]


def beside(answer: dict[str, Any]) -> None:
    answer["requests"][0]["surprise"] = 1


def otherwise(answer: dict[str, Any]) -> None:
    answer["requests"][0]["flip"] = "token 3"


def numbered(answer: dict[str, Any]) -> None:
    answer["schema"] = "detdiff.divergence/0"


@pytest.mark.parametrize("spoil", [without, beside, otherwise, numbered])
def test_an_answer_that_breaks_the_schema_is_refused(validator: Any, spoil: Any) -> None:
    answer = copy.deepcopy(stored())
    spoil(answer)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(answer)
