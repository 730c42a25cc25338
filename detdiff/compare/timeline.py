"""One run's forwards in time: who was in each, how many rows, on which kernel paths, and what the caches did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from detdiff.trace import Trace, format_ranges, parse_ranges
from detdiff.trace.event import MODELS

from .bookkeeping import Noticed, grouped
from .composition import Member, PathUse
from .events import deed
from .forwards import RunLog, members_of

Event = Mapping[str, Any]


@dataclass(frozen=True)
class ForwardPoint:
    """One forward of one model, ``target`` or ``draft``.

    ``rows`` is M, the rows that its linear calls see: with padding, which ``members`` leave out. ``paths`` are most used
    first; ``linear_path`` is the path of most linear sites, None where no kernel plan was recorded. ``writes`` is the
    number of positions whose cache entries it wrote, and ``events`` say what engines and caches did in or after it.
    """

    forward: int
    model: str
    rows: int
    members: tuple[Member, ...]
    paths: tuple[PathUse, ...]
    linear_path: str | None
    writes: int
    events: tuple[str, ...]


@dataclass(frozen=True)
class Threshold:
    """Between two row counts a run's linear calls change their kernel paths, as the recorded calls show.

    In run ``run``, ``a`` or ``b``, calls of ``after`` rows took ``path_after`` and those of ``before`` rows, the next
    more that were recorded, ``path_before``; several paths are joined by commas.
    """

    run: str
    after: int
    before: int
    path_after: str
    path_before: str


@dataclass(frozen=True)
class Timeline:
    """One run's forwards in order, and where its linear calls change their paths."""

    forwards: tuple[ForwardPoint, ...]
    thresholds: tuple[Threshold, ...]

    @classmethod
    def of(cls, trace: Trace, run: str) -> Timeline:
        """``run`` is ``a`` or ``b``. Raises what reading forwards and events raises."""
        ids = [str(request["id"]) for request in trace.requests]
        log, linear = RunLog(trace, run), _Linear(trace)
        events: dict[int, list[Event]] = {}
        for event in trace.events():
            # What came before any forward is told of with the first.
            events.setdefault(max(0, event["forward"]), []).append(event)
        paths: dict[int, tuple[PathUse, ...]] = {}
        found = []
        for number, line in enumerate(trace.forwards()):
            plan, model = line["plan"], str(line.get("model", MODELS[0]))
            if plan not in paths:
                paths[plan] = log.paths(number)
                linear.add(plan, line["calls"], model)
            members = members_of(line, ids)
            said = [*_sentences(events.get(number, ()), ids)]
            for each in grouped(run, ids, [Noticed(number, model, event) for event in line["events"]]):
                said.append(f"{each.request}: {each.detail}" if each.request else each.detail)
            found.append(
                ForwardPoint(
                    forward=number,
                    model=model,
                    rows=line["shape"][0] * line["shape"][1],
                    members=members,
                    paths=paths[plan],
                    linear_path=linear.path[plan],
                    writes=sum(member.rows for member in members),
                    events=tuple(said),
                )
            )
        return cls(tuple(found), linear.thresholds(run))


class _Linear:
    """The linear calls of a run's plans: ``path`` is that of most linear sites by plan."""

    def __init__(self, trace: Trace) -> None:
        self._sites = len(trace.sites)
        self._linear = frozenset(n for n, site in enumerate(trace.sites) if site.kind == "linear")
        self._taken: dict[int, set[str]] = {}
        self.path: dict[int, str | None] = {}

    def add(self, plan: int, calls: Sequence[Mapping[str, Any]], model: str) -> None:
        """A plan of ``model``; a site whose rows took several paths counts for each."""
        taken: dict[str, set[int]] = {}
        for call in calls:
            sites = {site for run in parse_ranges(call["sites"], self._sites) for site in run} & self._linear
            taken.setdefault(call["path"], set()).update(sites)
            # The draft has linear sites of other sizes, whose thresholds may be others.
            if sites and model == MODELS[0] and type(call.get("rows")) is int:
                self._taken.setdefault(call["rows"], set()).add(call["path"])
        most = max(sorted(taken), key=lambda path: len(taken[path]), default=None)
        self.path[plan] = most if most is not None and taken[most] else None

    def thresholds(self, run: str) -> tuple[Threshold, ...]:
        """Ascending by rows."""
        said = {rows: ", ".join(sorted(paths)) for rows, paths in sorted(self._taken.items())}
        return tuple(
            Threshold(run, fewer, more, said[fewer], said[more])
            for fewer, more in pairwise(said)
            if said[fewer] != said[more]
        )


def _sentences(events: Sequence[Event], ids: Sequence[str]) -> Iterator[str]:
    """The events of one forward; pages that one request named are said together."""
    for (kind, *_), group in groupby(events, key=_alike):
        several = list(group)
        if kind == "page":
            pages, indices = (format_ranges(event[key] for event in several) for key in ("page", "index"))
            s = "s" if len(several) > 1 else ""
            freed, whose = several[0].get("freed"), _of(several[0], ids)
            yield f"physical page{s} {pages}{whose} {'freed' if freed else f'given as page{s} {indices}'}"
        else:
            yield from (_said(event, ids) for event in several)


def _alike(event: Event) -> tuple[Any, ...]:
    return event["event"], event.get("request"), event.get("model"), bool(event.get("freed"))


def _of(event: Event, ids: Sequence[str]) -> str:
    """Whose event it is; the format leaves most keys free."""
    draft = " in the draft" if event.get("model", MODELS[0]) != MODELS[0] else ""
    return (f" of {ids[event['request']]}" if "request" in event else "") + draft


def _said(event: Event, ids: Sequence[str]) -> str:
    kind, detail = str(event["event"]), ""
    if kind in ("filter", "extend", "merge", "roll"):
        return deed(event, ids)
    if kind == "trim":
        detail = f", {event['asked']} asked, {event['done']} done"
    elif kind == "verify":
        detail = f", {len(event['proposals'])} proposed, {event['accepted']} accepted"
    elif kind == "prefix":
        own = event["from"] == event["request"]
        source = "run beforehand" if own else f"from {ids[event['from']]}"
        detail = f", {event['tokens']} positions {source}"
    elif kind == "quantise":
        detail = f", from position {event['position']} on, layers {event['layers']}"
    return kind + _of(event, ids) + detail
