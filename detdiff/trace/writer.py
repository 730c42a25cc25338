"""Writing a trace: shards appear whole or not at all, and what is whole stays readable whatever happens."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detdiff.errors import (
    EmbeddingError,
    GeneratedError,
    RowError,
    TensorShapeError,
    TensorTypeError,
    TraceExists,
    TraceHeaderError,
    TraceWriteError,
    ValueRowsError,
    WriterClosed,
)
from detdiff.trace.contents import (
    GEN_FIELDS,
    ROW_FIELDS,
    Embeddings,
    Generated,
    Lens,
    Limits,
    Rows,
    Site,
    TokenIndices,
    Value,
    check_embeddings,
    check_generated,
    check_lacking,
    check_lacking_sites,
    check_rows,
    check_table,
    ports_of,
)
from detdiff.trace.digest import STORAGE
from detdiff.trace.files import replace_file, writing
from detdiff.trace.header import (
    FORWARDS,
    HEADER,
    SCHEMA,
    TEXTS,
    check,
    check_requests,
    encode,
    parse_sites,
)
from detdiff.trace.log import add_text, check_event, check_forward, check_plan, encode_line, log_writer
from detdiff.trace.shard import EMBEDDING_TENSORS, LENS_TENSORS, encode_header, shard_name
from detdiff.trace.store import Address, Place, is_taken, place

_INT32 = np.dtype("<i4")


def own_rows(rows: Rows) -> Rows:
    """A copy in storage form that shares no memory with the caller's arrays, without empty values.

    Raises TensorShapeError, TensorTypeError or ValueRowsError when the arrays do not fit each other.
    """
    fields = {name: _own(getattr(rows, name), _INT32) for name in ROW_FIELDS}
    digests = _own(rows.digests, np.dtype("<u8"))
    count = len(fields["request"])
    shapes = {name: array.shape for name, array in fields.items()}
    if (
        any(shape != (count,) for shape in shapes.values())
        or digests.shape[:1] != (count,)
        or digests.ndim != 2
    ):
        raise TensorShapeError(
            f"A batch of rows has fields of the shapes {shapes} and digests of {digests.shape}; expected [n] "
            "and [n, columns]. This is a fault of the recorder."
        )
    values = {}
    for column, value in rows.values.items():
        if len(value.rows):
            values[column] = _own_value(column, value, count, digests.shape[1])
    return Rows(**fields, table=tuple(rows.table), digests=digests, values=values)


def _own_value(column: int, value: Value, count: int, columns: int) -> Value:
    data = np.asarray(value.data)
    storage = STORAGE.get(value.dtype)
    if storage is None or data.dtype.newbyteorder("=") != storage.newbyteorder("="):
        raise TensorTypeError(
            f"The values of column {column} are {data.dtype} arrays for the dtype {value.dtype!r}; expected "
            f"{storage}. This is a fault of the recorder."
        )
    own = _own(value.rows, _INT32)
    if data.shape[:1] != own.shape or own.ndim != 1 or 0 in data.shape:
        raise TensorShapeError(
            f"The values of column {column} have the shape {data.shape} for rows of shape {own.shape}; "
            "expected [m, ...] and [m], without a zero. This is a fault of the recorder."
        )
    if not 0 <= column < columns or own[0] < 0 or own[-1] >= count or bool((np.diff(own) <= 0).any()):
        raise ValueRowsError(
            f"The values of column {column} are for the rows {own.tolist()[:8]}; expected ascending rows "
            f"below {count} and a column below {columns}. This is a fault of the recorder."
        )
    return Value(own, _own(data, storage), value.dtype)


def own_embeddings(found: Embeddings) -> Embeddings:
    """Copies in the stored form. Raises TensorShapeError or TensorTypeError."""
    request, vector = _own(found.request, _INT32), _own(found.vector, np.dtype("<f4"))
    if vector.ndim != 2 or request.shape != vector.shape[:1] or not vector.shape[1]:
        raise TensorShapeError(
            f"Embeddings have the shape {vector.shape} for {request.shape} requests; expected a vector for each, with one number "
            "at least. This is a fault of the recorder."
        )
    return Embeddings(request, vector)


def own_generated(generated: Generated) -> Generated:
    """A copy in storage form that shares no memory; raises TensorShapeError."""
    own = {name: _own(getattr(generated, name), _INT32) for name in (*GEN_FIELDS, "top_ids")}
    logits = _own(generated.top_logits, np.dtype("<f4"))
    count, top = len(own["request"]), own["top_ids"].shape
    ok = all(own[name].shape == (count,) for name in GEN_FIELDS)
    ok = ok and len(top) == 2 and top[0] == count and logits.shape == top
    lens = generated.lens
    if lens is not None:
        lens = Lens(
            _own(lens.top_ids, _INT32),
            _own(lens.top_logits, np.dtype("<f4")),
            _own(lens.contested, np.dtype("<f4")),
        )
        shape = lens.top_ids.shape
        ok = ok and len(shape) == 3 and shape[0] == count and (0 not in shape or not count)
        ok = ok and lens.top_logits.shape == shape and lens.contested.shape == (*shape[:2], 2)
    if not ok:
        raise TensorShapeError(
            "A batch of generated tokens has arrays that do not fit each other; expected [g], top [g, k], "
            "lens [g, layers, k] and contested [g, layers, 2]. This is a fault of the recorder."
        )
    return Generated(**own, top_logits=logits, lens=lens)


def _own(array: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.array(array, dtype=dtype, order="C", copy=True)


class ShardBuffer:
    """What goes into shard ``index``. Encoding does not change it, so a failed write can be repeated."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.bytes = 0
        self._count = 0
        self._batches: list[tuple[int, Rows]] = []
        self._generated: list[Generated] = []
        self._embeddings: list[Embeddings] = []
        self._forms: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    def __bool__(self) -> bool:
        return bool(self._batches or self._generated or self._embeddings)

    def forwards(self) -> int:
        """How many forwards the buffered rows span."""
        if not self._batches:
            return 0
        return int(self._batches[-1][1].forward[-1]) - int(self._batches[0][1].forward[0]) + 1

    def takes(self, table: int, rows: Rows) -> bool:
        """False when values of a column have another dtype or shape here: they need a shard of their own."""
        forms = ((self._forms.get((table, column)), value) for column, value in rows.values.items())
        return all(form is None or form == (value.dtype, value.data.shape[1:]) for form, value in forms)

    def add(self, table: int, rows: Rows) -> None:
        """Appends rows made by ``own_rows`` that ``takes`` accepts."""
        start = self._count
        values = {c: replace(v, rows=v.rows + np.int32(start)) for c, v in rows.values.items()}
        self._forms.update({(table, c): (v.dtype, v.data.shape[1:]) for c, v in values.items()})
        self.bytes += rows.digests.nbytes + 28 * len(rows.request)
        self.bytes += sum(value.data.nbytes + value.rows.nbytes for value in values.values())
        self._count = start + len(rows.request)
        self._batches.append((table, replace(rows, values=values)))

    def add_generated(self, generated: Generated) -> None:
        """Appends tokens made by ``own_generated``."""
        lens = generated.lens
        self.bytes += 20 * len(generated.token) + 2 * generated.top_ids.nbytes
        self.bytes += 2 * lens.top_ids.nbytes + lens.contested.nbytes if lens is not None else 0
        self._generated.append(generated)

    def add_embeddings(self, found: Embeddings) -> None:
        """Appends embeddings made by ``own_embeddings``."""
        self.bytes += found.request.nbytes + found.vector.nbytes
        self._embeddings.append(found)

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the shard, a tensor at a time."""
        tensors = self._tensors()
        forms = [
            (name, dtype, (sum(len(part) for part in parts), *parts[0].shape[1:]))
            for name, (dtype, parts) in tensors.items()
        ]
        header, order = encode_header(forms)
        yield memoryview(header)
        for name in order:
            joined = np.concatenate(tensors[name][1])
            if joined.size:
                yield joined.reshape(-1).view(np.uint8).data

    def _tensors(self) -> dict[str, tuple[str, list[NDArray[Any]]]]:
        found: dict[str, tuple[str, list[NDArray[Any]]]] = {}

        def add(name: str, dtype: str, array: NDArray[Any]) -> None:
            found.setdefault(name, (dtype, []))[1].append(array)

        for name in (*ROW_FIELDS, "table"):
            add(f"row.{name}", "I32", np.empty(0, _INT32))
        for table, rows in self._batches:
            for name in ROW_FIELDS:
                add(f"row.{name}", "I32", getattr(rows, name))
            add("row.table", "I32", np.full(len(rows.request), table, _INT32))
            if f"table/{table}" not in found:
                add(f"table/{table}", "I32", np.array(rows.table, _INT32))
            add(f"digest/{table}", "U64", rows.digests)
            for column, value in rows.values.items():
                add(f"value/{table}/{column}", value.dtype, value.data)
                add(f"value/{table}/{column}.rows", "I32", value.rows)
        for part in self._generated:
            for name in (*GEN_FIELDS, "top_ids"):
                add(f"gen.{name}", "I32", getattr(part, name))
            add("gen.top_logits", "F32", part.top_logits)
            if part.lens is not None:
                lens = (part.lens.top_ids, part.lens.top_logits, part.lens.contested)
                for name, dtype, array in zip(LENS_TENSORS, ("I32", "F32", "F32"), lens, strict=True):
                    add(name, dtype, array)
        for each in self._embeddings:
            for name, dtype, array in zip(
                EMBEDDING_TENSORS, ("I32", "F32"), (each.request, each.vector), strict=True
            ):
                add(name, dtype, array)
        return found


_RESERVED = frozenset({"schema", "complete", "logs", "shards"})


class TraceWriter:
    """Writes one trace directory; use it as a context manager.

    Leaving the block by an exception, or without ``finish``, aborts: what is buffered is still written if it
    can be, the trace stays marked incomplete and the exception goes on. Arrays are copied, so callers may
    reuse theirs.
    """

    def __init__(
        self,
        path: Place | str,
        header: Mapping[str, Any],
        *,
        shard_bytes: int = 32 << 20,
        shard_forwards: int = 512,
        durable: bool = True,
    ) -> None:
        """Makes the directory and an incomplete trace.json. ``path`` may be an address of fsspec, as in ``Trace.open``.

        ``header`` needs ``sites`` (Site or their JSON) and ``requests``; ``scenario``, ``model``,
        ``environment``, ``observer`` and ``notes`` are empty unless given. A shard is closed at
        ``shard_bytes`` bytes or ``shard_forwards`` forwards. A trace that is not ``durable`` is not synced to the disk: one
        that nobody needs after a power cut. Raises TraceExists unless ``path`` is new or an
        empty directory, TraceWriteError, and TraceHeaderError, SiteListError or RequestListError for a bad
        header.
        """
        self.path = place(path)
        self._refuse_reserved(header)
        self._header = self._checked(header)
        sites = parse_sites(self._header)
        check_lacking_sites("The header given to the writer", self._header, sites)
        ports = ports_of(sites)
        self._limits = Limits(len(self._header["requests"]), 0, len(ports))
        self._ids = {request["id"] for request in self._header["requests"]}
        self._grown = False
        self._shard_bytes, self._shard_forwards = shard_bytes, shard_forwards
        self._durable = durable
        self._tables: dict[tuple[int, ...], int] = {}
        self._plans: dict[bytes, int] = {}
        self._reach: list[int] = []
        self._texts: dict[int, str] = {}
        self._last_forward = 0
        self._tokens = TokenIndices()
        self._top: tuple[Any, ...] | None = None
        self._embedded: set[int] = set()
        self._width: int | None = None
        self._shards: dict[int, dict[str, Any]] = {}
        self._buffer = ShardBuffer(0)
        self._state = "open"
        with writing(self.path, "Nothing was recorded."):
            if is_taken(self.path):
                raise TraceExists(
                    f"{self.path} exists and is not an empty directory; expected a new path for the trace. "
                    "Choose another one, or remove it first."
                )
            if not isinstance(self.path, Address):
                self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._forward_log = log_writer(self.path, FORWARDS, durable=durable)
            except FileExistsError:
                raise TraceExists(
                    f"{self.path} has become a trace at this moment: another recording writes there. Choose another path."
                ) from None
            self._text_log = log_writer(self.path, TEXTS, durable=durable)
            replace_file(self.path / HEADER, [encode(self._header)], durable=durable)

    def request(self, request: Mapping[str, Any], told: Mapping[str, Any]) -> int:
        """One more request than the header was begun with, and what its scenario says of it; its number.

        The header on disk has it before a log or shard names it. Raises RequestListError and TraceHeaderError.
        """
        self._must_be_open()
        number = self._limits.requests
        check_requests([request], f"The header of {self.path}", number, self._ids)
        self._header["requests"].append(dict(request))
        self._header["scenario"].setdefault("request", []).append(dict(told))
        self._grown = True
        self._limits = replace(self._limits, requests=number + 1)
        return number

    def plan(self, calls: Sequence[Mapping[str, Any]]) -> int:
        """The number of the plan with these calls, for a forward's ``plan``; logs it when it is new.

        A call has ``path``, ``rule``, ``rows``, ``second_last`` and ``sites`` (site indices as
        ``format_ranges`` gives them), and ``at`` where it is of some rows only (as ranges, too). Raises PlanLineError
        or LogLineError.
        """
        self._must_be_open()
        key = encode_line(list(calls))
        if key not in self._plans:
            line = {"plan": len(self._plans), "calls": list(calls)}
            self._reach.append(check_plan("A plan", line, len(self._plans), len(self._header["sites"])))
            self._forward_log.append(line)
            self._plans[key] = len(self._plans)
        return self._plans[key]

    def forward(self, line: Mapping[str, Any]) -> None:
        """Logs one forward, before its rows. Raises ForwardLineError, LogLineError, or TraceWriteError."""
        self._must_be_open()
        number = self._limits.forwards
        check_forward("A forward", line, number, self._limits.requests, self._reach)
        if self._buffer.forwards() >= self._shard_forwards:
            self._flush()
        # "forward" first: readers tell lines apart by their first letter.
        self._forward_log.append({"forward": number, **line})
        self._limits = Limits(self._limits.requests, number + 1, self._limits.ports)

    def event(self, line: Mapping[str, Any]) -> None:
        """Logs what happened in the last logged forward or after it. Raises EventLineError or LogLineError."""
        self._must_be_open()
        check_event("An event", line, self._limits.forwards, self._limits.requests)
        # "event" first: readers tell lines apart by their first letter.
        self._forward_log.append({"event": line["event"], **line})

    def text(self, token: int, text: str) -> None:
        """Logs the text of a token id, once. Raises TextLineError when it had another text."""
        self._must_be_open()
        if add_text("A text", [token, text], self._texts):
            self._text_log.append([token, text])

    def rows(self, rows: Rows) -> None:
        """Adds rows of logged forwards, in execution order.

        Raises RowError, TableError, TensorShapeError, TensorTypeError or ValueRowsError for a batch that
        breaks a rule of the format (it is then not added), TraceWriteError or TraceDiskFull when a shard
        cannot be written.
        """
        self._must_be_open()
        own = own_rows(rows)
        if not len(own.request):
            return
        check_rows("The batch", {name: getattr(own, name) for name in ROW_FIELDS}, self._limits)
        if int(own.forward[0]) < self._last_forward:
            raise RowError(
                f"A batch has rows of forward {int(own.forward[0])} after rows of forward "
                f"{self._last_forward}; expected execution order. This is a fault of the recorder."
            )
        table = self._table(own.table, own.digests.shape[1])
        if not self._buffer.takes(table, own):
            self._flush()
        self._buffer.add(table, own)
        self._last_forward = int(own.forward[-1])
        if self._buffer.bytes >= self._shard_bytes:
            self._flush()

    def generated(self, generated: Generated) -> None:
        """Adds generated tokens of logged forwards.

        Raises GeneratedError, TensorShapeError, TraceWriteError or TraceDiskFull.
        """
        self._must_be_open()
        own = own_generated(generated)
        if not len(own.request):
            return
        check_generated("The batch", own, self._limits)
        check_lacking("The batch", self._header.get("lacks", {}), own)
        top = (own.top_ids.shape[1], None if own.lens is None else own.lens.top_ids.shape[1:])
        if top != (self._top or top) or self._tokens.add(own.request, own.index) is not None:
            raise GeneratedError(
                "A batch of generated tokens repeats an index of a request, or its top-k or lens has "
                "another shape than before; expected every index once and one shape in a trace. This is a "
                "fault of the recorder."
            )
        self._top = top
        self._buffer.add_generated(own)
        if self._buffer.bytes >= self._shard_bytes:
            self._flush()

    def embeddings(self, found: Embeddings) -> None:
        """Adds the embeddings of some requests, all of one width.

        Raises EmbeddingError, TensorShapeError, TraceWriteError or TraceDiskFull.
        """
        self._must_be_open()
        own = own_embeddings(found)
        if not len(own.request):
            return
        check_embeddings("The batch", own, self._limits, self._embedded)
        width = own.vector.shape[1]
        if width != (self._width or width):
            raise EmbeddingError(
                f"A batch has embeddings of {width} numbers after some of {self._width}; expected one width in a trace. This is a "
                "fault of the recorder."
            )
        self._embedded |= set(own.request.tolist())
        self._width = width
        self._buffer.add_embeddings(own)
        if self._buffer.bytes >= self._shard_bytes:
            self._flush()

    def finish(self, *, complete: bool = True, times: Mapping[str, Any] | None = None, **extra: Any) -> None:
        """Writes what is buffered and the final trace.json, with ``extra`` keys added to or replaced in it.

        ``times`` is the one block that may differ between equal runs. Raises TraceHeaderError,
        TraceWriteError or TraceDiskFull; the trace then stays incomplete.
        """
        self._must_be_open()
        self._refuse_reserved(extra)
        header = self._checked({**self._header, **extra, "times": dict(times or {})})
        self._flush()
        with self._failing(self.path / FORWARDS):
            for log in (self._forward_log, self._text_log):
                log.flush()
                log.seal()
        header["complete"] = complete
        header["logs"] = [self._forward_log.entry(), self._text_log.entry()]
        header["shards"] = [self._shards[index] for index in range(len(self._shards))]
        with self._failing(self.path / HEADER):
            replace_file(self.path / HEADER, [encode(header)], durable=self._durable)
        self._state = "finished"
        self._close_logs()

    def abort(self) -> None:
        """Writes what is buffered as a last shard and leaves the trace incomplete; nothing after a failure.

        Raises TraceWriteError or TraceDiskFull when that cannot be written. Does nothing once finished.
        """
        if self._state != "open":
            return
        try:
            self._flush()
            self._write_grown()
            with self._failing(self.path / FORWARDS):
                self._forward_log.flush()
                self._text_log.flush()
        finally:
            self._state = "aborted"
            self._close_logs()

    def _close_logs(self) -> None:
        self._forward_log.close()
        self._text_log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.abort()
            return
        # Whatever goes wrong while saving the rest must not replace the exception that ended the run.
        with suppress(Exception):
            self.abort()

    def _table(self, table: tuple[int, ...], columns: int) -> int:
        known = self._tables.get(table)
        if known is None or max(table, default=-1) + 1 != columns:
            check_table("The batch", np.array(table, np.int32), columns, self._limits)
            known = self._tables.setdefault(table, len(self._tables))
        return known

    def _flush(self) -> None:
        buffer = self._buffer
        if not buffer:
            return
        path = self.path / shard_name(buffer.index)
        self._write_grown()
        # The logs first: a shard may name only forwards that are on disk.
        with self._failing(self.path / FORWARDS):
            self._forward_log.flush()
            self._text_log.flush()
        size, crc = 0, 0

        def counted() -> Iterator[memoryview]:
            nonlocal size, crc
            for chunk in buffer.chunks():
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
                yield chunk

        with self._failing(path):
            replace_file(path, counted(), durable=self._durable)
        # An interrupt anywhere above leads to the same shard being written again, never to rows stored twice.
        self._shards[buffer.index] = {"name": path.name, "bytes": size, "crc32": crc}
        self._buffer = ShardBuffer(buffer.index + 1)

    def _write_grown(self) -> None:
        """The header with the requests that came since it was written."""
        if self._grown:
            with self._failing(self.path / HEADER):
                replace_file(self.path / HEADER, [encode(self._header)], durable=self._durable)
            self._grown = False

    @contextmanager
    def _failing(self, path: Place) -> Iterator[None]:
        whole = len(self._shards)
        try:
            with writing(
                path, f"The {whole} shards finished before it stay readable, and the trace is incomplete."
            ):
                yield
        except TraceWriteError:
            self._state = "failed"
            if isinstance(path, Path):
                with suppress(OSError):
                    path.with_name(f".{path.name}.tmp").unlink(missing_ok=True)
            raise

    def _must_be_open(self) -> None:
        if self._state != "open":
            raise WriterClosed(
                f"The writer of {self.path} is {self._state}; expected an open one. Record into a new trace "
                "instead."
            )

    @staticmethod
    def _refuse_reserved(given: Mapping[str, Any]) -> None:
        reserved = sorted(_RESERVED & set(given))
        if reserved:
            raise TraceHeaderError(
                f"The header given to the writer has {', '.join(reserved)}, which the writer states itself; "
                "expected other keys. This is a fault of the recorder."
            )

    @staticmethod
    def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
        """The header with its keys in the canonical order and its sites as JSON."""
        first = ("scenario", "model", "environment", "requests", "sites")
        header: dict[str, Any] = {"schema": SCHEMA, "complete": False}
        header |= {key: given.get(key, [] if key in ("requests", "sites") else {}) for key in first}
        header["sites"] = [site.to_json() if isinstance(site, Site) else site for site in header["sites"]]
        header |= {
            "logs": [],
            "shards": [],
            "observer": given.get("observer", {}),
            "notes": given.get("notes", []),
        }
        header |= {key: value for key, value in given.items() if key not in header and key != "times"}
        header["times"] = given.get("times", {})
        check(header, "The header given to the writer")
        return header
