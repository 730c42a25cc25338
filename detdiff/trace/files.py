"""The few file operations of a trace, on local paths and addresses: checked reads at an offset, strict JSON, atomic and
durable writes."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import ShardSizeError, TraceDiskFull, TraceError, TraceReadError, TraceWriteError
from detdiff.trace.store import Address, Place

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_GAP_BYTES = 1 << 16
_RUN_BYTES = 1 << 23


@contextmanager
def reading(path: Place) -> Iterator[None]:
    """Turns an OSError into TraceReadError."""
    try:
        yield
    except OSError as error:
        what = "credentials and the network" if isinstance(path, Address) else "permissions and the disk"
        raise TraceReadError(
            f"{path} cannot be read ({error.strerror or error}); expected a readable file. Check its {what}, then try again."
        ) from error


@contextmanager
def writing(path: Place, kept: str) -> Iterator[None]:
    """Turns an OSError into TraceWriteError or TraceDiskFull; ``kept`` says what stays readable."""
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        what = "there is no space left" if full else (error.strerror or str(error))
        advice = "Check the directory and its permissions, then record again."
        if full:
            advice = "Free some space, or record to another disk or with a smaller capture."
        elif isinstance(path, Address):
            advice = "Check the address, its credentials and the network, then record again."
        raise (TraceDiskFull if full else TraceWriteError)(
            f"{path} cannot be written: {what}; expected room for the whole trace. {kept} {advice}"
        ) from error


def regular_size(path: Place, missing: type[TraceError]) -> int:
    """Bytes of a regular file; raises ``missing`` when there is none, and for links, pipes and devices."""
    size, what = None, "is not there"
    with reading(path):
        if isinstance(path, Address):
            size = path.size()
        else:
            try:
                found = os.lstat(path)
                size = found.st_size if stat.S_ISREG(found.st_mode) else None
                what = "is not a regular file"
            except (FileNotFoundError, NotADirectoryError):
                pass
    if size is None:
        raise missing(
            f"{path} {what}; expected one of the files that the trace was recorded with. Copy the whole "
            "directory again; what is left can be opened with --partial (partial=True)."
        )
    return size


def read_bytes(path: Place) -> bytes:
    """All bytes of a file; raises TraceReadError."""
    with reading(path):
        return path.read_bytes()


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


@contextmanager
def _opened(path: Place) -> Iterator[Any]:
    """What ``_fill`` reads from: an open file, or the address itself."""
    if isinstance(path, Address):
        yield path
    else:
        with open(path, "rb", buffering=0) as file:
            yield file


def read_chunks(path: Place, size: int) -> Iterator[bytes | memoryview]:
    """All ``size`` bytes of a file, some MB at a time; raises OSError, and ShardSizeError when there are fewer."""
    block = np.empty(min(size, _RUN_BYTES), np.uint8)
    with _opened(path) as file:
        for start in range(0, size, _RUN_BYTES):
            part = block[: min(_RUN_BYTES, size - start)]
            _fill(file, path, start, part)
            yield part.data


class FileReader:
    """Reads parts of files into arrays that are there. The local files that were read last stay open until ``close``."""

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._files: OrderedDict[Path, Any] = OrderedDict()
        self._last: tuple[Path | None, Any] = (None, None)

    def fill(self, path: Place, offset: int, out: NDArray[Any]) -> None:
        """Read ``out``, which is contiguous, from a byte offset on. Raises TraceReadError, and ShardSizeError where the file
        has shrunk since it was opened."""
        if isinstance(path, Address):
            with reading(path):
                _fill(path, path, offset, out)
            return
        try:
            file = self._file(path)
            file.seek(offset)
            whole = file.readinto(out) == out.nbytes
        except OSError:
            with reading(path):
                raise
        if not whole:
            # In pieces, or to say where it ends.
            with reading(path):
                _fill(file, path, offset, out)

    def _file(self, path: Path) -> Any:
        if self._last[0] is not path:
            found = self._files.pop(path, None)
            self._files[path] = found or open(path, "rb", buffering=0)
            self._last = path, self._files[path]
            if len(self._files) > self._kept:
                self._files.popitem(last=False)[1].close()
        return self._last[1]

    def close(self) -> None:
        self._last = None, None
        while self._files:
            self._files.popitem()[1].close()


def read_array(path: Place, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """``shape`` elements of ``dtype`` at a byte offset, without mapping the file; offset and size are checked
    by the caller. Raises ShardSizeError when the file has shrunk since."""
    out = np.empty(shape, dtype)
    if out.nbytes:
        with reading(path), _opened(path) as file:
            _fill(file, path, offset, out)
    return out


def read_rows(path: Place, offset: int, rows: NDArray[Any], width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Chosen rows, in the given order, of a matrix [?, width] that starts at a byte offset.

    Rows that lie near each other are read together; the scratch memory stays near 8 MB whatever is asked.
    """
    out = np.empty((len(rows), width), dtype)
    row_bytes = width * dtype.itemsize
    if not out.nbytes:
        return out
    wanted = np.asarray(rows, np.int64)
    order = np.argsort(wanted, kind="stable")
    ascending = wanted[order]
    gap = max(1, _GAP_BYTES // row_bytes)
    longest = max(1, _RUN_BYTES // row_bytes)
    with reading(path), _opened(path) as file:
        start = 0
        breaks = np.flatnonzero(np.diff(ascending) > gap) + 1
        for stop in (*breaks.tolist(), len(ascending)):
            while start < stop:
                first = int(ascending[start])
                end = min(stop, start + int(np.searchsorted(ascending[start:stop], first + longest)))
                block = np.empty((int(ascending[end - 1]) - first + 1, width), dtype)
                _fill(file, path, offset + first * row_bytes, block)
                out[order[start:end]] = block[ascending[start:end] - first]
                start = end
    return out


def _fill(file: Any, path: Place, offset: int, out: NDArray[Any]) -> None:
    view = out.reshape(-1).view(np.uint8).data
    if not isinstance(file, Address):
        file.seek(offset)
    done = 0
    while done < len(view):
        if isinstance(file, Address):
            found = file.read(offset + done, offset + min(len(view), done + _RUN_BYTES))
            view[done : done + len(found)] = found
            count = len(found)
        else:
            count = file.readinto(view[done:])
        if not count:
            raise ShardSizeError(
                f"{path} ends at byte {offset + done}; expected bytes up to {offset + len(view)}, as when it "
                "was opened. Something else writes to this trace: stop it and open the trace again."
            )
        done += count


def sync_directory(path: Path) -> None:
    """Makes renames inside a directory durable, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Place, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> None:
    """Writes a file under a temporary name in its own directory, syncs it if it is to be ``durable``, and renames it
    into place; at an address, the whole object at once."""
    if isinstance(path, Address):
        path.put(chunks)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb", buffering=1 << 20) as file:
        file.writelines(chunks)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        sync_directory(path.parent)
