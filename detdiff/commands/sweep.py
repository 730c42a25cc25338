"""`detdiff sweep`: a grid read, its cells run by processes or on a cluster, and what came out written."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from detdiff.errors import CommandError
from detdiff.report.index import index_html, index_text
from detdiff.report.index import summary as counted
from detdiff.sweep.cells import SweepFolder, memory_of, put
from detdiff.sweep.grid import Sweep, read_grid
from detdiff.sweep.run import OnStep, SweepRun, WorkerProcesses, Workers, only_one
from detdiff.sweep.summary import (
    JUNIT,
    LINES,
    PAGE,
    SweepSummary,
    junit,
    lines_text,
    shown,
    summarise,
)
from detdiff.trace import local

_SHOWN = 40


@dataclass(frozen=True)
class SweepArguments:
    """The command's options; ``ray`` is a cluster's address, "local" for one that is started here, None for processes."""

    grid: Path
    folder: Path
    jobs: int | None = None
    memory_mb: int | None = None
    retries: int = 1
    against: Path | None = None
    ray: str | None = None
    imports: tuple[str, ...] = ()


def swept(asked: SweepArguments, on_step: OnStep | None = None) -> tuple[SweepSummary, list[str]]:
    """Run what the folder lacks, and write the summary; also gives what there is to say of the run itself.

    Raises GridUnusable, NotLocal, SweepFolderUnusable, Interrupted, CommandError, and what reading the grid and starting workers raise.
    """
    sweep = read_grid(asked.grid)
    folder = SweepFolder(local(asked.folder).resolve())
    if asked.against is not None and asked.against.resolve() == folder.path:
        raise CommandError(
            f"--against {asked.against} is the folder of this sweep; expected that of the one before. Name it, or another folder with -o."
        )
    with only_one(folder):
        run = SweepRun(sweep, folder, asked.retries)
        run.run(_workers(asked, sweep, folder), on_step)
        found = summarise(asked.grid.stem, sweep, folder, run.failures, asked.against)
        notes = [f"run again, since its worker was lost: {name}" for name in dict.fromkeys(run.again)]
        unwritten: list[str] = []
        for name, data in (
            (LINES, lines_text(found).encode()),
            (JUNIT, junit(found)),
            (PAGE, index_html(found.entries).encode()),
        ):
            try:
                put(folder.path / name, data)
            except OSError as error:
                notes.append(f"{name} could not be written: {error.strerror or error}")
                unwritten.append(name)
                with suppress(OSError):
                    # What is there is of the sweep before, and says what is not so any more.
                    (folder.path / name).unlink(missing_ok=True)
    return replace(found, unwritten=tuple(unwritten)), notes


def _workers(asked: SweepArguments, sweep: Sweep, folder: SweepFolder) -> Workers:
    if asked.ray is not None:
        from detdiff.sweep.on_ray import RayWorkers

        return RayWorkers(folder, asked.ray, sweep.needs, asked.jobs, asked.imports)
    return WorkerProcesses(folder, asked.jobs or _jobs(sweep), asked.memory_mb, asked.imports)


def _jobs(sweep: Sweep) -> int:
    """As many as there are processors, and as four fifths of the memory have room for."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(map(memory_of, sweep.recordings.values()), default=1)
    return max(1, min(processors, int(memory // most), len(sweep.recordings)))


def sweep_text(found: SweepSummary, notes: list[str], width: int) -> str:
    """How many of which kind, and the pairs that are not identical, those that matter most."""
    if shown(found.entries):
        text = index_text(shown(found.entries), width=width, most=_SHOWN)
        body = text.partition("\n")[2]
    else:
        body = ""
    lines = [counted(found.entries), *([found.news] if found.news else [])]
    return "\n".join([*lines, *([body.rstrip("\n")] if body else []), *notes]) + "\n"
