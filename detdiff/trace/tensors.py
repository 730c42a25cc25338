"""The bytes of a shard: a canonical safetensors file, written and checked here.

Eight bytes of header length, a JSON header, then the tensors without holes. Tensors are ordered by element
size (largest first, so that each is aligned) and then by name, so that equal content gives equal bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detdiff.errors import ShardHeaderError, ShardLengthError, TensorOffsetError, TensorTypeError
from detdiff.trace.digest import STORAGE
from detdiff.trace.files import reading

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


def read_header(path: Path, size: int) -> dict[str, Tensor]:
    """The tensors of a file of ``size`` bytes; trusts no length before it is checked.

    Raises ShardLengthError, ShardHeaderError, TensorTypeError, TensorOffsetError.
    """
    with reading(path), open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ShardLengthError(
                f"{path} has {size} bytes and claims a header of {length if len(prefix) == 8 else '?'} "
                f"bytes; expected 2 to {max(0, min(size - 8, _MAX_HEADER))}. The file is cut or damaged: "
                "copy or record the trace again."
            )
        raw = file.read(length)
    return _placed(path, _parsed(path, raw), 8 + length, size)


def parse_json(raw: bytes) -> Any:
    """Strict JSON: UTF-8, no repeated keys, no NaN or Infinity; raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is repeated")
        return found

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parsed(path: Path, raw: bytes) -> Mapping[str, Any]:
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


def _placed(path: Path, header: Mapping[str, Any], data: int, size: int) -> dict[str, Tensor]:
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
