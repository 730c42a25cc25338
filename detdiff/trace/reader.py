"""Reading a trace: everything is checked before it is used, and only what is asked for is loaded."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import (
    ChecksumError,
    EmbeddingError,
    GeneratedError,
    RowError,
    ShardMissing,
    TableError,
    TraceError,
)
from detdiff.trace.contents import (
    GEN_FIELDS,
    Embeddings,
    Generated,
    Int32,
    Lens,
    Limits,
    Port,
    RowIndex,
    Site,
    TokenIndices,
    UInt64,
    check_embeddings,
    check_lacking,
    check_lacking_sites,
    grouped,
    parse_ranges,
    ports_of,
)
from detdiff.trace.files import read_chunks, reading
from detdiff.trace.header import FORWARDS, TEXTS, parse_sites, read
from detdiff.trace.log import Forwards, Lines, computed, flat_row, read_texts
from detdiff.trace.shard import Shard, open_shard, shard_name
from detdiff.trace.store import Address, Place, names_in, place

_SHARD = re.compile(r"shard-(\d{5,9})\.safetensors", re.ASCII)
_ROW_FIELDS = tuple(field.name for field in fields(RowIndex))


class Trace:
    """An opened trace; digests, values, forwards and texts stay on disk until they are asked for.

    ``complete`` is False when the run did not finish or parts were left out, and ``problems`` says why, a
    paragraph each. ``tables`` has one int32 per port for each table: the port's column of the digests, or -1.
    """

    path: Place
    header: dict[str, Any]
    complete: bool
    problems: tuple[str, ...]
    sites: tuple[Site, ...]
    ports: tuple[Port, ...]
    shards: tuple[Shard, ...]
    tables: dict[int, Int32]
    _forwards: Forwards
    _texts: Lines
    _rows: RowIndex
    _by_request: tuple[Int32, NDArray[np.intp]] | None

    @classmethod
    def open(cls, path: Place | str, *, partial: bool = False, checked: bool = False) -> Trace:
        """Opens and checks a trace; raises the TraceError subclass of the first broken rule.

        ``path`` is a directory, an address of fsspec such as ``s3://bucket/trace``, or a zip file of a trace.

        An unfinished trace opens with ``complete`` False and its finished shards. With ``partial`` a trace
        whose shards or logs are missing or damaged opens too, without the damaged ones. Values, forwards and
        texts are checked when they are read. With ``checked`` every shard's bytes are read once and compared with
        the checksum in the header, without it only ``verify`` does that: a changed digest looks like a
        difference between two runs, so commands that answer from a trace open it checked.
        """
        self = cls()
        self.path = place(path)
        if isinstance(self.path, Address):
            self.path = self.path.fresh()
        self.header = read(self.path)
        self.sites = parse_sites(self.header)
        check_lacking_sites(str(self.path), self.header, self.sites)
        self.ports = ports_of(self.sites)
        problems: list[str] = []
        if not self.header["complete"]:
            problems.append(f"{self.path} was not finished; it holds what was written before the run ended.")
        self._forwards = Forwards(
            self._lines(FORWARDS, partial, problems), len(self.requests), len(self.sites)
        )
        self._texts = self._lines(TEXTS, partial, problems)
        self._open_shards(partial, checked, problems)
        self.complete = not problems
        self.problems = tuple(problems)
        return self

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Each with ``id`` and ``tokens``, the prompt's token ids, and what the recorder added."""
        found: list[dict[str, Any]] = self.header["requests"]
        return found

    @property
    def lacks(self) -> dict[str, str]:
        """What the engine could not show, each with the reason."""
        return dict(self.header.get("lacks", {}))

    @property
    def unmet(self) -> bool:
        """Whether nothing shows that requests which were sent to a server together ran together."""
        server = self.header.get("server")
        return isinstance(server, dict) and "met" in server and server["met"] is not True

    @property
    def engine(self) -> str:
        """The name of the engine that wrote it."""
        return str(self.header.get("engine", {"name": "mlx"})["name"])

    @property
    def scenario(self) -> dict[str, Any]:
        return dict(self.header["scenario"])

    @property
    def model(self) -> dict[str, Any]:
        return dict(self.header["model"])

    def shard(self, index: int) -> Shard:
        return self.shards[index]

    def port_index(self, site: str, port: str) -> int:
        """The place of a port in ``ports`` and tables; raises KeyError."""
        for index, found in enumerate(self.ports):
            if found.name == port and self.sites[found.site].name == site:
                return index
        raise KeyError((site, port))

    def row_index(self) -> RowIndex:
        """All rows of the trace in execution order: int32 [n] each."""
        return self._rows

    def rows_of(self, request: int) -> Int32:
        """The rows of a request, by its number, as places in ``row_index``, ascending; looked up, whatever the number of rows."""
        if self._by_request is None:
            order = grouped(self._rows.request)
            ends = np.searchsorted(
                self._rows.request[order], np.arange(len(self.requests) + 1, dtype=np.int32)
            )
            self._by_request = order.astype(np.int32), ends
        rows, ends = self._by_request
        return rows[ends[request] : ends[request + 1]]

    def fetch(self, shard: int, table: int, start: int = 0, stop: int | None = None) -> UInt64:
        """Rows ``start`` to ``stop`` of one table of one shard, uint64 [n, columns]."""
        return self.shards[shard].digests(table, start, stop)

    def digests(self, rows: NDArray[Any]) -> UInt64:
        """Digests of rows given by their places in ``row_index``, in that order, uint64 [n, columns].

        The rows must share one table; raises ValueError otherwise, IndexError for a place outside.
        """
        tables = np.unique(self._rows.table[rows])
        if len(tables) != 1:
            raise ValueError(
                f"rows of the tables {tables.tolist()} have no common columns; ask for one table"
            )
        table = int(tables[0])
        shards = self._rows.shard[rows]
        out = np.empty((len(rows), self.shards[int(shards[0])].columns(table)), np.uint64)
        for shard in np.unique(shards):
            here = np.flatnonzero(shards == shard)
            out[here] = self.shards[shard].digest_rows(table, self._rows.table_row[rows[here]])
        return out

    def forwards(self) -> Forwards:
        """One object a forward, parsed when asked for, with the calls of its plan as ``calls``.

        An item raises LogLineError or ForwardLineError when its line breaks a rule.
        """
        return self._forwards

    def events(self) -> tuple[dict[str, Any], ...]:
        """What engines and caches did (verify, trim, ...), in order: each with ``event`` and the ``forward`` before it.

        Raises LogLineError or EventLineError.
        """
        return self._forwards.events()

    def call(self, forward: int, site: int, row: tuple[int, int] | None = None) -> Mapping[str, Any] | None:
        """The call (``path``, ``rule``, ...) that computed a site in a forward; None if not recorded.

        ``row`` is (request's index, position); without it, the call of the forward's first rows is given.
        """
        line = self._forwards[forward]
        place = None if row is None else flat_row(line, *row)
        for call in line["calls"]:
            if any(site in run for run in parse_ranges(call["sites"], len(self.sites))):
                if row is None or computed(call, place):
                    return dict(call)
        return None

    def texts(self) -> dict[int, str]:
        """The text of each token id that occurs; raises LogLineError or TextLineError."""
        return read_texts(self._texts)

    def logs(self) -> tuple[tuple[str, bytes], ...]:
        """The names and bytes of both logs; raises TraceReadError."""
        return (FORWARDS, self._forwards.raw()), (TEXTS, self._texts.raw())

    def generated(self, *, lens: bool = True) -> Generated:
        """All generated tokens as recorded; ``lens=False`` leaves the per-layer logits on disk."""
        parts = [part for shard in self.shards if (part := shard.generated(lens)) is not None]
        if not parts:
            none, top = np.empty(0, np.int32), np.empty((0, 0), np.int32)
            return Generated(none, none, none, none, none, top, top.astype(np.float32))
        names = (*GEN_FIELDS, "top_ids", "top_logits")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        layers = [part.lens for part in parts if part.lens is not None]
        whole = None
        if layers:
            whole = Lens(
                np.concatenate([part.top_ids for part in layers]),
                np.concatenate([part.top_logits for part in layers]),
                np.concatenate([part.contested for part in layers]),
            )
        return Generated(**joined, lens=whole)

    def embeddings(self) -> Embeddings:
        """The embedding of each request that has one, in the order in which they were written."""
        parts = [part for shard in self.shards if (part := shard.embeddings()) is not None]
        if not parts:
            return Embeddings(np.empty(0, np.int32), np.empty((0, 0), np.float32))
        return Embeddings(
            np.concatenate([part.request for part in parts]), np.concatenate([part.vector for part in parts])
        )

    def verify(self) -> None:
        """Reads everything and checks what opening leaves out.

        Raises ChecksumError for a shard of a complete trace whose bytes changed, and the error of any broken
        value, forward or text.
        """
        entries = {entry["name"]: entry for entry in self.header["shards"]} if self.header["complete"] else {}
        for shard in self.shards:
            _check_bytes(shard.path, entries)
            for table, column in shard.value_columns():
                shard.value_rows(table, column)
        for _ in self._forwards:
            pass
        self.events()
        self.texts()

    def _lines(self, name: str, partial: bool, problems: list[str]) -> Lines:
        entry = None
        if self.header["complete"]:
            entry = next(log for log in self.header["logs"] if log["name"] == name)
        try:
            return Lines(self.path, name, entry)
        except TraceError as error:
            if not partial or entry is None:
                raise
            problems.append(str(error))
            return Lines(self.path, name, None)

    def _open_shards(self, partial: bool, checked: bool, problems: list[str]) -> None:
        entries = {e["name"]: e for e in self.header["shards"]} if checked and self.header["complete"] else {}
        limits = Limits(len(self.requests), len(self._forwards), len(self.ports))
        shards: list[Shard] = []
        tokens = TokenIndices()
        embedded: tuple[frozenset[int], int | None] = frozenset(), None
        self.tables = {}
        last: tuple[int, tuple[int, ...] | None] = (0, None)
        for number, size in self._expected(partial, problems):
            try:
                where = self.path / shard_name(number)
                shard, generated = open_shard(where, len(shards), limits, size)
                if checked:
                    _check_bytes(shard.path, entries)
                last = self._follows(shard, *last)
                if generated is not None:
                    check_lacking(str(shard.path), self.header.get("lacks", {}), generated)
                    _check_new(str(shard.path), tokens.add(generated.request, generated.index))
                embedded = self._embedded(shard, limits, embedded)
            except TraceError as error:
                if not partial:
                    raise
                problems.append(str(error))
                continue
            self.tables.update(shard.tables)
            shards.append(shard)
        self._rows, self._by_request = _joined_rows(shards), None
        self.shards = tuple(shards)

    def _embedded(
        self, shard: Shard, limits: Limits, before: tuple[frozenset[int], int | None]
    ) -> tuple[frozenset[int], int | None]:
        """The requests that have an embedding so far, and its width; raises when a shard contradicts them."""
        found = shard.embeddings()
        if found is None:
            return before
        requests, width = before
        check_embeddings(str(shard.path), found, limits, requests)
        if found.vector.shape[1] != (width or found.vector.shape[1]):
            raise EmbeddingError(
                f"{shard.path} has embeddings of {found.vector.shape[1]} numbers; expected {width}, as in earlier shards. The "
                "file belongs to another trace: copy or record it again."
            )
        return requests | set(found.request.tolist()), found.vector.shape[1]

    def _expected(self, partial: bool, problems: list[str]) -> list[tuple[int, int | None]]:
        """The numbers of the shards that should be there, each with its size where the header states it."""
        if self.header["complete"]:
            return [(number, entry["bytes"]) for number, entry in enumerate(self.header["shards"])]
        with reading(self.path):
            matches = [match for name in names_in(self.path) if (match := _SHARD.fullmatch(name))]
        numbers = sorted(int(match[1]) for match in matches if match[0] == shard_name(int(match[1])))
        gap = next((place for place, number in enumerate(numbers) if place != number), None)
        if gap is not None:
            missing = ShardMissing(
                f"{self.path / shard_name(gap)} is not there, but {shard_name(numbers[-1])} is; expected "
                "shards without a gap. Copy the whole directory again; what is left can be opened with "
                "--partial (partial=True)."
            )
            if not partial:
                raise missing
            problems.append(str(missing))
        return [(number, None) for number in numbers]

    def _follows(
        self, shard: Shard, forward: int, top: tuple[int, ...] | None
    ) -> tuple[int, tuple[int, ...] | None]:
        """The last forward and the shape of the top-k so far; raises when a shard contradicts them."""
        for number, table in shard.tables.items():
            if number in self.tables and not np.array_equal(self.tables[number], table):
                raise TableError(
                    f"{shard.path} has another table {number} than an earlier shard; expected one meaning "
                    "for a table in a trace. The file belongs to another trace: copy or record it again."
                )
        rows = shard.rows.forward
        if len(rows) and int(rows[0]) < forward:
            raise RowError(
                f"{shard.path} has rows of forward {int(rows[0])} after rows of forward {forward}; expected "
                "execution order. The file belongs to another trace: copy or record it again."
            )
        found = top
        if "gen.top_ids" in shard.tensors:
            lens = shard.tensors.get("lens.top_ids")
            found = (shard.tensors["gen.top_ids"].shape[1], *(lens.shape[1:] if lens is not None else ()))
        if top is not None and found != top:
            raise GeneratedError(
                f"{shard.path} has top-k and lens of the shape {found}; expected {top}, as in earlier "
                "shards. The file belongs to another trace: copy or record it again."
            )
        return int(rows[-1]) if len(rows) else forward, found


def _check_bytes(path: Place, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ChecksumError where the header states another checksum for the file."""
    if path.name not in entries:
        return
    crc, expected = 0, entries[path.name]["crc32"]
    with reading(path):
        for chunk in read_chunks(path, entries[path.name]["bytes"]):
            crc = zlib.crc32(chunk, crc)
    if crc != expected:
        raise ChecksumError(
            f"{path} has the checksum {crc}; expected {expected}, as when it was written. It is damaged: copy or "
            "record the trace again."
        )


def _check_new(where: str, again: tuple[int, int] | None) -> None:
    if again is not None:
        raise GeneratedError(
            f"{where} has token {again[1]} of request {again[0]} although it was generated before; expected every index once. "
            "Record the trace again."
        )


def _joined_rows(shards: list[Shard]) -> RowIndex:
    """The rows of all shards; each of ``shards`` then has its part of them, so that no row is in memory twice."""
    parts = {name: [getattr(shard.rows, name) for shard in shards] for name in _ROW_FIELDS}
    ends = np.cumsum([0, *(len(part) for part in parts["row"])])
    for number, shard in enumerate(shards):
        shards[number] = replace(shard, rows=_NO_ROWS)
    joined = RowIndex(**{name: np.concatenate(parts.pop(name) or [_NONE]) for name in _ROW_FIELDS})
    for number, shard in enumerate(shards):
        mine = slice(ends[number], ends[number + 1])
        own = RowIndex(**{name: getattr(joined, name)[mine] for name in _ROW_FIELDS})
        shards[number] = replace(shard, rows=own)
    return joined


_NONE = np.empty(0, np.int32)
_NO_ROWS = RowIndex(*(_NONE for _ in _ROW_FIELDS))
