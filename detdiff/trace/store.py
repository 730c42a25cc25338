"""Where a trace lies: a local directory, or an address of fsspec (``s3://``, ``gs://``, ``hf://``, ``memory://``, a zip file).

An ``Address`` has those methods of a local path that traces need, so that whoever names, opens or writes one does not ask
which of the two it is. Objects are read in blocks, of which the last ones are kept, and are written whole.
"""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from detdiff.errors import NotLocal, StoreUnusable

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://", re.ASCII)
_FILE = re.compile(r"(?:file|local)://", re.ASCII)
_WRITTEN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/", re.ASCII)
"""How an address begins, also one that was made a path, which has one slash of two."""
_ARCHIVES = frozenset({"zip", "tar", "libarchive"})
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
BLOCK_BYTES = 1 << 20
KEPT_BYTES = 128 << 20


def is_url(text: str) -> bool:
    """Whether a trace's place is one of fsspec's addresses, and not a local path."""
    return _SCHEME.match(text) is not None and _FILE.match(text) is None


def place(given: Path | Address | str) -> Place:
    """The place that a text or path names. A local zip file, such as a reproduction pack, is an address, too."""
    if isinstance(given, Address):
        return given
    text = str(given)
    if isinstance(given, str) and is_url(text):
        first, chain, rest = text.partition("::")
        return Address(_Store(f"{first if first.endswith('://') else first.rstrip('/')}{chain}{rest}"))
    path = Path(_FILE.sub("", text)) if isinstance(given, str) else given
    if path.suffix == ".zip" and path.is_file():
        return Address(_Store(f"zip://::{path}"))
    return path


def local(given: Path | str) -> Path:
    """The path of this machine where no address can be. Raises NotLocal."""
    text = str(given)
    path = Path(_FILE.sub("", text)) if isinstance(given, str) else given
    if _WRITTEN.match(str(path)):
        raise NotLocal(
            f"{text} is an address, and what is kept there is files of this machine; expected a path. Name one, and copy it from "
            "there afterwards. Traces alone lie at addresses."
        )
    return path


class _Store:
    """The file system behind an address, opened when it is first asked, and the blocks that were read last."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._kept = 0

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        scheme = self.text.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.text)
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            how = f"pip install 'detdiff[{extra}]'" if extra else "pip install what it names"
            raise StoreUnusable(
                f"{self.text} needs a library that is not installed ({error}); expected one that reads {scheme}://. Install it: "
                f"{how}."
            ) from None
        except Exception as error:
            raise StoreUnusable(
                f"{self.text} cannot be opened ({type(error).__name__}: {error}); expected a local directory or an address that "
                "fsspec knows, such as s3://bucket/trace or zip://a::pack.zip. Check the spelling, the credentials and the network."
            ) from error
        return fs, str(root).rstrip("/")

    @property
    def fs(self) -> Any:
        return self._opened[0]

    def path(self, inner: str) -> str:
        return "/".join(filter(None, (self._opened[1], inner)))

    @property
    def block_bytes(self) -> int:
        """What is read at once: the members of an archive cannot be read from the middle."""
        protocol = self.fs.protocol
        found = {protocol} if isinstance(protocol, str) else set(protocol)
        return BLOCK_BYTES * (64 if found & _ARCHIVES else 1)

    def keep(self, key: tuple[str, int], block: bytes) -> None:
        self._kept -= len(self.blocks.pop(key, b""))
        self.blocks[key] = block
        self._kept += len(block)
        while self._kept > KEPT_BYTES and len(self.blocks) > 1:
            self._kept -= len(self.blocks.popitem(last=False)[1])

    def forget(self, inner: str) -> None:
        for key in [key for key in self.blocks if key[0] == inner]:
            self._kept -= len(self.blocks.pop(key))


@contextmanager
def _asking() -> Iterator[None]:
    """Makes an OSError of whatever a library of fsspec raises, so that it is told as one of a local disk is."""
    try:
        yield
    except (OSError, StoreUnusable):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class Address:
    """A place of fsspec's. Methods raise OSError as those of a local path do, and StoreUnusable where the address cannot be
    used at all."""

    def __init__(self, store: _Store, inner: str = "") -> None:
        self._store, self._inner = store, inner

    def __truediv__(self, name: str) -> Address:
        return Address(self._store, f"{self._inner}/{name}" if self._inner else name)

    def __str__(self) -> str:
        if not self._inner:
            return self._store.text
        # In zip://a::pack.zip the path is before the colons.
        first, chain, rest = self._store.text.partition("::")
        between = "" if first.endswith("/") else "/"
        return f"{first}{between}{self._inner}{chain}{rest}"

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        return str(self).partition("::")[0].rpartition("/")[2]

    def resolve(self) -> Address:
        """Itself: an address is absolute."""
        return self

    def fresh(self) -> Address:
        """The same place, read anew."""
        return Address(_Store(str(self)))

    def size(self) -> int | None:
        """Bytes of the object; None where there is none."""
        with _asking():
            fs, path = self._store.fs, self._store.path(self._inner)
            try:
                fs.invalidate_cache()
                found = fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if found.get("type") == "directory" or found.get("size") is None:
            return None
        return int(found["size"])

    def is_file(self) -> bool:
        return self.size() is not None

    def is_dir(self) -> bool:
        """Always: an address names a trace, and opening says whether there is one."""
        return True

    def exists(self) -> bool:
        return self.is_file() or bool(self.sizes())

    def sizes(self) -> dict[str, int]:
        """The names and bytes of the objects directly below; empty where there is nothing."""
        with _asking():
            fs, path = self._store.fs, self._store.path(self._inner)
            try:
                fs.invalidate_cache()
                found = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {
            str(each["name"]).rstrip("/").rpartition("/")[2]: int(each.get("size") or 0)
            for each in found
            if each.get("type") != "directory"
        }

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``, fewer where the object ends before. Blocks that are not kept are read in one
        request."""
        store, step = self._store, self._store.block_bytes
        wanted = range(start // step, -(-stop // step))
        parts: dict[int, bytes] = {}
        for number in wanted:
            if (kept := store.blocks.get((self._inner, number))) is not None:
                store.blocks.move_to_end((self._inner, number))
                parts[number] = kept
        missing = [number for number in wanted if number not in parts]
        if missing:
            first, end = missing[0], missing[-1] + 1
            with _asking():
                raw = store.fs.cat_file(store.path(self._inner), start=first * step, end=end * step)
            for number in range(first, end):
                parts[number] = block = bytes(raw[(number - first) * step : (number - first + 1) * step])
                store.keep((self._inner, number), block)
        joined = b"".join(parts[number] for number in wanted)
        return joined[start - wanted.start * step : stop - wanted.start * step]

    def read_bytes(self) -> bytes:
        """The whole object, which is not kept."""
        with _asking():
            return bytes(self._store.fs.cat_file(self._store.path(self._inner)))

    def put(self, chunks: Iterable[bytes | memoryview], *, new: bool = False) -> None:
        """Write the object whole: who reads meanwhile sees the old one, none, or the new one.

        With ``new`` raises FileExistsError where there is one already.
        """
        data = b"".join(chunks)
        fs, path = self._store.fs, self._store.path(self._inner)
        self._store.forget(self._inner)
        with _asking():
            if new:
                fs.pipe_file(path, data, mode="create")
            else:
                fs.pipe_file(path, data)

    def put_file(self, source: Path) -> None:
        """Write the object from a local file, whole."""
        self._store.forget(self._inner)
        with _asking():
            self._store.fs.put_file(str(source), self._store.path(self._inner))

    def remove(self) -> None:
        """Remove the object, if it is there and can be."""
        self._store.forget(self._inner)
        with suppress(OSError), _asking():
            self._store.fs.rm_file(self._store.path(self._inner))


Place = Path | Address


def names_in(where: Place) -> dict[str, int]:
    """The files directly below a place, with their bytes. Raises OSError."""
    if isinstance(where, Address):
        return where.sizes()
    return {file.name: file.stat().st_size for file in where.iterdir() if file.is_file()}


def copy_files(where: Place, folder: Path) -> None:
    """Copy the files of a trace into the new local directory ``folder``. Raises OSError."""
    if not isinstance(where, Address):
        shutil.copytree(where, folder)
        return
    folder.mkdir(parents=True)
    for name in where.sizes():
        (folder / name).write_bytes((where / name).read_bytes())


def remove_files(where: Place) -> None:
    """Remove a trace, as far as that can be done."""
    if not isinstance(where, Address):
        shutil.rmtree(where, ignore_errors=True)
        return
    with suppress(OSError):
        for name in where.sizes():
            (where / name).remove()


def is_taken(where: Place) -> bool:
    """Whether something is there already that a trace would be written over. Raises OSError."""
    if isinstance(where, Address):
        return bool(where.sizes())
    return where.exists() and (not where.is_dir() or any(where.iterdir()))
