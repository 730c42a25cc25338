"""A small trace with everything in it, and the tools to read it whole and to damage it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from detdiff.errors import TraceError
from detdiff.trace import Embeddings, Generated, Lens, Rows, Site, Trace, TraceWriter, Value

P = TypeVar("P", Path, str)

SITES = (
    Site("embed_tokens", "embedding", None, ("in",), ("out",), None),
    Site("layers.0.mlp.up", "linear", 0, ("in",), ("out",), "layers.0.mlp"),
    Site("layers.0.mlp", "mlp", 0, ("in",), ("out",), None),
    Site("layers.0.cache.write", "cache_write", 0, ("k", "v"), ("K.0", "V.0"), None),
)
FULL = (0, 1, 1, 2, 1, 2, 3, 4, 5, 6)
SHORT = (-1, 0, 0, 1, 0, 1, -1, -1, -1, -1)
HEADER: dict[str, Any] = {
    "scenario": {"model": "none", "schedule": "serial"},
    "model": {"hash": "0"},
    "environment": {"os": "none"},
    "sites": SITES,
    "requests": [{"id": "a", "tokens": [1, 2], "max_tokens": 4}, {"id": "b", "tokens": [3]}],
}
CALLS = [
    {"path": "native", "rule": "", "rows": 2, "second_last": 2, "sites": "0,3"},
    {"path": "reference/a/mm", "rule": "whole twos", "rows": 2, "second_last": 2, "sites": "1", "at": "0"},
    {"path": "reference/a/mv", "rule": "the rest", "rows": 2, "second_last": 2, "sites": "1", "at": "1"},
]


TRIM = {"event": "trim", "request": 1, "model": "draft", "asked": 3, "done": 2, "layers": "0"}
VERIFY = {
    "event": "verify",
    "request": 0,
    "start": 2,
    "proposals": [7, 8],
    "choices": [7, 9],
    "accepted": 1,
    "replacement": 9,
    "committed": [7, 9],
}


def forward_line(number: int, plan: int = 0) -> dict[str, Any]:
    rows = [{"request": r, "slot": r, "start": number, "count": 1, "phase": "decode"} for r in (0, 1)]
    shape = [1, 2]
    return {
        "forward": number,
        "phase": "decode",
        "layout": "packed",
        "shape": shape,
        "rows": rows,
        "plan": plan,
        "caches": [{"layers": [0], "kind": "KVCache", "offset": [number, number]}],
    }


def batch(forward: int, table: tuple[int, ...] = FULL, values: bool = True) -> Rows:
    """Two rows of a forward, one per request; digests say where they belong."""
    columns = max(table) + 1
    digests = np.arange(2 * columns, dtype=np.uint64).reshape(2, columns) + np.uint64(1000 * forward)
    found = {}
    if values:
        bits = np.full((2, 3), 0x3F80 + forward, np.uint16)
        found[0] = Value(np.array([0, 1]), bits, "BF16")
        found[1] = Value(np.array([1]), np.full((1, 2), -0.0, np.float32), "F32")
    request = np.array([0, 1], np.int32)
    same = np.full(2, forward, np.int32)
    return Rows(request, same, same, request, np.ones(2, np.int32), same + 5, table, digests, found)


def tokens(forward: int, lens: bool = True) -> Generated:
    """One generated token of each request."""
    top = np.array([[7, 8], [8, 9]], np.int32)
    logits = np.array([[2.5, 1.0], [3.0, 3.0]], np.float32)
    layers = None
    if lens:
        layers = Lens(top[:, None, :], logits[:, None, :], logits[:, None, :] / 2)
    both, same = np.array([0, 1], np.int32), np.full(2, forward, np.int32)
    return Generated(both, same, top[:, 0], same, same, top, logits, layers)


def embedding(request: int) -> Embeddings:
    """The vector of a request."""
    return Embeddings(np.array([request], np.int32), np.array([[0.5, -0.0, request]], np.float32))


def fill(
    writer: TraceWriter,
    forwards: int,
    *,
    values: bool = True,
    lens: bool = True,
    after: Callable[[int], None] | None = None,
) -> None:
    """``after`` is called with the number of each forward once its rows and tokens are with the writer."""
    for number in range(forwards):
        writer.forward(forward_line(number, writer.plan(CALLS)))
        writer.rows(batch(number, SHORT if number % 3 == 2 else FULL, values))
        writer.generated(tokens(number, lens))
        if number in (0, 2):
            writer.embeddings(embedding(number // 2))
        writer.text(7, "seven")
        writer.text(8 + number, f"text {number} é\n")
        if after is not None:
            after(number)


def write_sample(path: P, forwards: int = 5, times: dict[str, Any] | None = None) -> P:
    """A complete trace of ``forwards`` forwards, two a shard."""
    with TraceWriter(path, HEADER, shard_forwards=2) as writer:
        fill(writer, forwards)
        writer.finish(times=times, observer={"checked": True}, notes=["a note"])
    return path


def read_all(trace: Trace) -> int:
    """Uses everything that a trace offers; returns its number of rows."""
    trace.verify()
    for forward in trace.forwards():
        assert forward["calls"] is not None
    for index in range(len(trace.forwards())):
        trace.call(index, 0)
        trace.call(index, 1, (1, index))
    trace.generated()
    assert len(trace.embeddings().request) <= len(trace.requests)
    for number, shard in enumerate(trace.shards):
        for table in shard.tables:
            digests = trace.fetch(number, table)
            assert digests.shape == (len(shard.table_rows(table)), shard.columns(table))
        for table, column in shard.value_columns():
            value = shard.values(table, column)
            assert value is not None and len(value.rows) == len(value.data)
    return len(trace.row_index().row)


def one_paragraph(error: TraceError) -> bool:
    text = str(error)
    return "\n" not in text and len(text) > 60 and text.endswith(".")


def reseal(path: Path) -> None:
    """Makes trace.json agree with the files again, so that only deeper rules are broken."""
    header = json.loads((path / "trace.json").read_text())
    for entry in header["logs"] + header["shards"]:
        raw = (path / entry["name"]).read_bytes()
        entry.update(bytes=len(raw), crc32=zlib.crc32(raw))
    (path / "trace.json").write_text(json.dumps(header))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits trace.json in place; what ``edit`` returns replaces it unless None."""
    file = path / "trace.json"
    header = json.loads(file.read_text())
    file.write_text(json.dumps(edit(header) or header))


def edit_lines(path: Path, name: str, edit: Callable[[list[Any]], Any]) -> None:
    lines = [json.loads(line) for line in (path / name).read_text().splitlines()]
    edit(lines)
    (path / name).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    reseal(path)


def split_shard(path: Path, index: int = 0) -> tuple[dict[str, Any], bytearray]:
    raw = (path / f"shard-{index:05d}.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])


def join_shard(path: Path, header: object, data: bytes | bytearray, index: int = 0) -> None:
    text = json.dumps(header).encode()
    file = path / f"shard-{index:05d}.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    reseal(path)


def edit_shard(path: Path, edit: Callable[[dict[str, Any], bytearray], Any], index: int = 0) -> None:
    """Edits a shard's header and data; what ``edit`` returns replaces the header unless None."""
    header, data = split_shard(path, index)
    join_shard(path, edit(header, data) or header, data, index)


def set_element(path: Path, name: str, place: int, value: int | float, index: int = 0) -> None:
    """Changes one element of a tensor of a shard."""
    header, data = split_shard(path, index)
    dtype = {"I32": "<i4", "F32": "<f4", "U64": "<u8"}[header[name]["dtype"]]
    start, stop = header[name]["data_offsets"]
    array = np.frombuffer(data, dtype, (stop - start) // np.dtype(dtype).itemsize, start).copy()
    array[place] = value
    data[start:stop] = array.tobytes()
    join_shard(path, header, data, index)
