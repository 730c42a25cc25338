"""The GGUF container: header, metadata, tensor table. No length in the file is trusted before it is checked.

Written after the public GGUF specification (versions 2 and 3, little-endian). The `gguf` package's own reader
loops over whatever count a damaged file claims, so it serves here only for the block formats.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import GgufCorrupt, GgufMissing, GgufUnsupported

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
MAX_DIMENSIONS = 4
MAX_NESTING = 4

# Tensor types by number: name, elements in a block, bytes of a block.
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. shape: outermost dimension first. data: uint8 ``[rows, bytes of a row]``, mapped from the
    file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """A whole GGUF file. metadata: key to bool, int, float, str or a list of these."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of `path` and map its tensors.

    Raises:
        GgufMissing: no such file.
        GgufCorrupt: not GGUF, cut short, or inconsistent.
        GgufUnsupported: another version, byte order, a part of a split file, or an unknown tensor type.
    """
    if not path.is_file():
        raise GgufMissing(f"There is no file {str(path)!r}. Give the path of one GGUF file.")
    if path.stat().st_size < len(MAGIC):
        raise GgufCorrupt(
            f"{str(path)!r} has {path.stat().st_size} bytes, too few for a GGUF file. Fetch it again."
        )
    cursor = _Cursor(path)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise GgufCorrupt(
            f"{str(path)!r} is not a GGUF file: it does not begin with the letters GGUF. Give the .gguf file "
            f"that the engine itself loads."
        )
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise GgufUnsupported(
            f"{str(path)!r} says GGUF version {version}, and versions 2 and 3 in little-endian order can be "
            f"read. Convert the model again with a current converter."
        )
    tensor_count, entry_count = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<I"))
    if metadata.get("split.count", 1) not in (0, 1):
        raise GgufUnsupported(
            f"{str(path)!r} is one of {metadata['split.count']} parts of a split model. Merge the parts into "
            f"one file (for example with `llama-gguf-split --merge`) and import that."
        )
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    return GgufFile(path, metadata, _map_tensors(cursor, entries, metadata.get("general.alignment", 32)))


@dataclass(frozen=True)
class _Entry:
    name: str
    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    offset: int


class _Cursor:
    """A position in the file that never moves past its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            raise self.corrupt(
                f"at byte {self.position} it claims {count} more bytes and {len(self.data) - self.position} "
                f"are left"
            )
        start, self.position = self.position, self.position + count
        return self.data[start : self.position].tobytes()

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        start = self.position
        try:
            return self.take(self.number("<Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"the text at byte {start} is not UTF-8") from error

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or nesting >= MAX_NESTING:
            raise self.corrupt(
                f"at byte {self.position} it names a metadata type {kind}, which does not exist there"
            )
        item, count = self.number("<I"), self.number("<Q")
        if item in SCALARS:
            width = struct.calcsize(SCALARS[item])
            return np.frombuffer(self.take(count * width), dtype=np.dtype(SCALARS[item])).tolist()
        # An item takes at least its own 8-byte length, so this bounds the loop by the file.
        if count * 8 > len(self.data) - self.position:
            raise self.corrupt(
                f"at byte {self.position} it claims an array of {count} items, more than would fit"
            )
        return [self.value(item, nesting + 1) for _ in range(count)]

    def corrupt(self, what: str) -> GgufCorrupt:
        return GgufCorrupt(
            f"{str(self.path)!r} ({len(self.data)} bytes) is cut short or damaged: {what}. Fetch the file "
            f"again and compare its length and checksum with its source."
        )


def _tensor_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string()
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.corrupt(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise cursor.corrupt(f"tensor {name!r} has a dimension of length 0")
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if number not in BLOCKS:
        raise GgufUnsupported(
            f"Tensor {name!r} in {str(cursor.path)!r} has type number {number}, which is not among the known "
            f"ones ({', '.join(kind for kind, _, _ in BLOCKS.values())}). Requantise the file to one of "
            f"these."
        )
    kind, elements, size = BLOCKS[number]
    if shape[-1] % elements:
        raise cursor.corrupt(
            f"rows of tensor {name!r} have {shape[-1]} elements, not a multiple of {elements}"
        )
    return _Entry(name, kind, shape, shape[-1] // elements * size, offset)


def _map_tensors(cursor: _Cursor, entries: list[_Entry], alignment: Any) -> dict[str, GgufTensor]:
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.corrupt(f"general.alignment is {alignment!r} and must be a power of two")
    begin = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.corrupt(f"it names tensor {entry.name!r} twice")
        rows = prod(entry.shape[:-1])
        start = begin + entry.offset
        stop = start + rows * entry.row_bytes
        if stop > len(cursor.data):
            raise cursor.corrupt(f"tensor {entry.name!r} should end at byte {stop}")
        data = cursor.data[start:stop].reshape(rows, entry.row_bytes)
        tensors[entry.name] = GgufTensor(entry.name, entry.kind, entry.shape, data)
    return tensors
