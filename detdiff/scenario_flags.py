"""The flat keys of a scenario: their names, their types, and how each is written as text.

A scenario file and the ``key=value`` flags of the command line share these keys, so a key is declared once.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from detdiff.errors import ScenarioFlagError, ScenarioKeyUnknown, ScenarioRangeError, ScenarioTypeError


@dataclass(frozen=True)
class Kind:
    """A type that a key can take: how to say it, how to check it, how to read it from text.

    ``check`` gives the value in its one stored form, or None where it is of another type. ``read`` gives a
    value for ``check`` and may raise ValueError.
    """

    name: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(test: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        return tuple(value) if isinstance(value, (list, tuple)) and all(map(test, value)) else None

    return check


def _number(value: Any) -> float | None:
    # `+ 0.0` turns -0.0 into 0.0: one stored form for one meaning.
    return float(value) + 0.0 if _is_int(value) or isinstance(value, float) else None


def _read_truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _read_ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _read_token_lists(text: str) -> list[list[int]]:
    return [_read_ints(part) for part in text.split(";")]


def _read_pair(text: str) -> list[int]:
    return [int(part) for part in text.split(".." if ".." in text else ",")]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_ints = _tuple_of(_is_int)

TEXT = Kind("a string", lambda v: v if _is_text(v) else None, str)
INT = Kind("an integer", lambda v: v if _is_int(v) else None, int)
NUMBER = Kind("a number", _number, float)
TRUTH = Kind("true or false", lambda v: v if isinstance(v, bool) else None, _read_truth)
TEXTS = Kind("a list of strings", _tuple_of(_is_text), lambda text: text.split(","))
INTS = Kind("a list of integers", _ints, _read_ints)
TOKEN_LISTS = Kind("lists of token ids", _tuple_of(lambda v: _ints(v) is not None), _read_token_lists)
RANGE = Kind(
    "a pair of integers", lambda v: p if (p := _ints(v)) is not None and len(p) == 2 else None, _read_pair
)
TABLES = Kind("a list of tables", _tuple_of(lambda v: isinstance(v, Mapping)), str)

RUN_KEYS: Mapping[str, Kind] = {
    "model": TEXT,
    "schedule": TEXT,
    "layout": TEXT,
    "active": INT,
    "row_budget": INT,
    "prefill_chunk": INT,
    "draft": TEXT,
    "drafts": INT,
    "force_tokens": TEXT,
    "kv_bits": INT,
    "kv_group_size": INT,
    "kv_start": INT,
    "reuse_tokens": INT,
    "page_tokens": INT,
    "share_prefix": TRUTH,
    "kernels": TEXT,
    "split_rows": INT,
    "capture": TEXT,
    "lens": TRUTH,
    "top": INT,
    "window_requests": TEXTS,
    "window_positions": RANGE,
    "window_sites": TEXTS,
    "digest": TEXT,
    "memory_mb": INT,
}
"""What belongs to the run as a whole."""

SETTING_KEYS: Mapping[str, Kind] = {
    "max_tokens": INT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "seed": INT,
    "ignore_stop": TRUTH,
    "chat": TRUTH,
}
"""What each request has; given for the run, it is the default of every request."""

REQUEST_KEYS: Mapping[str, Kind] = {
    "id": TEXT,
    "prompt": TEXT,
    "tokens": INTS,
    "arrival": INT,
    **SETTING_KEYS,
}
RULE_KEYS: Mapping[str, Kind] = {"site": TEXT, "phase": TEXT, "rows": TEXT, "path": TEXT, "second_last": TEXT}
FILE_KEYS: Mapping[str, Kind] = {**RUN_KEYS, **SETTING_KEYS, "request": TABLES, "rule": TABLES}
CHANGE_KEYS: Mapping[str, Kind] = {**RUN_KEYS, **SETTING_KEYS, "arrivals": INTS}
FLAG_KEYS: Mapping[str, Kind] = {**CHANGE_KEYS, "tokens": TOKEN_LISTS}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown ``name``: the nearest known one, else all of them."""
    choices = list(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"the known ones are {', '.join(choices)}."


def known(name: str, keys: Mapping[str, Kind]) -> Kind:
    """The type of the key ``name``; raises ScenarioKeyUnknown, naming the nearest key."""
    if name not in keys:
        raise ScenarioKeyUnknown(f"there is no key {name!r} here; {nearest(str(name), keys)}")
    return keys[name]


def typed(values: Mapping[str, Any], keys: Mapping[str, Kind]) -> dict[str, Any]:
    """``values`` in their stored form; raises ScenarioKeyUnknown and ScenarioTypeError."""
    return {name: _checked(name, value, known(name, keys)) for name, value in values.items()}


def _checked(name: str, value: Any, kind: Kind) -> Any:
    result = kind.check(value)
    if result is None:
        raise ScenarioTypeError(
            f"{name} takes {kind.name}, and {_shown(value)} is something else; change its value."
        )
    return result


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_flags(flags: str) -> dict[str, Any]:
    """Read ``key=value key=value`` into typed values, as ``Scenario.with_changes`` takes them.

    Words are split as a shell does. A key that takes true or false may stand alone for true. Lists are
    separated by commas: ``arrivals=0,5``, ``window_sites=layers.0.*,lm_head``; a range is ``3..9`` or
    ``3,9``; the token ids of several requests are separated by semicolons: ``tokens=1,2,3;4,5``.

    Raises ScenarioFlagError for text that cannot be read so, ScenarioKeyUnknown and ScenarioTypeError.
    """
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ScenarioFlagError(f"{flags!r} cannot be split into words ({error}); close it.") from None
    result: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        kind = known(name, FLAG_KEYS)
        if name in result:
            raise ScenarioFlagError(f"{name} is given twice; keep one of them.")
        if not equals and kind is not TRUTH:
            raise ScenarioFlagError(f"{name} has no value and takes {kind.name}; write {name}=VALUE.")
        try:
            value = kind.read(text) if equals else True
        except ValueError:
            value = text
        result[name] = _checked(name, value, kind)
    return result


def toml_text(keys: Mapping[str, Any]) -> str:
    """``keys`` as TOML: plain values and lists first, then a ``[[name]]`` for each table of a list."""
    plain = {name: value for name, value in keys.items() if not TABLES.check(value)}
    lines = [f"{name} = {_toml_value(value)}" for name, value in plain.items()]
    for name, tables in keys.items():
        if name not in plain:
            for table in tables:
                lines += [
                    "",
                    f"[[{name}]]",
                    *(f"{key} = {_toml_value(value)}" for key, value in table.items()),
                ]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # JSON writes strings, finite numbers, true and false as TOML does, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_utf8(name: str, text: str) -> None:
    """Raises ScenarioRangeError when ``text`` holds half characters, which no file or tokenizer can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ScenarioRangeError(
            f"{name} {_shown(text)} is not valid Unicode text and cannot be written as UTF-8; "
            "the file or terminal that it came from uses another encoding."
        ) from None
