"""Grids of tests, and what a folder of a sweep holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from detdiff.commands import sweep as command
from detdiff.commands.sweep import SweepArguments, swept
from detdiff.sweep import cells
from detdiff.sweep.cells import SweepFolder, Task, TaskResult, run_task
from detdiff.sweep.summary import SweepSummary

SMALL = """
model = "mine"
max_tokens = 1

[engine]
name = "sweep_engine:engine"
{engine}

[[request]]
tokens = [1, 2]

[[request]]
tokens = [2, 3]

[axes]
{axes}

[pairs]
baseline = {{schedule = "serial"}}
{pairs}
"""
OFF = '"engine.off" = [false, true]\nschedule = ["serial", "static"]'
WHOLE = Path(__file__).parents[2] / "benchmarks" / "sweep.toml"
"""64 cells of the built-in model."""


def grid(folder: Path, axes: str = OFF, pairs: str = "", engine: str = "") -> Path:
    """A grid of the small engine, as a file of ``folder``."""
    path = folder / "grid.toml"
    path.write_text(SMALL.format(axes=axes, pairs=pairs, engine=engine))
    return path


def built_in(folder: Path, pairs: str = "", **changes: object) -> Path:
    """The grid of 64 cells with other values of some keys and axes, as a file of ``folder``; ``pairs`` are more lines of [pairs]."""
    text = WHOLE.read_text(encoding="utf-8")
    for key, value in changes.items():
        text, found = re.subn(rf"^{key} = .*$", f"{key} = {json.dumps(value)}", text, flags=re.MULTILINE)
        assert found == 1, key
    path = folder / "grid.toml"
    path.write_text(text + pairs)
    return path


def run(path: Path, folder: Path, jobs: int = 1, **more: object) -> SweepSummary:
    """A sweep by processes."""
    return swept(SweepArguments(path, folder, jobs=jobs, **more))[0]  # type: ignore[arg-type]


class HereAndNow:
    """A worker that is this process: what a sweep makes of answers needs no other, which takes seconds to start."""

    slots = 1

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self._ended: list[tuple[Task, TaskResult | None]] = []

    def open_engine(self) -> str | None:
        return None if self._ended else ""

    def start(self, task: Task) -> None:
        self._ended.append((task, run_task(task, self._folder.path)))

    def finished(self) -> list[tuple[Task, TaskResult | None]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self, now: bool) -> None:
        self._ended.clear()


def run_here(patch: pytest.MonkeyPatch, worker: type[HereAndNow] = HereAndNow) -> None:
    """Have sweeps run their cells in this process."""
    patch.setattr(cells, "_ENGINES", [])
    patch.setattr(command, "_workers", lambda asked, sweep, folder: worker(folder))


def differing(a: Path, b: Path) -> list[str]:
    """The names of what is not the same in two sweeps' folders."""
    one, other = kept(a), kept(b)
    assert one
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def kept(folder: Path) -> dict[str, bytes]:
    """What has to be the same however the cells were run: answers, failures and summaries."""
    files = [path for name in ("answers", "failures") for path in sorted((folder / name).glob("*"))]
    files += [folder / name for name in ("sweep.jsonl", "sweep.xml", "sweep.html")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
