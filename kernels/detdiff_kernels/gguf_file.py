"""GGUF files: read by the optional `gguf` package, behind a guard that trusts no count or length in them.

The package loops over whatever count a damaged file claims, and makes an object for each item. The guard walks the header
first and keeps nothing of it, so that what would not fit into the file is refused before anything is allocated.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MissingGgufPackage, UnknownTensor, UnreadableGguf, UnsupportedFormat, nearest
from .weights import BLOCKS, Blocks

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_TEXT, _ARRAY, _ALIGNMENT_TYPE = 8, 9, 4
# Bytes of a metadata value, by the number of its type.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Far above what models have: some thousand tensors, and four lists of a quarter of a million tokens.
_MOST_ENTRIES, _MOST_ITEMS, _MOST_NESTING, _MOST_AXES = 1 << 16, 1 << 21, 4, 4
# Bytes of a name that are looked at.
_MOST_SHOWN = 200


def open_gguf(path: Path) -> Any:
    """A ``gguf.GGUFReader`` of a whole file of version 2 or 3, little-endian; tensors are mapped, not copied.

    Raises UnreadableGguf for a file that is missing, cut or damaged, UnsupportedFormat for another version or byte order
    and for a type of tensor that the package does not know, and MissingGgufPackage without the package.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGUFReader
    except ImportError as error:
        raise MissingGgufPackage(
            f"Reading {str(path)!r} needs the package `gguf`, which is not installed. Install it with `pip install gguf`, "
            "or with `pip install '.[gguf]'` in the folder of detdiff's source."
        ) from error
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(len(MAGIC))
            if head != MAGIC:
                raise UnreadableGguf(
                    f"{str(path)!r} ({size} bytes) is not a GGUF file: it does not begin with the letters GGUF. Give the "
                    ".gguf file that the engine itself loads."
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _Guard(path, data, sizes).check()
    except OSError as error:
        raise UnreadableGguf(
            f"{str(path)!r} cannot be read: {error.strerror}. Give the path of one GGUF file."
        ) from error
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise _damaged(path, size, " ".join(str(error).split()).rstrip(".")) from error


def read_blocks(path: Path, tensor: str) -> Blocks:
    """The blocks of a tensor (n, k) of a GGUF file, mapped, not copied.

    Raises what ``open_gguf`` raises, UnknownTensor, UnsupportedFormat for a tensor that is not of blocks in ``BLOCKS``, and
    BadOperand for one that is not a matrix.
    """
    found = {entry.name: entry for entry in open_gguf(path).tensors}
    if tensor not in found:
        raise UnknownTensor(f"{path} has no tensor named {tensor!r}; {nearest(tensor, found)}")
    kind = found[tensor].tensor_type.name
    if kind not in BLOCKS:
        raise UnsupportedFormat(
            f"The tensor {tensor} of {path} is {kind}; expected one of {', '.join(BLOCKS)}. Dequantise it, or run it native."
        )
    return Blocks(kind, np.asarray(found[tensor].data))


def _damaged(path: Path, size: int, what: str) -> UnreadableGguf:
    return UnreadableGguf(
        f"{str(path)!r} ({size} bytes) is cut short or damaged: {what}. Fetch the file again and compare its length and "
        "checksum with its source."
    )


class _Guard:
    """A walk over the header that never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, sizes: dict[int, tuple[int, int]]) -> None:
        self._path, self._data, self._sizes = path, data, sizes
        self._place = len(MAGIC)
        self._items = 0

    def check(self) -> None:
        """Raises UnreadableGguf or UnsupportedFormat unless the whole header and every tensor's start fit the file."""
        version = self._number("<I")
        if version not in _VERSIONS:
            raise UnsupportedFormat(
                f"{str(self._path)!r} says GGUF version {version}, and versions 2 and 3 in little-endian order can be read. "
                "Convert the model again with a current converter."
            )
        tensors, entries = self._number("<Q"), self._number("<Q")
        if max(tensors, entries) > _MOST_ENTRIES:
            raise self._wrong(f"it claims {tensors} tensors and {entries} keys, more than {_MOST_ENTRIES}")
        alignment = 32
        for _ in range(entries):
            key, kind = self._text(), self._number("<I")
            place = self._place
            self._value(kind, 0)
            if key == b"general.alignment" and kind == _ALIGNMENT_TYPE:
                alignment = max(1, struct.unpack_from("<I", self._data, place)[0])
        last, name = max((self._tensor() for _ in range(tensors)), default=(0, b""))
        end = -(-self._place // alignment) * alignment + last
        if tensors and end > len(self._data):
            raise self._wrong(f"tensor {name.decode(errors='replace')!r} should end at byte {end}")

    def _wrong(self, what: str) -> UnreadableGguf:
        return _damaged(self._path, len(self._data), what)

    def _skip(self, count: int) -> int:
        """The place before ``count`` bytes that are there."""
        left = len(self._data) - self._place
        if count > left:
            raise self._wrong(f"at byte {self._place} it claims {count} more bytes and {left} are left")
        self._place += count
        return self._place - count

    def _number(self, form: str) -> int:
        place = self._skip(struct.calcsize(form))
        return int(struct.unpack_from(form, self._data, place)[0])

    def _text(self) -> bytes:
        count = self._number("<Q")
        place = self._skip(count)
        return self._data[place : place + min(count, _MOST_SHOWN)]

    def _value(self, kind: int, nesting: int) -> None:
        if kind in _WIDTHS:
            self._skip(_WIDTHS[kind])
        elif kind == _TEXT:
            self._text()
        elif kind == _ARRAY and nesting < _MOST_NESTING:
            item, count = self._number("<I"), self._number("<Q")
            self._items += count
            if self._items > _MOST_ITEMS:
                raise self._wrong(
                    f"at byte {self._place} it claims an array of {count} items, and all arrays together may have "
                    f"{_MOST_ITEMS}"
                )
            if item in _WIDTHS:
                self._skip(count * _WIDTHS[item])
            else:
                for _ in range(count):
                    self._value(item, nesting + 1)
        else:
            raise self._wrong(
                f"at byte {self._place} it names a metadata type {kind}, which does not exist there"
            )

    def _tensor(self) -> tuple[int, bytes]:
        """Where a tensor ends, counted from the first one's start, and its name."""
        name = self._text()
        shown = repr(name.decode(errors="replace"))
        axes = self._number("<I")
        if not 1 <= axes <= _MOST_AXES:
            raise self._wrong(f"tensor {shown} has {axes} dimensions")
        shape = [self._number("<Q") for _ in range(axes)]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in self._sizes:
            raise UnsupportedFormat(
                f"{str(self._path)!r} has a tensor {shown} of type number {kind}, which the installed `gguf` package does "
                "not know. Upgrade the package, or requantise the file to Q8_0 or F16."
            )
        items, size = self._sizes[kind]
        if 0 in shape or shape[0] % items:
            raise self._wrong(f"tensor {shown} has the shape {shape[::-1]}, in blocks of {items}")
        return offset + prod(shape) // items * size, name
