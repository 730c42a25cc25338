"""JSON values back into the frozen dataclasses that they were made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from detdiff.errors import AnswerError

SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHOWN = 200


@dataclass(frozen=True)
class Decoder:
    """Reads the types of one ``schema``; ``again`` says in its errors what to do.

    ``readers`` are functions of a value and of where it stands, for types that JSON holds otherwise than by their fields.
    """

    schema: str
    again: str
    readers: Mapping[Any, Callable[[Any, str], Any]] = field(default_factory=dict)

    def read(self, kind: Any, value: Any, where: str) -> Any:
        """``value`` as a ``kind``. Raises AnswerError for a missing, unknown or ill-typed key."""
        if kind in self.readers:
            return self.readers[kind](value, where)
        if get_origin(kind) is UnionType:
            # Every union of an answer is "something or None".
            (inner,) = (option for option in get_args(kind) if option is not NoneType)
            return None if value is None else self.read(inner, value, where)
        if is_dataclass(kind):
            return self._fields(kind, value, where)
        if get_origin(kind) is tuple:
            return self._tuple(get_args(kind), value, where)
        if get_origin(kind) is Mapping and isinstance(value, Mapping):
            return dict(value)
        if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
            return value
        if kind is float:
            if isinstance(value, str) and value in SPECIAL:
                return SPECIAL[value]
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        elif type(value) is kind:
            return value
        raise self.error(where, value, f"which is not of the type that {self.schema} gives it")

    def error(self, where: str, value: Any, expected: str) -> AnswerError:
        """What is raised for a ``value`` that is not what was ``expected``."""
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        return AnswerError(f"{where} is {shown}, {expected}. {self.again}")

    def keys(self, value: Any, expected: Any, where: str) -> Mapping[str, Any]:
        """``value``, which has exactly the ``expected`` keys."""
        if not isinstance(value, Mapping) or set(value) != set(expected):
            found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise AnswerError(
                f"{where} has {found!r}; expected exactly the keys {sorted(expected)!r}. {self.again}"
            )
        return value

    def items(self, value: Any, where: str) -> list[Any] | tuple[Any, ...]:
        """``value``, which is a list."""
        if not isinstance(value, list | tuple):
            raise self.error(where, value, "and a list was expected")
        return value

    def _fields(self, kind: Any, value: Any, where: str) -> Any:
        hints = _hints(kind)
        found = self.keys(value, hints, where)
        return kind(**{name: self.read(hints[name], found[name], f"{where}.{name}") for name in hints})

    def _tuple(self, kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
        found = self.items(value, where)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = (kinds[0],) * len(found)
        if len(kinds) != len(found):
            raise self.error(where, value, f"and a list of {len(kinds)} was expected")
        return tuple(
            self.read(kind, item, f"{where}[{n}]")
            for n, (kind, item) in enumerate(zip(kinds, found, strict=True))
        )


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
