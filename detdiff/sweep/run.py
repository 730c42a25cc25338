"""Who runs which cell: tasks in an order in which recordings come before what compares them, retries, an interrupt.

Workers are processes here (``WorkerProcesses``) or those of a cluster (``on_ray``); a worker that ends costs the task that it ran.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol

from detdiff.engines.registry import import_before_runs
from detdiff.errors import (
    DetdiffError,
    Failure,
    Interrupted,
    SweepFolderUnusable,
    WorkerLost,
    words_of,
)

from .cells import TRACES, CompareTask, RecordTask, SweepFolder, Task, TaskResult, run_task, without_places
from .grid import CellPair, Sweep

TIMES: Final = "times.jsonl"
LOCK: Final = ".lock"
SCRATCH: Final = ".scratch"
"""Where workers keep what they need for a moment, in the sweep's folder: what one that was killed has left is found there."""
THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
"""One each, where the user has not said otherwise: as many workers as there are make the same bits."""


class Workers(Protocol):
    """What runs tasks. ``slots`` run at a time."""

    @property
    def slots(self) -> int: ...

    def start(self, task: Task) -> None:
        """Begin a task; there is a free slot."""

    def open_engine(self) -> str | None:
        """What a free slot has opened already, as ``Task.engine`` says it."""

    def finished(self) -> Sequence[tuple[Task, TaskResult | None]]:
        """Wait until a task at least has ended; None for one whose worker was lost. Empty where no task runs."""

    def close(self, now: bool) -> None:
        """End all workers, with ``now`` whatever they do."""


@dataclass(frozen=True)
class SweepStep:
    """How far a sweep is: ``done`` of ``total`` tasks, ``failed`` pairs, and about how many seconds are left."""

    done: int
    total: int
    failed: int
    left: float | None


OnStep = Callable[[SweepStep], None]


@dataclass
class Agenda:
    """What is to be done: recordings that no trace has yet, and pairs that no answer has."""

    recordings: list[RecordTask]
    pairs: list[CellPair]
    waiting: dict[str, set[str]]
    """By pair, the recordings that are still to come."""
    failed: dict[str, Failure] = field(default_factory=dict)
    """By recording, why there is none."""

    @classmethod
    def of(cls, sweep: Sweep, folder: SweepFolder) -> Agenda:
        """What a folder lacks of a sweep."""
        pairs = [pair for pair in sweep.pairs if folder.answered(pair, sweep.how) is None]
        needed = {
            cell.recording
            for pair in pairs
            for cell in (pair.a, pair.b)
            if pair.a.recording != pair.b.recording
        }
        lacking = {
            name: scenario
            for name, scenario in sweep.recordings.items()
            if name in needed and not folder.recorded(name, scenario)
        }
        # Those that share a model one after the other, so that it is loaded once.
        tasks = sorted((RecordTask(*each) for each in lacking.items()), key=_first_of(lacking))
        waiting = {
            pair.name: {cell.recording for cell in (pair.a, pair.b)} & lacking.keys() for pair in pairs
        }
        return cls(tasks, pairs, waiting)

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return len(self.recordings) + len(self.pairs)

    def next(self, sweep: Sweep, opened: str | None) -> Task | None:
        """A task that can begin, taken from the agenda: of the engine that is ``opened``, if there is any."""
        ready = next((pair for pair in self.pairs if not self.waiting[pair.name]), None)
        if ready is not None:
            self.pairs.remove(ready)
            return CompareTask(ready, sweep.how)
        if not self.recordings:
            return None
        task = next((each for each in self.recordings if each.engine == opened), self.recordings[0])
        self.recordings.remove(task)
        return task

    def recorded(self, name: str, failure: Failure | None) -> list[tuple[str, Failure]]:
        """A trace is there, or will not be: gives the pairs that cannot be compared for that, and why.

        A pair waits for both of its recordings, so that what is told of it does not depend on which one ended first.
        """
        if failure is not None:
            self.failed[name] = failure
        told, left = [], []
        for pair in self.pairs:
            self.waiting[pair.name].discard(name)
            lost = next((each for each in (pair.a.recording, pair.b.recording) if each in self.failed), None)
            if lost is None or self.waiting[pair.name]:
                left.append(pair)
                continue
            why = self.failed[lost]
            told.append((pair.name, Failure(why.error, f"{lost}: {why.message}", why.exit_code)))
        self.pairs = left
        return told


def _first_of(lacking: Mapping[str, Any]) -> Callable[[RecordTask], int]:
    places: dict[str, int] = {}
    for place, each in enumerate(lacking.items()):
        places.setdefault(RecordTask(*each).engine, place)
    return lambda task: places[task.engine]


@dataclass
class SweepRun:
    """One run of a sweep. ``failures`` are by pair, those that could not be written among them; ``again`` are the tasks that were
    run again since their worker was lost."""

    sweep: Sweep
    folder: SweepFolder
    retries: int = 1
    failures: dict[str, Failure] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    _running: int = 0
    _done: int = 0
    _begun: float = 0.0

    def run(self, workers: Workers, on_step: OnStep | None = None) -> None:
        """Do what the folder lacks. Raises Interrupted after what was running has ended; a second Ctrl-C ends that at once."""
        agenda = Agenda.of(self.sweep, self.folder)
        total, interrupted, now = agenda.count, False, True
        lost: dict[str, int] = {}
        self._begun = monotonic()
        try:
            while True:
                try:
                    if not interrupted:
                        self._fill(agenda, workers)
                    if not self._running:
                        break
                    ended = workers.finished()
                    if not ended:
                        # Ctrl-C came between a worker and what counts it.
                        break
                    for task, result in ended:
                        self._running -= 1
                        if result is None and lost.get(task.name, 0) < self.retries and not interrupted:
                            lost[task.name] = lost.get(task.name, 0) + 1
                            self.again.append(_named(task))
                            self._begin(task, workers)
                            continue
                        self._settle(agenda, task, result or _lost(task, lost.get(task.name, 0) + 1))
                    if on_step is not None:
                        on_step(self._step(total, agenda, workers.slots))
                except KeyboardInterrupt:
                    if interrupted:
                        raise
                    interrupted = True
            now = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            workers.close(now)
            _remove_unfinished(self.folder)
        if interrupted:
            left = sum(self.folder.answered(pair, self.sweep.how) is None for pair in self.sweep.pairs)
            raise Interrupted(
                f"Interrupted; {len(self.sweep.pairs) - left} of {len(self.sweep.pairs)} pairs have their answers. The same command goes "
                "on with the others."
            )

    def _fill(self, agenda: Agenda, workers: Workers) -> None:
        while self._running < workers.slots:
            task = agenda.next(self.sweep, workers.open_engine())
            if task is None:
                return
            self._begin(task, workers)

    def _begin(self, task: Task, workers: Workers) -> None:
        self._running += 1
        workers.start(task)

    def _settle(self, agenda: Agenda, task: Task, result: TaskResult) -> None:
        failure = result.failure
        if isinstance(task, RecordTask):
            for name, why in agenda.recorded(task.name, failure):
                self._done += 1
                self._tell(name, why)
        else:
            failure = failure or self._keep(task.name, result.text)
            if failure is not None:
                self._tell(task.name, failure)
        self._done += 1
        line = {"task": _named(task), "seconds": round(result.seconds, 3), "failed": failure is not None}
        with suppress(OSError), (self.folder.path / TIMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _keep(self, name: str, text: str) -> Failure | None:
        try:
            self.folder.keep(name, text)
        except (DetdiffError, OSError) as error:
            return without_places(Failure.of(error), {f"{self.folder.path}{os.sep}": ""})
        return None

    def _tell(self, name: str, failure: Failure) -> None:
        self.failures[name] = failure
        # A full disk takes not even that; the failure is told at the end all the same.
        with suppress(OSError):
            self.folder.tell(name, failure)

    def _step(self, total: int, agenda: Agenda, slots: int) -> SweepStep:
        spent = monotonic() - self._begun
        left = spent / self._done * (total - self._done) if self._done else None
        return SweepStep(self._done, total, len(self.failures), left)


def _named(task: Task) -> str:
    return f"{'record' if isinstance(task, RecordTask) else 'compare'} {task.name}"


def _lost(task: Task, times: int) -> TaskResult:
    error = WorkerLost(
        f"The process that was to {_named(task)} ended before it answered, {'twice' if times == 2 else f'{times} times'}: it was killed, as "
        "the system does when memory runs out, or it crashed. Lower --jobs, or run this cell alone with detdiff record."
        if times > 1
        else f"The process that was to {_named(task)} ended before it answered: it was killed, as the system does when memory runs out, or it "
        "crashed. Lower --jobs, or run this cell alone with detdiff record."
    )
    return TaskResult(failure=Failure.of(error))


def _ended(task: Task, error: BaseException) -> TaskResult:
    what = f"{type(error).__name__} ({words_of(error)})"
    return TaskResult(
        failure=Failure.of(
            WorkerLost(
                f"What was to {_named(task)} raised {what}, which ends a Python program and not one cell; expected an answer or an error. "
                "Correct the engine, which may call sys.exit()."
            )
        )
    )


def _remove_unfinished(folder: SweepFolder) -> None:
    """What workers that were killed have left, or the whole sweep. Nobody else writes there, since the folder is locked."""
    for path in (folder.path / SCRATCH, *(folder.path / TRACES).glob(".*")):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*folder.path.glob(".*.tmp"), *folder.path.glob("*/.*.tmp")):
        with suppress(OSError):
            path.unlink()


@contextmanager
def only_one(folder: SweepFolder) -> Iterator[None]:
    """The folder, made where it is not there, for one sweep at a time. Raises SweepFolderUnusable."""
    path = folder.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SweepFolderUnusable(
                    f"Another sweep runs in {path}; expected one at a time. Wait for it, or name another folder."
                ) from None
            _remove_unfinished(folder)
            yield
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise SweepFolderUnusable(
            f"{path} cannot be a sweep's folder ({error.strerror}); expected one that can be written to. Name another."
        ) from None


class WorkerProcesses:
    """Workers on this machine, ``count`` processes, each of which may take ``memory_mb`` MiB of data (None: as much as it likes).

    Each has a pool of its own, so that one which is killed takes no other's task with it.
    """

    def __init__(
        self, folder: SweepFolder, count: int, memory_mb: int | None = None, imports: Sequence[str] = ()
    ) -> None:
        self.slots = count
        self._folder = folder
        self._scratch = folder.path / SCRATCH
        self._told = (memory_mb, tuple(imports))
        self._pools: list[ProcessPoolExecutor | None] = [None] * count
        self._engines: list[str] = [""] * count
        self._running: dict[Future[TaskResult], tuple[int, Task]] = {}
        for name in THREADS:
            os.environ.setdefault(name, "1")

    def _free(self) -> list[int]:
        taken = {place for place, _ in self._running.values()}
        return [place for place in range(self.slots) if place not in taken]

    def open_engine(self) -> str | None:
        free = self._free()
        return self._engines[free[0]] if free else None

    def start(self, task: Task) -> None:
        place = self._free()[0]
        for again in (True, False):
            pool = self._pools[place]
            if pool is None:
                pool = self._pools[place] = ProcessPoolExecutor(
                    1,
                    mp_context=get_context("spawn"),
                    initializer=_begin_worker,
                    initargs=(self._scratch / str(place), *self._told),
                )
            try:
                future = pool.submit(run_task, task, self._folder.path)
                break
            except BrokenProcessPool:
                # It was killed while it had nothing to do.
                self._pools[place] = None
                if not again:
                    raise
        self._engines[place] = task.engine or self._engines[place]
        self._running[future] = place, task

    def finished(self) -> list[tuple[Task, TaskResult | None]]:
        ended, _ = wait(self._running, return_when=FIRST_COMPLETED)
        found: list[tuple[Task, TaskResult | None]] = []
        for future in ended:
            place, task = self._running.pop(future)
            # Not raised: what ends a Python program, such as an engine's sys.exit(), ends one cell's step here.
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                self._pools[place], self._engines[place] = None, ""
                found.append((task, None))
            elif error is not None:
                found.append((task, _ended(task, error)))
            else:
                found.append((task, future.result()))
        return found

    def close(self, now: bool) -> None:
        pools = [pool for pool in self._pools if pool is not None]
        for pool in pools:
            if now:
                for process in list((pool._processes or {}).values()):
                    process.kill()
            pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker(scratch: Path, memory_mb: int | None, imports: Sequence[str]) -> None:
    """What a worker does before its first task: Ctrl-C is for the process that has started it, without which it ends.

    Its temporary folders, and those of processes that it starts, are in ``scratch``, where one before it may have been killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    if memory_mb is not None and sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    for name in imports:
        import_before_runs(name)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
