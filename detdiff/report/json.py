"""A Divergence as a JSON object and back. ``docs/json-schema.md`` lists every key.

JSON has no NaN and no infinities: such numbers are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from detdiff.compare.divergence import Divergence
from detdiff.errors import AnswerError

SCHEMA = "detdiff.divergence/1"

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
    decoded = _decode(Divergence, body, "answer")
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


def _decode(kind: Any, value: Any, where: str) -> Any:
    if get_origin(kind) is UnionType:
        # Every union of the answer is "something or None".
        (inner,) = (option for option in get_args(kind) if option is not NoneType)
        return None if value is None else _decode(inner, value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if get_origin(kind) is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        return dict(value)
    if kind is float:
        if isinstance(value, str) and value in _SPECIAL:
            return _SPECIAL[value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif type(value) is kind:
        return value
    raise AnswerError(f"{where} is {value!r}, which is not of the type that {SCHEMA} gives it. {_AGAIN}")


_AGAIN = "Compare the traces again with this version."


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, Mapping) or set(value) != set(hints):
        found = sorted(map(str, value)) if isinstance(value, Mapping) else value
        raise AnswerError(f"{where} has {found!r}; expected exactly the keys {sorted(hints)!r}. {_AGAIN}")
    return kind(**{name: _decode(hints[name], value[name], f"{where}.{name}") for name in hints})


def _decode_tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        if len(items) == 2 and items[1] is Ellipsis:
            return tuple(_decode(items[0], item, f"{where}[{n}]") for n, item in enumerate(value))
        if len(items) == len(value):
            return tuple(
                _decode(kind, item, f"{where}[{n}]")
                for n, (kind, item) in enumerate(zip(items, value, strict=True))
            )
    raise AnswerError(f"{where} is {value!r}; expected a list. {_AGAIN}")
