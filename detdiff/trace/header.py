"""trace.json: what was run, on what, and which files belong to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from detdiff.errors import (
    LogSizeError,
    NotATrace,
    RequestListError,
    ShardNameError,
    SiteListError,
    TraceHeaderError,
    TraceReadError,
    TraceSchemaError,
)
from detdiff.trace.contents import Site, check_sites
from detdiff.trace.files import parse_json, read_bytes, regular_size
from detdiff.trace.shard import shard_name
from detdiff.trace.store import Address, Place

SCHEMA = 1
HEADER = "trace.json"
FORWARDS = "forwards.jsonl"
TEXTS = "texts.jsonl"
_OBJECTS = ("scenario", "model", "environment", "observer", "times")
_LISTS = ("requests", "sites", "logs", "shards", "notes")
_MAX_INT32 = (1 << 31) - 1
LACKS = (
    "tokens",
    "logits",
    "sites",
    "inputs",
    "rows_seen",
    "kernel_paths",
    "cache",
    "values",
    "forwards",
)
"""What a trace may say that it lacks, each with the reason."""


def encode(header: Mapping[str, Any]) -> bytes:
    """Canonical bytes: keys in the given order, one line for each entry of a list of objects.

    Raises TraceHeaderError for what JSON cannot hold.
    """
    lines = []
    try:
        for key, value in header.items():
            if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                text = "[\n  " + ",\n  ".join(map(dumps, value)) + "\n ]"
            else:
                text = dumps(value)
            lines.append(f" {dumps(key)}: {text}")
    except (TypeError, ValueError) as error:
        raise TraceHeaderError(
            f"The trace header cannot be written as JSON ({error}); expected only strings, finite numbers, "
            "booleans, null, lists and objects. Convert the value before recording."
        ) from None
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def read(path: Place) -> dict[str, Any]:
    """The checked header of a trace directory, without its sites, which ``parse_sites`` checks.

    Raises NotATrace, TraceHeaderError, TraceSchemaError, RequestListError, ShardNameError, LogSizeError.
    """
    file = path / HEADER
    try:
        regular_size(file, NotATrace)
    except (NotATrace, TraceReadError) as error:
        if isinstance(path, Address) and not isinstance(error, NotATrace):
            raise  # without credentials or a network nobody knows what is there
        raise NotATrace(
            f"{path} is not a trace; expected a directory that holds a file {HEADER}. Give the directory "
            "that was recorded."
        ) from None
    try:
        header = parse_json(read_bytes(file))
    except ValueError as error:
        raise TraceHeaderError(
            f"{file} is not JSON ({error}); expected the header of a trace. It is cut or damaged: copy or "
            "record the trace again."
        ) from None
    check(header, str(file))
    return dict(header)


def check(header: Any, where: str) -> None:
    """Raises the TraceError subclass of the first rule that a header breaks."""
    if not isinstance(header, dict):
        raise TraceHeaderError(
            f"{where} holds a {type(header).__name__}; expected an object. Record it again."
        )
    if "schema" in header and header["schema"] != SCHEMA:
        raise TraceSchemaError(
            f"{where} states the schema {str(header['schema'])[:40]!r}; expected {SCHEMA}. Read it with the "
            "version of detdiff that wrote it, or record it again."
        )
    kinds = {**dict.fromkeys(_OBJECTS, dict), **dict.fromkeys(_LISTS, list), "schema": int, "complete": bool}
    for key, kind in kinds.items():
        if type(header.get(key)) is not kind:
            raise TraceHeaderError(
                f"{where} has {'no' if key not in header else 'a wrong'} {key!r}; expected a "
                f"{kind.__name__}. It is damaged or was written by another program: record the trace again."
            )
    for key in ("draft", "speculation"):
        if not isinstance(header.get(key, {}), dict):
            raise TraceHeaderError(
                f"{where} has a wrong {key!r}; expected a dict or nothing. It is damaged or was written by another "
                "program: record the trace again."
            )
    _check_engine(header, where)
    if not all(isinstance(note, str) for note in header["notes"]):
        raise TraceHeaderError(
            f"{where} has a note that is not text; expected strings. Record the trace again."
        )
    check_requests(header["requests"], where)
    if header["complete"]:
        _check_files(header, where)


def _check_engine(header: Mapping[str, Any], where: str) -> None:
    """What ran it, where that is not plain mlx, and what it could not show."""
    engine, lacks = header.get("engine", {"name": "mlx"}), header.get("lacks", {})
    name = engine.get("name") if isinstance(engine, dict) else None
    if not (isinstance(name, str) and name and isinstance(engine.get("settings", {}), dict)):
        raise TraceHeaderError(
            f"{where} has as engine {str(engine)[:200]}; expected an object with a name and, where there are any, settings. "
            "Record the trace again."
        )
    if not (
        isinstance(lacks, dict)
        and all(key in LACKS and isinstance(reason, str) and reason for key, reason in lacks.items())
    ):
        raise TraceHeaderError(
            f"{where} has as lacks {str(lacks)[:200]}; expected an object with a reason for each of what is missing of "
            f"{', '.join(LACKS)}. Record the trace again."
        )
    if "roles" in header and not _are_roles(header["roles"]):
        raise TraceHeaderError(
            f"{where} has as roles {str(header['roles'])[:200]}; expected an object with places, a list of [site, port] for "
            "each role, and whether a head's pairs are neighbours. Record the trace again."
        )


def _are_roles(told: Any) -> bool:
    places = told.get("places") if isinstance(told, dict) else None
    return (
        isinstance(places, dict)
        and all(
            isinstance(role, str)
            and isinstance(found, list | tuple)
            and all(
                isinstance(each, list | tuple) and len(each) == 2 and all(isinstance(n, str) for n in each)
                for each in found
            )
            for role, found in places.items()
        )
        and type(told.get("neighbours", False)) is bool
        and (told.get("head_width") is None or (type(told["head_width"]) is int and told["head_width"] > 0))
    )


def check_requests(requests: Sequence[Any], where: str, first: int = 0, ids: set[str] | None = None) -> None:
    """Raises RequestListError for one of ``requests``, whose places begin at ``first``; ``ids`` are those before them, and
    are added to."""
    seen: set[str] = set() if ids is None else ids
    for place, request in enumerate(requests, first):
        found = request if isinstance(request, dict) else {}
        tokens = found.get("tokens")
        ok = (
            isinstance(found.get("id"), str)
            and found["id"] not in seen
            and isinstance(tokens, list)
            and set(map(type, tokens)) <= {int}
            and (not tokens or (min(tokens) >= 0 and max(tokens) <= _MAX_INT32))
        )
        if not ok:
            raise RequestListError(
                f"{where} has as request {place} {str(request)[:200]}; expected an object with an id of its "
                "own and tokens, a list of token ids. Record the trace again."
            )
        seen.add(found["id"])


def _check_files(header: Mapping[str, Any], where: str) -> None:
    logs = header["logs"]
    if [_entry(log) and log["name"] for log in logs] != [FORWARDS, TEXTS]:
        raise LogSizeError(
            f"{where} lists the logs {str(logs)[:200]}; expected {FORWARDS} and {TEXTS} with bytes and "
            "crc32. Record the trace again."
        )
    for place, shard in enumerate(header["shards"]):
        if not _entry(shard) or shard["name"] != shard_name(place):
            raise ShardNameError(
                f"{where} lists as shard {place} {str(shard)[:200]}; expected the name "
                f"{shard_name(place)!r}, bytes and crc32. Names never leave the trace's directory. Record "
                "the trace again."
            )


def _entry(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and set(item) == {"name", "bytes", "crc32"}
        and all(type(item[key]) is int and 0 <= item[key] < 1 << 62 for key in ("bytes", "crc32"))
    )


def parse_sites(header: Mapping[str, Any]) -> tuple[Site, ...]:
    """The header's sites; raises SiteListError."""
    sites = tuple(site if isinstance(site, Site) else Site.from_json(site) for site in header["sites"])
    check_sites(sites)
    lacks = header.get("lacks")
    if not sites and not (isinstance(lacks, dict) and "sites" in lacks):
        raise SiteListError(
            "The trace lists no sites, and no reason for it; expected at least one, or why its engine shows none as "
            "`sites` in `lacks`. Record the trace again."
        )
    return sites
