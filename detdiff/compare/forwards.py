"""One run's forwards: who was in them, which kernel path each site took, and what their bookkeeping says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Trace, parse_ranges
from detdiff.trace.header import FORWARDS

from .divergence import Change, Composition, Finding, Member, PathUse

_PLAN: Final = re.compile(rb'"plan"\s*:\s*(\d{1,9})')


@dataclass(frozen=True)
class Call:
    """The kernel call that computed a site: rows M, second-to-last dimension, path and the rule that chose it."""

    rows: int | None
    second_last: int | None
    path: str | None
    rule: str | None


_FEW: Final = 16  # a parsed line costs as much as this many skimmed ones
_EVENTS: Final = b'"events"'
_NO_CALL: Final = Call(None, None, None, None)


class RunLog:
    """The forwards of one trace; a forward is parsed only when it is asked about."""

    def __init__(self, trace: Trace, run: str) -> None:
        """``run`` is ``a`` or ``b``."""
        self._trace = trace
        self._run = run
        self._forwards = trace.forwards()
        self._calls: dict[int, list[Call]] = {}
        self._plan = np.full(len(self._forwards), -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._forwards)

    def plans(self, forwards: NDArray[np.int64]) -> NDArray[np.int64]:
        """The kernel plan numbers of some forwards, int64 in their order."""
        unknown = np.unique(forwards[self._plan[forwards] < 0])
        if len(unknown) * _FEW > len(self._plan):
            self._plan = self._skimmed[0]
        else:
            self._plan[unknown] = [self._forwards[number]["plan"] for number in unknown.tolist()]
        return self._plan[forwards]

    @cached_property
    def _skimmed(self) -> tuple[NDArray[np.int64], list[int]]:
        """Plan number of every forward, int64 [forwards], and the forwards with events.

        Parsing every line takes longer than comparing all digests, and these two facts can be read off the bytes.
        """
        plan = np.zeros(len(self._forwards), dtype=np.int64)
        eventful: list[int] = []
        number = 0
        with open(self._trace.path / FORWARDS, "rb") as file:
            for line in file:
                if number == len(plan):
                    break
                if not line.startswith(b'{"f'):
                    continue
                found = _PLAN.search(line)
                plan[number] = int(found[1]) if found else self._forwards[number]["plan"]
                if _EVENTS in line:
                    eventful.append(number)
                number += 1
        return plan, eventful

    def _has_events(self) -> bool:
        before = b""
        with open(self._trace.path / FORWARDS, "rb", buffering=0) as file:
            while chunk := file.read(1 << 20):
                if _EVENTS in before + chunk:
                    return True
                before = chunk[-len(_EVENTS) :]
        return False

    def composition(self, forward: int) -> Composition:
        """Who was in a forward; rows of one request in several places are listed one by one."""
        line = self._forwards[forward]
        ids = [request["id"] for request in self._trace.requests]
        members = tuple(
            Member(ids[row["request"]], row["phase"], row["start"], row["count"]) for row in line["rows"]
        )
        return Composition(forward, line["phase"], line["layout"], sum(m.rows for m in members), members)

    def call(self, forward: int, site: int) -> Call:
        """The call that computed a site (by its index in this trace) in a forward; all None if not recorded."""
        return self.planned(self._plan_of(forward), site)

    def _plan_of(self, forward: int) -> int:
        return int(self.plans(np.array([forward]))[0])

    def planned(self, plan: int, site: int) -> Call:
        """The call that a plan makes of a site; ``plan`` is a number that ``plans`` gave."""
        if plan not in self._calls:
            forward = int(np.flatnonzero(self._plan == plan)[0])
            self._calls[plan] = self._calls_of(self._forwards[forward]["calls"])
        return self._calls[plan][site]

    def paths(self, forward: int) -> tuple[PathUse, ...]:
        """The kernel paths of a forward, most used first."""
        self.call(forward, 0)
        count = Counter(call.path for call in self._calls[self._plan_of(forward)] if call.path is not None)
        return tuple(
            PathUse(path, sites)
            for path, sites in sorted(count.items(), key=lambda item: (-item[1], item[0]))
        )

    def _calls_of(self, calls: list[Mapping[str, Any]]) -> list[Call]:
        sites = len(self._trace.sites)
        found = [_NO_CALL] * sites
        for item in calls:
            call = Call(item.get("rows"), item.get("second_last"), item["path"], item.get("rule"))
            for run in parse_ranges(item["sites"], sites):
                for site in run:
                    found[site] = call
        return found

    def changes(self, request: int, layer: int | None, forward: int) -> tuple[Change, ...]:
        """The cache entries of a request and layer that this forward saw changed since they were written."""
        return tuple(
            Change(
                self._run,
                forward,
                event.get("layer"),
                event.get("entry", ""),
                event.get("head"),
                event.get("position"),
            )
            for event in self._forwards[forward]["events"]
            if event.get("kind") == "cache_changed"
            and event.get("request") == request
            and (layer is None or event.get("layer") == layer)
        )

    def findings(self) -> Iterator[Finding]:
        """What the recorder noticed about offsets and caches, in execution order."""
        ids = [request["id"] for request in self._trace.requests]
        for number in self._skimmed[1] if self._has_events() else ():
            for event in self._forwards[number]["events"]:
                request = event.get("request")
                known = type(request) is int and 0 <= request < len(ids)
                yield Finding(
                    self._run,
                    str(event.get("kind", "event")),
                    ids[request] if known else None,
                    number,
                    _sentence(event),
                )


def _sentence(event: Mapping[str, Any]) -> str:
    if event.get("kind") == "cache_changed":
        return (
            f"the cache entry {event.get('entry')} of layer {event.get('layer')}, head {event.get('head')}, position "
            f"{event.get('position')} is not what was written"
        )
    if event.get("kind") == "cache_changed_more":
        return f"{event.get('entries')} more cache entries of layer {event.get('layer')} are not what was written"
    if event.get("kind") == "offset":
        return f"the cache of layer {event.get('layer')} is at offset {event.get('found')}, the row at {event.get('expected')}"
    return ", ".join(
        f"{key} {value}" for key, value in sorted(event.items()) if key not in ("kind", "request")
    )


def one_sided(a: RunLog, b: RunLog, limit: int = 32) -> tuple[tuple[Finding, ...], bool]:
    """(findings, whether the runs' bookkeeping differs): what both runs say of a request alike is listed once, as both.

    At most ``limit`` findings are listed; a last one counts the rest.
    """
    of_a, of_b = _distinct(a), _distinct(b)
    findings = [
        Finding("both", found.what, found.request, None, found.detail) if key in of_b else found
        for key, found in of_a.items()
    ]
    findings += [found for key, found in of_b.items() if key not in of_a]
    findings.sort(key=lambda found: found.forward if found.forward is not None else -1)
    parted = set(of_a) != set(of_b)
    if len(findings) > limit:
        rest = len(findings) - limit
        findings = [*findings[:limit], Finding("both", "more", None, None, f"{rest} more findings")]
    return tuple(findings), parted


def _distinct(log: RunLog) -> dict[tuple[str, str | None, str], Finding]:
    found: dict[tuple[str, str | None, str], Finding] = {}
    for finding in log.findings():
        found.setdefault((finding.what, finding.request, finding.detail), finding)
    return found
