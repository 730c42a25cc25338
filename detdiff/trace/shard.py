"""One shard of a trace: a canonical safetensors file, which tensors it must hold, and reading parts of them.

Eight bytes of header length, a JSON header, then the tensors without holes. Tensors are ordered by element
size (largest first, so that each is aligned) and then by name, so that equal content gives equal bytes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import (
    RowError,
    ShardHeaderError,
    ShardLengthError,
    ShardMissing,
    ShardSizeError,
    TensorMissing,
    TensorNameError,
    TensorOffsetError,
    TensorShapeError,
    TensorTypeError,
    ValueRowsError,
)
from detdiff.trace.contents import (
    GEN_FIELDS,
    ROW_FIELDS,
    Embeddings,
    Generated,
    Int32,
    Lens,
    Limits,
    RowIndex,
    UInt64,
    Value,
    check_generated,
    check_rows,
    check_table,
)
from detdiff.trace.digest import STORAGE
from detdiff.trace.files import parse_json, read_array, read_rows, regular_size
from detdiff.trace.store import Place

_MAX_HEADER = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is: ``offset`` is the absolute position of its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """The length and header for tensors given as (name, dtype, shape), and the order to write them in."""
    ordered = sorted(tensors, key=lambda item: (-STORAGE[item[1]].itemsize, item[0]))
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in ordered:
        stop = offset + math.prod(shape) * STORAGE[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [name for name, _, _ in ordered]


def read_header(path: Place, size: int) -> dict[str, Tensor]:
    """The tensors of a file of ``size`` bytes; trusts no length before it is checked.

    Raises ShardLengthError, ShardHeaderError, TensorTypeError, TensorOffsetError.
    """
    prefix = read_array(path, 0, (min(8, size),), np.dtype("u1")).tobytes()
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise ShardLengthError(
            f"{path} has {size} bytes and claims a header of {length if len(prefix) == 8 else '?'} "
            f"bytes; expected 2 to {max(0, min(size - 8, _MAX_HEADER))}. The file is cut or damaged: "
            "copy or record the trace again."
        )
    raw = read_array(path, 8, (length,), np.dtype("u1")).tobytes()
    return _placed(path, _parsed(path, raw), 8 + length, size)


def _parsed(path: Place, raw: bytes) -> Mapping[str, Any]:
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise ShardHeaderError(
            f"{path} has a header that is not JSON ({error}); expected an object of tensors. The file is "
            "damaged: copy or record the trace again."
        ) from None
    if not isinstance(header, dict):
        raise ShardHeaderError(
            f"{path} has a header of type {type(header).__name__}; expected an object of tensors. The file "
            "is damaged: copy or record the trace again."
        )
    return header


def _placed(path: Place, header: Mapping[str, Any], data: int, size: int) -> dict[str, Tensor]:
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        if not _well_formed(entry):
            raise ShardHeaderError(
                f"{path} describes the tensor {name!r} as {str(entry)[:200]}; expected exactly dtype, shape "
                "and data_offsets. The file is damaged: copy or record the trace again."
            )
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in STORAGE:
            raise TensorTypeError(
                f"{path} has the tensor {name!r} of dtype {dtype!r}; expected one of {', '.join(STORAGE)}. "
                "Read it with the version of detdiff that wrote it."
            )
        tensors[name] = tensor = Tensor(name, dtype, shape, data + start)
        if stop - start != tensor.nbytes:
            raise TensorOffsetError(
                f"{path} gives the tensor {name!r} {stop - start} bytes; expected {tensor.nbytes} for "
                f"{dtype} {list(shape)}. The file is damaged: copy or record the trace again."
            )
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise TensorOffsetError(
                f"{path} starts the tensor {name!r} at byte {start}; expected {end}, where the one before it "
                "ends. The file is damaged: copy or record the trace again."
            )
        end = stop
    if data + end != size:
        raise TensorOffsetError(
            f"{path} has {size} bytes but its tensors end at byte {data + end}; expected the same. The file "
            "is cut or damaged: copy or record the trace again."
        )
    return tensors


def _well_formed(entry: Any) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    if not isinstance(entry["dtype"], str) or len(shape) > 8:
        return False
    return all(type(n) is int and 0 <= n < 1 << 62 for n in [*shape, *offsets])


ROW_TENSORS = tuple(f"row.{name}" for name in (*ROW_FIELDS, "table"))
GEN_TENSORS = (*(f"gen.{name}" for name in GEN_FIELDS), "gen.top_ids", "gen.top_logits")
LENS_TENSORS = ("lens.top_ids", "lens.top_logits", "lens.contested")
EMBEDDING_TENSORS = ("embedding.request", "embedding.vector")
_NUMBER = r"(0|[1-9]\d{0,8})"
_TABLE = re.compile(rf"(table|digest)/{_NUMBER}", re.ASCII)
_VALUE = re.compile(rf"value/{_NUMBER}/{_NUMBER}(\.rows)?", re.ASCII)
# dtype and rank by the name without its numbers; None = any
_FORMS: dict[str, tuple[str | None, int | None]] = {
    **dict.fromkeys(ROW_TENSORS, ("I32", 1)),
    **dict.fromkeys(GEN_TENSORS, ("I32", 1)),
    "gen.top_ids": ("I32", 2),
    "gen.top_logits": ("F32", 2),
    "lens.top_ids": ("I32", 3),
    "lens.top_logits": ("F32", 3),
    "lens.contested": ("F32", 3),
    "embedding.request": ("I32", 1),
    "embedding.vector": ("F32", 2),
    "table": ("I32", 1),
    "digest": ("U64", 2),
    "value": (None, None),
    "value.rows": ("I32", 1),
}


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


@dataclass(frozen=True, eq=False)
class Shard:
    """One shard: its rows, its tables (one int32 per port) and, on request, digests and values.

    ``rows`` are the shard's rows, in execution order. Every read raises TraceReadError when the system
    refuses and ShardSizeError when the file has shrunk since it was opened.
    """

    path: Place
    bytes: int
    tensors: Mapping[str, Tensor]
    rows: RowIndex
    tables: Mapping[int, Int32]

    def columns(self, table: int) -> int:
        """How many columns ``digest/<table>`` has."""
        return self.tensors[f"digest/{table}"].shape[1]

    def table_rows(self, table: int) -> NDArray[np.intp]:
        """Which rows of the shard ``digest/<table>`` holds, ascending, intp [n]."""
        return np.flatnonzero(self.rows.table == table)

    def digests(self, table: int, start: int = 0, stop: int | None = None) -> UInt64:
        """Digests of the rows ``start`` to ``stop`` of that table, uint64 [n, columns]."""
        tensor = self.tensors[f"digest/{table}"]
        first, last, _ = slice(start, stop).indices(tensor.shape[0])
        shape = (max(0, last - first), tensor.shape[1])
        return read_array(self.path, tensor.offset + first * shape[1] * 8, shape, np.dtype("<u8"))

    def digest_rows(self, table: int, rows: NDArray[Any]) -> UInt64:
        """Digests of chosen rows of that table in the given order, uint64 [n, columns]; raises IndexError."""
        tensor = self.tensors[f"digest/{table}"]
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < tensor.shape[0]:
            raise IndexError(f"table {table} of {self.path.name} has {tensor.shape[0]} rows")
        return read_rows(self.path, tensor.offset, rows, tensor.shape[1], np.dtype("<u8"))

    def value_columns(self) -> tuple[tuple[int, int], ...]:
        """The (table, column) pairs whose values were captured, ascending."""
        found = (_VALUE.fullmatch(name) for name in self.tensors)
        return tuple(sorted((int(m[1]), int(m[2])) for m in found if m is not None and m[3] is None))

    def value_rows(self, table: int, column: int) -> Int32:
        """Rows of the shard whose values of that column were captured, int32 [m] ascending; [0] if none.

        Raises ValueRowsError unless they are ascending rows of that table.
        """
        tensor = self.tensors.get(f"value/{table}/{column}.rows")
        if tensor is None:
            return np.empty(0, np.int32)
        rows: Int32 = self._read(tensor)
        ascending = len(rows) < 2 or bool((np.diff(rows) > 0).all())
        inside = 0 <= int(rows.min()) and int(rows.max()) < len(self.rows.table)
        if not (ascending and inside and bool((self.rows.table[rows] == table).all())):
            raise ValueRowsError(
                f"{self.path} has values of column {column} of table {table} for rows that are not ascending "
                f"rows of that table below {len(self.rows.table)}. The file is damaged: record the trace "
                "again."
            )
        return rows

    def values(self, table: int, column: int) -> Value | None:
        """The captured values of one column, or None; data [m, ...] in storage form (BF16 as uint16)."""
        tensor = self.tensors.get(f"value/{table}/{column}")
        if tensor is None:
            return None
        return Value(self.value_rows(table, column), self._read(tensor), tensor.dtype)

    def value_at(self, table: int, column: int, row: int) -> NDArray[Any] | None:
        """The captured value of one row of the shard in storage form, read alone; None if not captured."""
        rows = self.value_rows(table, column)
        place = int(np.searchsorted(rows, row))
        if place == len(rows) or rows[place] != row:
            return None
        tensor = self.tensors[f"value/{table}/{column}"]
        offset = tensor.offset + place * (tensor.nbytes // tensor.shape[0])
        return read_array(self.path, offset, tensor.shape[1:], STORAGE[tensor.dtype])

    def values_at(self, table: int, column: int, places: NDArray[Any]) -> NDArray[Any]:
        """Captured values by their places in ``value_rows``, [n, ...] in storage form; the column must have values."""
        tensor = self.tensors[f"value/{table}/{column}"]
        width = tensor.nbytes // tensor.shape[0] // STORAGE[tensor.dtype].itemsize
        found = read_rows(self.path, tensor.offset, places, width, STORAGE[tensor.dtype])
        return found.reshape(len(places), *tensor.shape[1:])

    def generated(self, lens: bool = True) -> Generated | None:
        """The shard's generated tokens, or None; ``lens=False`` leaves the per-layer logits on disk."""
        if GEN_TENSORS[0] not in self.tensors:
            return None
        layers = None
        if lens and LENS_TENSORS[0] in self.tensors:
            layers = Lens(*(self._read(self.tensors[name]) for name in LENS_TENSORS))
        arrays = {name.removeprefix("gen."): self._read(self.tensors[name]) for name in GEN_TENSORS}
        return Generated(**arrays, lens=layers)

    def embeddings(self) -> Embeddings | None:
        """The shard's embeddings, or None."""
        if EMBEDDING_TENSORS[0] not in self.tensors:
            return None
        return Embeddings(*(self._read(self.tensors[name]) for name in EMBEDDING_TENSORS))

    def _read(self, tensor: Tensor) -> NDArray[Any]:
        return read_array(self.path, tensor.offset, tensor.shape, STORAGE[tensor.dtype])


def open_shard(
    path: Place, place: int, limits: Limits, expected: int | None
) -> tuple[Shard, Generated | None]:
    """Reads a shard's header, rows, tables and generated tokens and checks every rule about them.

    ``place`` becomes ``rows.shard``; ``expected`` is the file's size where the trace states it. Raises the
    TraceError subclass of the broken rule.
    """
    size = regular_size(path, ShardMissing)
    if expected not in (None, size):
        raise ShardSizeError(
            f"{path} has {size} bytes; expected {expected}, as when the trace was completed. It is cut or "
            "damaged: copy the trace again; what is left can be opened with --partial (partial=True)."
        )
    tensors = read_header(path, size)
    _check_names(path, tensors)
    _check_groups(path, tensors)

    def array(name: str) -> Int32:
        return read_array(path, tensors[name].offset, tensors[name].shape, np.dtype("<i4"))

    fields = {name: array(f"row.{name}") for name in (*ROW_FIELDS, "table")}
    check_rows(path.name, fields, limits)
    tables = {int(name[6:]): array(name) for name in tensors if name.startswith("table/")}
    count = len(fields["table"])
    if not all((fields["table"] == number).all() for number in tables) or not tables:
        unknown = fields["table"][~np.isin(fields["table"], list(tables))]
        if len(unknown):
            raise RowError(
                f"{path} has a row of table {unknown[0]}; expected one of the shard's tables {sorted(tables)}. "
                "The file is damaged: record the trace again."
            )
    rank = np.empty(count, np.int32)
    for number, table in tables.items():
        check_table(f"{path.name}, table {number},", table, tensors[f"digest/{number}"].shape[1], limits)
        places = np.flatnonzero(fields["table"] == number)
        if len(places) != tensors[f"digest/{number}"].shape[0]:
            raise TensorShapeError(
                f"{path} has {tensors[f'digest/{number}'].shape[0]} rows in digest/{number}; expected "
                f"{len(places)}, one for each row of that table. The file is damaged: record the trace again."
            )
        rank[places] = np.arange(len(places))
    shard = np.full(count, place, np.int32)
    rows = RowIndex(**fields, shard=shard, row=np.arange(count, dtype=np.int32), table_row=rank)
    opened = Shard(path, size, tensors, rows, tables)
    generated = opened.generated(lens=False)
    if generated is not None:
        check_generated(path.name, generated, limits)
    return opened, generated


def _check_names(path: Place, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        table, value = _TABLE.fullmatch(name), _VALUE.fullmatch(name)
        form = table[1] if table else f"value{value[3] or ''}" if value else name
        if form not in _FORMS or (not (table or value) and "." not in name):
            raise TensorNameError(
                f"{path} holds a tensor named {name!r}; expected only the names of this format. Read it with "
                "the version of detdiff that wrote it."
            )
        dtype, rank = _FORMS[form]
        if dtype not in (None, tensor.dtype):
            raise TensorTypeError(
                f"{path} has {name} as {tensor.dtype}; expected {dtype}. The file is damaged: record the "
                "trace again."
            )
        # No top logits is a form of its own: a header that lacks them says so.
        sizes = tensor.shape[:1] if name.startswith("gen.top_") else tensor.shape
        empty = 0 in sizes and not name.startswith("row.")
        if empty or rank not in (None, len(tensor.shape)) or not tensor.shape:
            raise TensorShapeError(
                f"{path} has {name} in the shape {list(tensor.shape)}; expected "
                f"{'one or more' if rank is None else rank} dimensions and, but for row.* and the k of gen.top_*, none of them 0. "
                "The file is damaged: record the trace again."
            )


def _check_groups(path: Place, tensors: Mapping[str, Tensor]) -> None:
    """Tensors that need each other are all there, and those that describe the same things agree in length."""
    needed = list(ROW_TENSORS)
    if any(name.startswith(("gen.", "lens.")) for name in tensors):
        needed += GEN_TENSORS
    if any(name.startswith("lens.") for name in tensors):
        needed += LENS_TENSORS
    if any(name.startswith("embedding.") for name in tensors):
        needed += EMBEDDING_TENSORS
    same: list[tuple[str, str, int]] = [("row.request", name, 1) for name in ROW_TENSORS]
    same += [("gen.request", name, 1) for name in GEN_TENSORS + LENS_TENSORS]
    same += [("gen.top_ids", "gen.top_logits", 2), ("lens.top_ids", "lens.top_logits", 3)]
    same += [("lens.top_ids", "lens.contested", 2), ("embedding.request", "embedding.vector", 1)]
    for name in tensors:
        if (table := _TABLE.fullmatch(name)) is not None:
            needed += [f"table/{table[2]}", f"digest/{table[2]}"]
        elif (value := _VALUE.fullmatch(name)) is not None:
            base = f"value/{value[1]}/{value[2]}"
            needed += [base, f"{base}.rows", f"table/{value[1]}"]
            same.append((base, f"{base}.rows", 1))
    for name in needed:
        if name not in tensors:
            raise TensorMissing(
                f"{path} has no tensor {name}, which its other tensors need. The file is damaged or not a "
                "shard of a trace: record the trace again."
            )
    for name in tensors:
        value = _VALUE.fullmatch(name)
        if value is not None and int(value[2]) >= tensors[f"digest/{value[1]}"].shape[1]:
            raise TensorNameError(
                f"{path} holds {name}; expected a column below {tensors[f'digest/{value[1]}'].shape[1]}, the "
                "columns of that table. The file is damaged: record the trace again."
            )
    for first, second, dims in same:
        if second in tensors and tensors[first].shape[:dims] != tensors[second].shape[:dims]:
            raise TensorShapeError(
                f"{path} has {first} of shape {list(tensors[first].shape)} and {second} of shape "
                f"{list(tensors[second].shape)}; expected the first {dims} to agree. The file is damaged: "
                "record the trace again."
            )
    contested = tensors.get("lens.contested")
    if contested is not None and contested.shape[2] != 2:
        raise TensorShapeError(
            f"{path} has lens.contested of shape {list(contested.shape)}; expected two logits a layer. The "
            "file is damaged: record the trace again."
        )
