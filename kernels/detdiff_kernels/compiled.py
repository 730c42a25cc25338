"""Compiling a loop with numba: kept on disk, and said on the terminal while it takes its time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Timer
from types import ModuleType
from typing import Any

import numba

Loop = Callable[..., None]

# Reading compiled code from disk takes a few milliseconds.
_SLOW_SECONDS = 0.5


# For what only compiled loops call: without the ways into it from Python and C, which take a third of its compilation.
inner: Any = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


def compiled(loop: Loop, signatures: list[Any], *made_of: ModuleType) -> Loop:
    """``loop`` compiled for ``signatures``, without the GIL and without fastmath.

    ``made_of`` are the modules whose operations it is made of: numba's cache on disk sees changes of the loop's own
    file only, and code made from older operations must not be found again. Each variant of a loop has a name of its
    own, and with it files of its own: two processes that write variants into one index lose one of them, or take its
    code for the other's.
    """
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in made_of)
    loop.__qualname__ += f"_{sha256(sources + _variant(loop, signatures).encode()).hexdigest()[:12]}"
    with _said(loop.__name__):
        made: Loop = numba.njit(signatures, cache=True, nogil=True, no_cfunc_wrapper=True)(loop)
    return made


def _variant(loop: Loop, signatures: list[Any]) -> str:
    """What a loop is made for and what its maker put into it, in words that are the same in every process."""
    cells = (cell.cell_contents for cell in loop.__closure__ or ())
    return repr([signatures, *(getattr(held, "__qualname__", None) or repr(held) for held in cells)])


@contextmanager
def _said(name: str) -> Iterator[None]:
    timer = Timer(_SLOW_SECONDS, _say, [name])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(name: str) -> None:
    if sys.stderr.isatty():
        # A progress bar may stand in the line; it is drawn again.
        print(f"\r\x1b[Kcompiling the kernel loop {name}, which is kept for the next time", file=sys.stderr)
