"""Writes the JSON Schema of the answers of ``compare`` and ``explain`` from their dataclasses.

    python tools/json_schema.py

A test fails where the file is another one than this program writes.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detdiff.compare import Divergence
from detdiff.explain.verdict import Verdict
from detdiff.report.json import DIVERGENCE, VERDICT, key_of

FILE = Path(__file__).parents[1] / "detdiff" / "report" / "answers.schema.json"
NOT_FINITE = ["NaN", "Infinity", "-Infinity"]
PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    # JSON has no numbers for these.
    float: {"anyOf": [{"type": "number"}, {"enum": NOT_FINITE}]},
}


def schema() -> dict[str, Any]:
    """One schema for both answers; each object has all of its keys and no other."""
    defs: dict[str, Any] = {}
    _object(Divergence, defs, {"schema": {"const": DIVERGENCE}})
    _object(Verdict, defs, {"schema": {"const": VERDICT}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What detdiff compare --json and detdiff explain --json print",
        "oneOf": [{"$ref": f"#/$defs/{each.__name__}"} for each in (Divergence, Verdict)],
        "$defs": dict(sorted(defs.items())),
    }


def _object(cls: Any, defs: dict[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    if cls.__name__ not in defs:
        defs[cls.__name__] = {}  # a class may hold itself
        hints = typing.get_type_hints(cls)
        fields = [field.name for field in dataclasses.fields(cls)]
        properties = {
            **(more or {}),
            **{key_of(cls, f): _type(hints[f], defs) for f in fields},
        }
        defs[cls.__name__] = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _type(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    if hint in PLAIN:
        return PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object(hint, defs)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type(each, defs) for each in arguments]}
    if origin is tuple and arguments[-1] is not Ellipsis:
        return {
            "type": "array",
            "prefixItems": [_type(each, defs) for each in arguments],
            "minItems": len(arguments),
            "maxItems": len(arguments),
        }
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0], defs)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(arguments[1], defs)}
    raise TypeError(
        f"{hint} has no JSON form here; expected a plain type, a dataclass, a tuple or a mapping. Add it."
    )


def text() -> str:
    """The file's text: one line for each key of an answer."""
    head = schema()
    defs = head.pop("$defs")
    lines = []
    for name, each in defs.items():
        properties = ",\n".join(
            f"    {json.dumps(key)}: {json.dumps(of)}" for key, of in each["properties"].items()
        )
        rest = "".join(
            f',\n   "{key}": {json.dumps(each[key])}' for key in ("required", "additionalProperties")
        )
        lines.append(
            f'  {json.dumps(name)}: {{\n   "type": "object",\n   "properties": {{\n{properties}\n   }}{rest}\n  }}'
        )
    top = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{top} "$defs": {{\n' + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    FILE.write_text(text())
