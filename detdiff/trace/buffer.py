"""Rows and tokens that wait to become one shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detdiff.errors import TensorShapeError, TensorTypeError, ValueRowsError
from detdiff.trace.check import GEN_FIELDS, ROW_FIELDS
from detdiff.trace.digest import STORAGE
from detdiff.trace.rows import Generated, Lens, Rows, Value
from detdiff.trace.shard import LENS_TENSORS
from detdiff.trace.tensors import encode_header

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


class Buffer:
    """What goes into shard ``index``. Encoding does not change it, so a failed write can be repeated."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.bytes = 0
        self._count = 0
        self._batches: list[tuple[int, Rows]] = []
        self._generated: list[Generated] = []
        self._forms: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    def __bool__(self) -> bool:
        return bool(self._batches or self._generated)

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
        return found
