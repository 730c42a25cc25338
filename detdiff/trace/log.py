"""forwards.jsonl and texts.jsonl: append-only logs of JSON lines, one a forward, an event or a text."""

from __future__ import annotations

import os
import re
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import (
    ChecksumError,
    EventLineError,
    ForwardLineError,
    LogLineError,
    LogMissing,
    LogSizeError,
    PlanLineError,
    TextLineError,
)
from detdiff.trace.contents import PHASES, parse_ranges
from detdiff.trace.files import parse_json, read_array, read_bytes, reading, regular_size
from detdiff.trace.header import dumps
from detdiff.trace.store import Address, Place, names_in

_MAX_INT32 = (1 << 31) - 1
_PART = 1 << 19  # bytes
_EVENTS = b'"events"'
_RARE = b"v"  # a letter of it that few other words of a line have: looking for one letter takes a twentieth of the time
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
    "turn": {
        "request": _count,
        "from": _count,
        "tokens": _count,
        "told": _count,
        "kept": _count,
        "closing": lambda value: value is None or _counts(value),
    },
    "save": {"request": _count, "layers": _ranges},
    "load": {"request": _count, "layers": _ranges},
    "adapter": {"request": _count, "on": lambda value: type(value) is bool},
    "cancel": {"request": _count, "tokens": _count},
    "choice": {
        "request": _count,
        "index": _count,
        "digest": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None,
        "top_ids": _counts,
        "top_logprobs": lambda value: (
            isinstance(value, list | tuple) and all(type(v) is float for v in value)
        ),
    },
    **dict.fromkeys(("merge", "extend", "filter", "roll", "wrap"), {}),
}
"""The kinds of events, and what each has at least. Other keys are free."""


def check_event(where: str, line: Any, forwards: int, requests: int) -> None:
    """Raises EventLineError unless ``line`` follows the last of ``forwards`` forwards and names only what exists."""
    found = line if isinstance(line, Mapping) else {}
    kind = found.get("event")
    if isinstance(kind, str) and kind not in _NEEDED:
        raise EventLineError(
            f"{where} is an event of the kind {kind[:40]!r}; expected one of {', '.join(_NEEDED)}. Read it with the version of "
            "detdiff that wrote it, or record the trace again."
        )
    ok = (
        isinstance(kind, str)
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


FORWARD_PHASES = (*PHASES, "mixed")
LAYOUTS = ("padded", "packed")
_ALL_ROWS = (range(1 << 62),)


def encode_line(value: Any) -> bytes:
    """A line of a log; raises LogLineError for what JSON cannot hold."""
    try:
        return dumps(value).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise LogLineError(
            f"A line of a log cannot be written as JSON ({error}); expected only strings, finite numbers, "
            "booleans, null, lists and objects. This is a fault of the recorder."
        ) from None


class LogWriter:
    """Appends lines; ``flush`` is idempotent, so that an interrupted one can be done again."""

    def __init__(self, path: Place, *, durable: bool = True) -> None:
        """Raises FileExistsError where somebody else writes there."""
        self.path = path
        self._durable = durable
        # Bytes, checksum and number of the flushes so far, and the lines after them.
        self._written: tuple[int, int, int, list[bytes]] = (0, 0, 0, [])
        self._begin()

    def _begin(self) -> None:
        # Exclusive, so that of two recordings into one directory only one goes on.
        assert isinstance(self.path, Path)
        self.path.touch(exist_ok=False)

    def append(self, value: Any) -> None:
        """Raises LogLineError for what JSON cannot hold."""
        self._written[3].append(encode_line(value))

    def flush(self) -> None:
        """Writes the pending lines, synced where they are to be durable; raises OSError."""
        size, crc, flushes, pending = self._written
        data = b"".join(pending)
        if not data:
            return
        self._put(data, size, flushes + 1)
        self._written = (size + len(data), zlib.crc32(data, crc), flushes + 1, [])

    def _put(self, data: bytes, size: int, flush: int) -> None:
        with open(self.path, "r+b") as file:  # type: ignore[arg-type]
            file.seek(size)
            file.truncate()
            file.write(data)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())

    def seal(self) -> None:
        """Called once, after the last flush and before the trace is marked complete; raises OSError."""

    def close(self) -> None:
        """Called once, when the trace is finished or given up."""

    def entry(self) -> dict[str, Any]:
        """Name, bytes and checksum of what is on disk."""
        size, crc, _, _ = self._written
        return {"name": self.path.name, "bytes": size, "crc32": crc}


class PartsLogWriter(LogWriter):
    """A log at an address, where nothing can be appended to an object: each flush is a part of its own, and ``seal`` writes
    the log whole. The parts of a trace that is not finished stay."""

    def __init__(self, folder: Address, name: str) -> None:
        """Raises FileExistsError where somebody else writes there."""
        self._folder, self._sealed = folder, False
        super().__init__(folder / name)
        handle, spool = tempfile.mkstemp(prefix="detdiff-log-")
        os.close(handle)
        self._spool = Path(spool)
        # However the run ends, but for a kill.
        weakref.finalize(self, self._spool.unlink, missing_ok=True)

    def _begin(self) -> None:
        (self._folder / part_name(self.path.name, 0)).put((), new=True)

    def _put(self, data: bytes, size: int, flush: int) -> None:
        (self._folder / part_name(self.path.name, flush)).put([data])
        with self._spool.open("r+b") as file:
            file.seek(size)
            file.truncate()
            file.write(data)

    def seal(self) -> None:
        assert isinstance(self.path, Address)
        self.path.put_file(self._spool)
        self._sealed = True

    def close(self) -> None:
        self._spool.unlink(missing_ok=True)
        for part in range(self._written[2] + 1) if self._sealed else ():
            (self._folder / part_name(self.path.name, part)).remove()


def part_name(name: str, part: int) -> str:
    """What a part of the log ``name`` is called; the parts count from 0."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{part:05d}.{suffix}"


def log_writer(folder: Place, name: str, *, durable: bool) -> LogWriter:
    """A new log in a trace's place. Raises OSError."""
    if isinstance(folder, Address):
        return PartsLogWriter(folder, name)
    return LogWriter(folder / name, durable=durable)


def _parts(folder: Place, name: str) -> list[str]:
    """The parts of a log that was not finished, in order; none where it is whole."""
    with reading(folder):
        there = names_in(folder)
    if name in there:
        return []
    count = next(part for part in range(len(there) + 1) if part_name(name, part) not in there)
    return [part_name(name, part) for part in range(count)]


class Lines:
    """The whole lines of a log; a half-written last line is left out when the trace is incomplete."""

    def __init__(self, folder: Place, name: str, entry: Mapping[str, Any] | None) -> None:
        """``entry`` is the log's entry in a complete trace's header.

        Raises LogMissing, LogSizeError, ChecksumError, LogLineError.
        """
        self.path = path = folder / name
        self._joined: bytes | None = None
        parts = [] if entry is not None else _parts(folder, name)
        if parts:
            self._joined = b"".join(read_bytes(folder / part) for part in parts)
        size = len(self._joined) if self._joined is not None else regular_size(path, LogMissing)
        if entry is not None and size != entry["bytes"]:
            raise LogSizeError(
                f"{path} has {size} bytes; expected {entry['bytes']}, as when the trace was completed. It is "
                "cut: copy or record the trace again."
            )
        raw = self.raw()
        if entry is not None and zlib.crc32(raw) != entry["crc32"]:
            raise ChecksumError(
                f"{path} has the checksum {zlib.crc32(raw)}; expected {entry['crc32']}, as when the trace "
                "was completed. It is damaged: copy or record the trace again."
            )
        data = np.frombuffer(raw, np.uint8)
        # In parts, which the processor's cache holds.
        ends = [np.flatnonzero(data[at : at + _PART] == 10) + (at + 1) for at in range(0, len(data), _PART)]
        self.starts = np.concatenate(([0], *ends))
        if entry is not None and self.starts[-1] != len(raw):
            raise LogLineError(
                f"{path} ends in the middle of a line; expected a line end, for the trace is complete. Copy "
                "or record the trace again."
            )
        self.eventful = self._with_events(raw)
        # The first letter after {" tells plans, forwards and events apart without parsing the line.
        self.initials = np.full(len(self), 0, np.uint8)
        at = self.starts[:-1] + 2
        self.initials[:] = data[np.minimum(at, max(0, len(raw) - 1))] if len(self) else 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    def _with_events(self, raw: bytes) -> list[int]:
        """The lines that have the word "events" as a key, found while the log is in memory."""
        found, within = [], _EVENTS.index(_RARE)
        at = raw.find(_RARE)
        while at >= 0:
            if raw.startswith(_EVENTS, at - within):
                found.append(at)
            at = raw.find(_RARE, at + 1)
        lines: list[int] = np.unique(np.searchsorted(self.starts, found, side="right") - 1).tolist()
        return [line for line in lines if line < len(self)]

    def raw(self) -> bytes:
        """All bytes of the log; raises TraceReadError."""
        return read_bytes(self.path) if self._joined is None else self._joined

    def __getitem__(self, index: int) -> Any:
        """The parsed line; raises LogLineError."""
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        if self._joined is not None:
            raw = self._joined[start:stop]
        else:
            raw = read_array(self.path, start, (stop - start,), np.dtype("u1")).tobytes()
        try:
            return parse_json(raw)
        except ValueError as error:
            raise LogLineError(
                f"{self.path}, line {index + 1}, is not JSON ({error}); expected one JSON value a line. The "
                "file is damaged: copy or record the trace again."
            ) from None


class Forwards(Sequence[dict[str, Any]]):
    """The forwards of a trace, each parsed when asked for, with the calls of its plan as ``calls``."""

    def __init__(self, lines: Lines, requests: int, sites: int) -> None:
        """Parses the plans; raises ForwardLineError, PlanLineError, LogLineError."""
        initials = lines.initials
        self._lines = lines
        self._requests = requests
        known = np.isin(initials, np.frombuffer(b"pfe", np.uint8))
        if not bool(known.all()):
            raise ForwardLineError(
                f"{lines.path}, line {int(np.flatnonzero(~known)[0]) + 1}, starts with neither a plan nor a forward nor "
                'an event; expected {"plan":, {"forward": or {"event": first. Copy or record the trace again.'
            )
        self._places = np.flatnonzero(initials == ord("f"))
        self._plan_places = np.flatnonzero(initials == ord("p"))
        self._event_places = np.flatnonzero(initials == ord("e"))
        self._events: tuple[dict[str, Any], ...] | None = None
        self.plans: list[list[dict[str, Any]]] = []
        self._reach: list[int] = []
        for place in self._plan_places:
            line = lines[int(place)]
            self._reach.append(check_plan(f"{lines.path}, line {place + 1},", line, len(self.plans), sites))
            self.plans.append(line["calls"])

    def __len__(self) -> int:
        return len(self._places)

    def raw(self) -> bytes:
        """All bytes of the log, in which ``spans`` finds the forwards; raises TraceReadError."""
        return self._lines.raw()

    def eventful(self) -> list[int]:
        """The forwards in whose lines events stand."""
        places = np.searchsorted(self._places, self._lines.eventful)
        known = np.append(self._places, -1)[places] == self._lines.eventful
        found: list[int] = places[known].tolist()
        return found

    def spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the line of each forward begins in the file and where it ends, int64 [forwards] in bytes."""
        return self._lines.starts[self._places], self._lines.starts[self._places + 1]

    def __getitem__(self, index: Any) -> Any:
        """Forward ``index`` (not a slice); raises LogLineError, ForwardLineError, IndexError."""
        number = range(len(self))[index]
        place = int(self._places[number])
        line = self._lines[place]
        reach = self._reach[: int(np.searchsorted(self._plan_places, place))]
        check_forward(f"{self._lines.path}, line {place + 1},", line, number, self._requests, reach)
        return {"events": [], **line, "calls": self.plans[line["plan"]]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def events(self) -> tuple[dict[str, Any], ...]:
        """The event lines in order, parsed once; raises LogLineError, EventLineError."""
        if self._events is not None:
            return self._events
        found = []
        for place in self._event_places.tolist():
            line = self._lines[place]
            before = int(np.searchsorted(self._places, place))
            check_event(f"{self._lines.path}, line {place + 1},", line, before, self._requests)
            found.append(line)
        self._events = tuple(found)
        return self._events


def check_plan(where: str, line: Any, number: int, sites: int) -> int:
    """How many rows a forward of this plan must have at least, for the rows that its calls name.

    Raises PlanLineError unless ``line`` is plan ``number``, its calls name existing sites, and no row of a site is
    in two calls.
    """
    found = line if isinstance(line, dict) else {}
    calls = found.get("calls")
    ok = set(found) == {"plan", "calls"} and found["plan"] == number and isinstance(calls, list)
    taken: dict[int, list[tuple[range, ...]]] = {}
    reach = 0
    for call in calls if ok and isinstance(calls, list) else ():
        ok = ok and isinstance(call, dict) and isinstance(call.get("path"), str)
        try:
            ok = ok and isinstance(call["sites"], str) and isinstance(call.get("at", "0"), str)
            named = parse_ranges(call["sites"], sites) if ok else ()
            rows = parse_ranges(call["at"], _MAX_INT32) if ok and "at" in call else _ALL_ROWS
            ok = bool(named and rows)
        except (KeyError, ValueError):
            ok = False
        if ok:
            reach = max(reach, rows[-1].stop if "at" in call else 0)
            for site in (site for run in named for site in run):
                taken.setdefault(site, []).append(rows)
    # Many sites are in the same few calls.
    shared = {tuple(map(id, parts)): parts for parts in taken.values()}
    if not ok or not all(map(_apart, shared.values())):
        raise PlanLineError(
            f"{where} is {str(line)[:200]}; expected plan {number} with calls, each with a path and sites as "
            f"ascending ranges below {sites}, such as 0-12,14; a site comes again only for other rows, which at "
            "names as such ranges. Record the trace again."
        )
    return reach


def _apart(parts: list[tuple[range, ...]]) -> bool:
    ordered = sorted((run for runs in parts for run in runs), key=lambda run: run.start)
    return all(a.stop <= b.start for a, b in pairwise(ordered))


def computed(call: Mapping[str, Any], row: int | None) -> bool:
    """Whether a call of a plan computed a row, which ``flat_row`` gave."""
    return "at" not in call or any(row in run for run in parse_ranges(call["at"], _MAX_INT32))


def flat_row(line: Mapping[str, Any], request: int, position: int) -> int | None:
    """Where a row lies in a forward (``line``) of shape [B, L]: slot * L + column; None if it is not in there.

    The rows of a padded forward start at column 0 of their slot; those of a packed one follow each other.
    """
    column = 0
    for span in line["rows"]:
        within = position - span["start"]
        if span["request"] == request and 0 <= within < span["count"]:
            packed = line["layout"] == "packed"
            return int((column if packed else span["slot"] * line["shape"][1]) + within)
        column += span["count"]
    return None


def check_forward(where: str, line: Any, number: int, requests: int, reach: Sequence[int]) -> None:
    """Raises ForwardLineError unless ``line`` is forward ``number`` and names only what exists.

    ``reach`` has, for each plan so far, the number of rows that it needs.
    """
    found = line if isinstance(line, dict) else {}
    shape, plan, rows = found.get("shape"), found.get("plan"), found.get("rows")
    ok = (
        type(found.get("forward")) is int
        and found["forward"] == number
        and found.get("model", MODELS[0]) in MODELS
        and found.get("phase") in FORWARD_PHASES
        and found.get("layout") in LAYOUTS
        and isinstance(shape, list | tuple)
        and len(shape) == 2
        and all(type(n) is int and n > 0 for n in shape)
        and type(plan) is int
        and 0 <= plan < len(reach)
        and reach[plan] <= shape[0] * shape[1]
        and isinstance(rows, list | tuple)
        and all(_row_span(row, requests) for row in rows)
        and all(_objects(found.get(key, [])) for key in ("caches", "events"))
        and "caches" in found
    )
    if not ok:
        raise ForwardLineError(
            f"{where} is {str(line)[:300]}; expected forward {number} with phase, layout, shape, rows, plan "
            f"(below {len(reach)}, of no more rows than the shape has) and caches, its rows naming requests below "
            f"{requests}. Record the trace again."
        )


def _row_span(row: Any, requests: int) -> bool:
    if not isinstance(row, Mapping) or row.get("phase") not in PHASES:
        return False
    request, slot, start, count = (row.get(key) for key in ("request", "slot", "start", "count"))
    if not (type(request) is int and type(slot) is int and type(start) is int and type(count) is int):
        return False
    return 0 <= request < requests and slot >= 0 and start >= 0 and count > 0


def _objects(items: Any) -> bool:
    return isinstance(items, list | tuple) and all(isinstance(item, Mapping) for item in items)


def read_texts(lines: Lines) -> dict[int, str]:
    """The text of every token id; raises TextLineError, LogLineError."""
    texts: dict[int, str] = {}
    for place in range(len(lines)):
        add_text(f"{lines.path}, line {place + 1},", lines[place], texts)
    return texts


def add_text(where: str, line: Any, texts: dict[int, str]) -> bool:
    """Adds [token id, text]; False if it was there already. Raises TextLineError."""
    token, text = line if isinstance(line, list | tuple) and len(line) == 2 else (None, None)
    if not (
        type(token) is int
        and 0 <= token <= _MAX_INT32
        and isinstance(text, str)
        and texts.get(token, text) == text
    ):
        raise TextLineError(
            f"{where} is {str(line)[:200]}; expected [token id, text] with one text for each id. Record the "
            "trace again."
        )
    if token in texts:
        return False
    texts[token] = text
    return True
