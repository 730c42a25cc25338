"""A Divergence as a JSON object and back. ``docs/json-schema.md`` lists every key.

JSON has no NaN and no infinities: such numbers are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from detdiff.compare.divergence import Divergence
from detdiff.errors import AnswerError

from .decode import Decoder

SCHEMA = "detdiff.divergence/1"

DECODER = Decoder(SCHEMA, "Compare the traces again with this version.")


def to_json(divergence: Divergence) -> dict[str, Any]:
    """The answer as JSON values only: ``json.dumps(..., allow_nan=False)`` takes it."""
    return {"schema": SCHEMA, **encoded(divergence)}


def from_json(answer: object) -> Divergence:
    """The inverse of ``to_json``. Raises AnswerError for another schema, or a missing, unknown or ill-typed key."""
    if not isinstance(answer, Mapping) or answer.get("schema") != SCHEMA:
        found = answer.get("schema") if isinstance(answer, Mapping) else type(answer).__name__
        raise AnswerError(
            f"The answer has schema {found!r}; expected {SCHEMA!r}. Compare the traces again with this version."
        )
    body = {key: value for key, value in answer.items() if key != "schema"}
    decoded = DECODER.read(Divergence, body, "answer")
    assert isinstance(decoded, Divergence)
    return decoded


def encoded(value: Any) -> Any:
    """Dataclasses, mappings, sequences and numbers as JSON values; tuples become lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encoded(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
