"""Event lines: what an engine or a cache did in a forward or after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from detdiff.errors import EventLineError
from detdiff.trace.site import parse_ranges

_MAX_INT32 = (1 << 31) - 1
MODELS = ("target", "draft")
"""The models of a trace; an event or forward that names none is of the first."""


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT32


def _counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_count, value))


def _some(value: Any) -> bool:
    return _counts(value) and len(value) > 0


def _ranges(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(parse_ranges(value, _MAX_INT32))
    except ValueError:
        return False


_NEEDED: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "verify": {
        "request": _count,
        "start": _count,
        "proposals": _some,
        "choices": _some,
        "accepted": _count,
        "replacement": lambda value: value is None or _count(value),
        "committed": _counts,
    },
    "trim": {"request": _count, "asked": _count, "done": _count, "layers": _ranges},
    "prefix": {"request": _count, "from": _count, "tokens": _count},
    "page": {"request": _count, "index": _count, "page": _count},
    "quantise": {"position": _count, "layers": _ranges},
}
"""What an event of a kind has at least. Other kinds, and other keys, are free."""


def check_event(where: str, line: Any, forwards: int, requests: int) -> None:
    """Raises EventLineError unless ``line`` follows the last of ``forwards`` forwards and names only what exists."""
    found = line if isinstance(line, Mapping) else {}
    kind = found.get("event")
    ok = (
        isinstance(kind, str)
        and bool(kind)
        and type(found.get("forward")) is int
        and found["forward"] == forwards - 1
        and found.get("model", MODELS[0]) in MODELS
        and _below(found.get("request", 0), requests)
        and _below(found.get("from", 0), requests)
        and all(_below(request, requests) for request in _several(found.get("requests", ())))
    )
    needed = _NEEDED.get(kind, {}) if ok and isinstance(kind, str) else {}
    if not ok or not all(key in found and test(found[key]) for key, test in needed.items()):
        raise EventLineError(
            f"{where} is {str(line)[:300]}; expected an event with a kind and the forward {forwards - 1}, which was the "
            f"last before it, its requests below {requests}"
            + (f", and with {', '.join(needed)}" if needed else "")
            + ". Record the trace again."
        )


def _below(value: Any, requests: int) -> bool:
    return type(value) is int and 0 <= value < requests


def _several(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (None,)
