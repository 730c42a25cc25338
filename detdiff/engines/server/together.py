"""Many requests at once, and the evidence that they ran together."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .load import ServerLoad

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What jobs gave, by their place: ``done`` the results, ``failed`` the first exception, which is to be raised."""

    done: Mapping[int, Any]
    failed: BaseException | None


def at_once(
    jobs: Sequence[Callable[[], Any]],
    starts: Sequence[float] = (),
    active: int | None = None,
    stop: Callable[[], None] = lambda: None,
) -> Outcomes:
    """Run jobs in threads, each at its start in seconds from now (together without any), ``active`` of them at a time at most.

    After the first failure, or Ctrl-C, no further one starts, and ``stop`` is called; those that are running are not waited for.
    """
    results: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()
    limit = threading.Semaphore(active or len(jobs))
    gate, given_up = threading.Barrier(len(jobs) + 1), threading.Event()

    def work(place: int) -> None:
        gate.wait()
        if starts:
            given_up.wait(max(0.0, began + starts[place] - time.perf_counter()))
        with limit:
            if given_up.is_set():
                results.put((place, None, None))
                return
            try:
                results.put((place, jobs[place](), None))
            except BaseException as error:
                results.put((place, None, error))

    for place in range(len(jobs)):
        threading.Thread(target=work, args=(place,), daemon=True).start()
    done: dict[int, Any] = {}
    began = time.perf_counter()
    try:
        gate.wait()
        for _ in jobs:
            place, result, error = results.get()
            if error is not None:
                return Outcomes(done, error)
            done[place] = result
    except KeyboardInterrupt as error:
        return Outcomes(done, error)
    finally:
        if len(done) < len(jobs):
            given_up.set()
            stop()
    return Outcomes(done, None)


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Arrivals in seconds of ``count`` requests, the first at 0, the others after exponential gaps of 1/rate on average."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(at)
        at += draw.expovariate(rate)
    return found


@dataclass(frozen=True)
class TogetherEvidence:
    """Whether requests that were sent together ran together, seen from outside.

    ``met`` is False where a request was answered while no other one of its batch was (of schedule continuous: where that is
    so of all), None where times of tokens are not known. ``most`` is how many ran at a time, ``interleaved`` how many pairs of requests
    have tokens between each other's. ``load`` is what the server itself said meanwhile.
    """

    met: bool | None
    most: int
    interleaved: int
    by: str
    load: ServerLoad | None = None

    def to_json(self) -> dict[str, Any]:
        load = {} if self.load is None else {"load": self.load.to_json()}
        return {"met": self.met, "most": self.most, "interleaved": self.interleaved, "by": self.by} | load

    @property
    def alone_inside(self) -> bool:
        """Whether the server counts forwards of one request alone, whatever was sent: tokens of two servers behind one
        address come between each other's, too."""
        return self.load is not None and self.load.shared is not None and self.load.shared <= 1

    def with_load(self, load: ServerLoad | None, sent: int) -> TogetherEvidence:
        """With what the server said of batches of ``sent`` requests, which may be all that is known of them."""
        found = replace(self, load=load)
        if load is None:
            return found
        if found.alone_inside:
            return replace(found, met=False)
        if self.met is None and load.readings and load.running - load.before >= sent:
            return replace(
                found, met=True, most=int(load.running - load.before), by=f"the server's {load.by}"
            )
        return found


def evidence(batches: Sequence[Sequence[Sequence[float]]], by: str, *, every: bool) -> TogetherEvidence:
    """From the times of each request's tokens, batch by batch; ``every`` request has to have met another, or one pair at all."""
    most, pairs, met = 1, 0, True
    for batch in batches:
        spans = [(min(times), max(times)) if times else None for times in batch]
        known = [span for span in spans if span is not None]
        if len(batch) > 1 and any(span is None for span in spans):
            met = False
        for n, span in enumerate(known):
            others = [
                m for m, other in enumerate(known) if m != n and other[0] < span[1] and span[0] < other[1]
            ]
            pairs += sum(m > n for m in others)
            if len(batch) > 1 and not others:
                met = False
        events = sorted((edge, kind) for first, last in known for edge, kind in ((first, 1), (last, -1)))
        running = 0
        for _, kind in events:
            running += kind
            most = max(most, running)
    return TogetherEvidence(met if every else pairs > 0, most, pairs, by)
