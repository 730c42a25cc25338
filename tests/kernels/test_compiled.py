"""Compiled loops: kept on disk for as long as nothing that they are made of changes, and said while they take time."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
from tiers import some_now

import detdiff_kernels
from detdiff_kernels import compiled

MADE_OF = [
    ("simd.py", "from detdiff_kernels.loops import affine_loop as made; made = made()"),
    (
        "joins.py",
        "from detdiff_kernels.loops import sum_loop; made = sum_loop('add', 1, 1, 'float32', 'float32', 1)",
    ),
]


@pytest.mark.parametrize(("changed", "code"), some_now(MADE_OF))
def test_a_loop_made_of_changed_sources_is_compiled_anew(tmp_path: Path, changed: str, code: str) -> None:
    """numba's own check looks only at the file of the loop, and would go on running the old operations."""
    copy = tmp_path / "detdiff_kernels"
    shutil.copytree(Path(detdiff_kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}

    def misses() -> str:
        run = subprocess.run(
            [sys.executable, "-c", f"{code}; print(len(made.stats.cache_misses))"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.strip()

    assert [misses(), misses()] == ["1", "0"]
    with (copy / changed).open("a") as source:
        source.write("# changed\n")
    assert [misses(), misses()] == ["1", "0"]


def variant(number: int, inner: Callable[[], None]) -> Callable[..., None]:
    def loop() -> None:
        for _ in range(number):
            inner()

    return loop


def test_variants_of_a_loop_share_no_file_and_one_variant_has_the_same_in_every_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes that write into one index lose an entry, or give it the code of the other's."""
    monkeypatch.setattr(compiled.numba, "njit", lambda *_, **__: lambda loop: loop)

    def one() -> None: ...
    def two() -> None: ...

    names = [compiled.compiled(variant(*held), []).__qualname__ for held in ((1, one), (2, one), (1, two))]
    assert len(set(names)) == 3
    assert compiled.compiled(variant(1, one), []).__qualname__ == names[0]
    program = (
        "from detdiff_kernels.loops import sum_loop\n"
        "import detdiff_kernels.compiled as c\n"
        "c.numba.njit = lambda *_, **__: lambda loop: loop\n"
        "print(*(sum_loop('add', 1, 1, held, 'float32', 1).__qualname__ for held in ('float32', 'float16')))"
    )
    found = {subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(2)}
    assert len(found) == 1 and len(set(found.pop().split())) == 2


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.endswith("\n"):
            self.written.set()
        return count


def test_a_terminal_is_told_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with compiled._said("some_loop"):
        assert terminal.written.wait(60)
    assert "compiling the kernel loop some_loop" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1


def test_what_is_read_from_disk_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(compiled, "_SLOW_SECONDS", 3600)
    with compiled._said("some_loop"):
        pass
    assert terminal.getvalue() == ""


def test_a_pipe_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    compiled._say("some_loop")
    assert pipe.getvalue() == ""
