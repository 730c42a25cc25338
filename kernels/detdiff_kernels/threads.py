"""Splits a compiled loop over threads without ever waiting for a thread that has not started.

numba's own prange waits for all its threads to wake, which takes milliseconds whenever other processes hold
the cores. Here the caller takes parts too and waits only for parts that are in progress, so on a busy machine
it simply does all the work itself. The loops release the GIL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from threading import Condition, Event, Thread

Part = tuple[int, int]

# About half a millisecond of work: waking a thread takes a tenth of that, and a busy core gives nothing back.
_WORTH_A_THREAD = 1 << 22
# More parts than threads, so that a thread which starts late or is slow leaves its share to the others.
_PIECES_PER_THREAD = 4


class _Job:
    def __init__(self, work: Callable[[int, int], None], parts: list[Part]) -> None:
        self._work = work
        self._parts = iter(parts)
        self._running = 0
        self._changed = Condition()

    def help(self) -> None:
        """Takes parts until none is left."""
        while True:
            with self._changed:
                part = next(self._parts, None)
                if part is None:
                    return
                self._running += 1
            try:
                self._work(*part)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running)


class _Helper:
    """A sleeping thread that helps with the newest job it is given."""

    def __init__(self) -> None:
        self._wake = Event()
        self._job: _Job | None = None
        Thread(target=self._serve, name="detdiff-kernels", daemon=True).start()

    def give(self, job: _Job) -> None:
        self._job = job
        self._wake.set()

    def _serve(self) -> None:
        while self._wake.wait():
            self._wake.clear()
            job, self._job = self._job, None
            if job is not None:
                job.help()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@cache
def _helpers(process: int) -> list[_Helper]:
    """One helper per further core; ``process`` is part of the key because threads do not survive a fork."""
    return [_Helper() for _ in range(cores() - 1)]


def share(work: Callable[[int, int], None], count: int, cost: int) -> None:
    """Calls ``work(first, last)`` on ranges that together are 0 to ``count``, some of them on other threads.

    ``cost`` is the number of multiply-adds in all; a small one runs on this thread alone. ``work`` must not
    raise.
    """
    helpers = _helpers(os.getpid()) if cost >= _WORTH_A_THREAD else []
    pieces = min(count, _PIECES_PER_THREAD * (len(helpers) + 1)) if helpers else 1
    if pieces <= 1:
        work(0, count)
        return
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    job = _Job(work, list(pairwise(bounds)))
    for helper in helpers:
        helper.give(job)
    job.help()
    job.wait()
