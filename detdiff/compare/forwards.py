"""One run's forwards: who was in each, which kernel call computed a site, and what the recorder noticed of the caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Trace, computed, flat_row, parse_ranges

from .divergence import Composition, EntryChange, Finding, Member, PathUse
from .noticed import Noticed, grouped


@dataclass(frozen=True)
class KernelCall:
    """The kernel call that computed a site: rows M, second-to-last dimension, path and the rule that chose it."""

    rows: int | None
    second_last: int | None
    path: str | None
    rule: str | None


NO_CALL: Final = KernelCall(None, None, None, None)


class PlanCalls:
    """The calls of one kernel plan by site; where a site's rows took several, each names its rows."""

    def __init__(self, calls: Sequence[Mapping[str, Any]], sites: int) -> None:
        self._of: list[list[tuple[KernelCall, Mapping[str, Any]]]] = [[] for _ in range(sites)]
        for item in calls:
            call = KernelCall(item.get("rows"), item.get("second_last"), item["path"], item.get("rule"))
            for run in parse_ranges(item["sites"], sites):
                for site in run:
                    self._of[site].append((call, item))

    def alike(self, site: int) -> KernelCall | None:
        """The call that computed all rows of a site; None where that depends on the row."""
        found = self._of[site]
        if not found:
            return NO_CALL
        return None if "at" in found[0][1] else found[0][0]

    def at(self, site: int, row: int | None) -> KernelCall:
        """The call that computed a site in a row, given by its place in the forward (``flat_row``)."""
        return next((call for call, item in self._of[site] if computed(item, row)), NO_CALL)

    def paths(self) -> Counter[str]:
        """How many sites took each path; a site whose rows took several counts for each."""
        pairs = {(site, call.path) for site, found in enumerate(self._of) for call, _ in found}
        return Counter(path for _, path in pairs if path is not None)


# As the writer spells it; a pattern that finds it takes ten times as long.
_PLAN: Final = b'"plan":'
_DIGITS: Final = 9


Row = tuple[int, int]  # a request's index in its trace, and a position

_FEW: Final = 16
_PART: Final = 1 << 17
_DEARER: Final = 32  # times what a byte costs that is skimmed, one costs that is parsed


class RunLog:
    """The forwards of one trace; a forward is parsed only when it is asked about."""

    def __init__(self, trace: Trace, run: str) -> None:
        """``run`` is ``a`` or ``b``."""
        self._trace = trace
        self._run = run
        self._forwards = trace.forwards()
        self._calls: dict[int, PlanCalls] = {}
        self._numbers: dict[KernelCall, int] = {}
        self._plan = np.full(len(self._forwards), -1, dtype=np.int64)
        self._ids = [request["id"] for request in trace.requests]
        self._compositions: dict[int, Composition] = {}
        self._parsed = 0

    def __len__(self) -> int:
        return len(self._forwards)

    def _plans(self, forwards: NDArray[np.int64]) -> NDArray[np.int64]:
        """The kernel plan numbers of some forwards, int64 in their order."""
        unknown = forwards[self._plan[forwards] < 0]
        if not len(unknown):
            return self._plan[forwards]
        unknown = np.unique(unknown)
        starts, stops = self._forwards.spans()
        self._parsed += int((stops[unknown] - starts[unknown]).sum())
        if self._parsed * _DEARER > int(stops[-1]):
            self._plan = self._skimmed
        else:
            self._plan[unknown] = [self._forwards[number]["plan"] for number in unknown.tolist()]
        return self._plan[forwards]

    @cached_property
    def _before(self) -> dict[int, int]:
        """The turn before each later turn, by number."""
        return {e["request"]: e["from"] for e in self._trace.events() if e["event"] == "turn"}

    @cached_property
    def _skimmed(self) -> NDArray[np.int64]:
        """Plan number of every forward, int64 [forwards]: parsing every line takes longer than comparing all digests."""
        found, values = _numbers_after(_PLAN, self._raw())
        plan = np.full(len(self._forwards) + 1, -1, dtype=np.int64)
        # Backwards, so that of several in one line the first is kept; the place -1 is nobody's.
        plan[self._lines_of(found)[::-1]] = values[::-1]
        plan = plan[:-1]
        for number in np.flatnonzero(plan < 0).tolist():
            plan[number] = self._forwards[number]["plan"]
        return plan

    def _raw(self) -> bytes:
        return self._forwards.raw()

    def _lines_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The forwards in whose lines these bytes are, -1 for those of other lines."""
        starts, stops = self._forwards.spans()
        number = np.searchsorted(starts, places, side="right") - 1
        return np.where((number >= 0) & (places < np.append(stops, 0)[number]), number, -1)

    def composition(self, forward: int) -> Composition:
        """Who was in a forward; rows of one request in several places are listed one by one."""
        found = self._compositions.get(forward)
        if found is None:
            line = self._forwards[forward]
            members = members_of(line, self._ids)
            rows = sum(m.rows for m in members)
            found = Composition(forward, line["phase"], line["layout"], rows, members)
            if len(self._compositions) >= _FEW:
                self._compositions.clear()
            self._compositions[forward] = found
        return found

    def call(self, forward: int, site: int, row: Row) -> KernelCall:
        """The call that computed a site (by its index in this trace) in a row; all None if not recorded."""
        calls = self._calls_of(int(self._plans(np.array([forward]))[0]), forward)
        return calls.alike(site) or calls.at(site, self._flat(forward, row))

    def _flat(self, forward: int, row: Row) -> int | None:
        """Where a row lies in a forward; one that a later turn kept is a row of the turn before."""
        (request, position), line = row, self._forwards[forward]
        found = flat_row(line, request, position)
        while found is None and request in self._before:
            request = self._before[request]
            found = flat_row(line, request, position)
        return found

    def call_numbers(self, rows: NDArray[np.int64], site: int) -> NDArray[np.int64]:
        """A number for the call that computed a site in each of some rows, int64 in their order.

        ``rows`` are places in the trace's row index; ``numbered`` gives the call back.
        """
        index = self._trace.row_index()
        forwards = index.forward[rows].astype(np.int64)
        plans = self._plans(forwards)
        found = np.empty(len(rows), dtype=np.int64)
        for plan in distinct(plans).tolist():
            here = np.flatnonzero(plans == plan)
            alike = self._calls_of(plan, int(forwards[here[0]])).alike(site)
            if alike is not None:
                found[here] = self._number(alike)
                continue
            for n in here.tolist():
                row = int(index.request[rows[n]]), int(index.position[rows[n]])
                found[n] = self._number(self.call(int(forwards[n]), site, row))
        return found

    def numbered(self, number: int) -> KernelCall:
        """The call of a number that ``call_numbers`` gave."""
        return list(self._numbers)[number]

    def _number(self, call: KernelCall) -> int:
        return self._numbers.setdefault(call, len(self._numbers))

    def _calls_of(self, plan: int, forward: int) -> PlanCalls:
        """The calls of a plan, which ``forward`` follows."""
        if plan not in self._calls:
            self._calls[plan] = PlanCalls(self._forwards[forward]["calls"], len(self._trace.sites))
        return self._calls[plan]

    def paths(self, forward: int) -> tuple[PathUse, ...]:
        """The kernel paths of a forward, most used first."""
        count = self._calls_of(int(self._plans(np.array([forward]))[0]), forward).paths()
        return tuple(
            PathUse(path, sites)
            for path, sites in sorted(count.items(), key=lambda item: (-item[1], item[0]))
        )

    def changes(self, request: int, layer: int | None, forward: int) -> tuple[EntryChange, ...]:
        """The cache entries of a request and layer that this forward saw changed since they were written."""
        return tuple(
            EntryChange(
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

    @cached_property
    def noticed(self) -> tuple[Noticed, ...]:
        """What the recorder noticed of offsets and caches, in execution order."""
        found: list[Noticed] = []
        for number in self._forwards.eventful():
            line = self._forwards[number]
            model = str(line.get("model", "target"))
            found += [Noticed(number, model, event) for event in line["events"]]
        return tuple(found)

    def findings(self) -> Iterator[Finding]:
        """The same as findings, in the order of their first forward."""
        return grouped(self._run, self._ids, self.noticed)


def _numbers_after(word: bytes, raw: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a word begins in some bytes and the number of at most ``_DIGITS`` digits right behind it, -1 for none: int64 [n] each."""
    data = np.frombuffer(raw, np.uint8)
    head = int.from_bytes(word[:4], "little")
    # Four bytes at a time, from each of four places on: a quarter of the comparisons of single bytes.
    hits = [np.zeros(0, np.int64)]
    for k in range(min(4, len(raw))):
        fours = np.frombuffer(raw, "<u4", (len(raw) - k) // 4, k)
        # In parts, which the processor's cache holds.
        for at in range(0, len(fours), _PART):
            hits.append(4 * (np.flatnonzero(fours[at : at + _PART] == head) + at) + k)
    found = np.sort(np.concatenate(hits))

    def behind(places: NDArray[np.int64]) -> NDArray[np.uint8]:
        inside = data[np.minimum(places, len(raw) - 1)] if len(raw) else data
        return np.where(places < len(raw), inside, np.uint8(0))

    for n in range(4, len(word)):
        found = found[behind(found + n) == word[n]]
    values, going = np.zeros(len(found), np.int64), np.arange(len(found))
    for n in range(_DIGITS):
        # What is below "0" wraps to a large number.
        digit = behind(found[going] + len(word) + n) - np.uint8(ord("0"))
        if n == 0:
            values[digit >= 10] = -1
        going, digit = going[digit < 10], digit[digit < 10]
        values[going] = values[going] * 10 + digit
    return found, values


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of an array [n] once each, ascending; those of most are one, and sorting them would take longest."""
    return values[:1] if len(values) and bool((values == values[0]).all()) else np.unique(values)


def members_of(line: Mapping[str, Any], ids: Sequence[str]) -> tuple[Member, ...]:
    """Who is in a forward by its line of the trace; ``ids`` are the requests' ids by number."""
    return tuple(
        Member(ids[row["request"]], row["phase"], row["start"], row["count"]) for row in line["rows"]
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
    diverged = set(of_a) != set(of_b)
    if len(findings) > limit:
        rest = len(findings) - limit
        findings = [*findings[:limit], Finding("both", "more", None, None, f"{rest} more findings")]
    return tuple(findings), diverged


def _distinct(log: RunLog) -> dict[tuple[str, str | None, str], Finding]:
    found: dict[tuple[str, str | None, str], Finding] = {}
    for finding in log.findings():
        found.setdefault((finding.what, finding.request, finding.detail), finding)
    return found
