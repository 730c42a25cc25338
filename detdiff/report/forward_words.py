"""The forwards of both runs that a reader asks for: where something began, changed or flipped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .blocks import Block, Item, Table
from .words import count, named, short_path

if TYPE_CHECKING:
    from detdiff.compare.divergence import Divergence
    from detdiff.compare.timeline import ForwardPoint

    from .content import Report

_MOST = 12
_MEMBERS = 3
_SENTENCE = 120
_EVENTS = 2
_TELLING = ("trim", "verify")
"""What begins the words of events that tell more than where pages lie."""


def timeline_blocks(report: Report) -> Iterator[Block]:
    """A table of forwards of both runs, and the numbers of rows at which a run changed kernels."""
    series = report.series
    assert series is not None
    for run, points in (("a", series.a), ("b", series.b)):
        if not points:
            continue
        told = _told(points, run, report.divergence)
        kept = sorted(sorted(told, key=lambda n: (told[n].rank, n))[:_MOST])
        yield Item(f"  run {run}: ", _of(len(points), len(told), len(kept)))
        yield Table(
            ("forward", "rows", "who", "path", "why"),
            tuple(_row(points[n], told[n].why) for n in kept),
            2,
        )
    for threshold in series.thresholds:
        yield Item(
            f"  threshold in {threshold.run}: ",
            f"linear calls of at most {count(threshold.after, 'row')} took {_paths(threshold.path_after)}, of "
            f"{threshold.before:,} and more {_paths(threshold.path_before)}",
        )


def _paths(joined: str) -> str:
    return " and ".join(short_path(path) for path in joined.split(", "))


class _Told:
    """Why a forward is worth a line; the lowest ``rank`` of its reasons says how much."""

    def __init__(self) -> None:
        self.why: list[str] = []
        self.rank = 9

    def add(self, why: str, rank: int) -> None:
        self.why.append(why)
        self.rank = min(self.rank, rank)


def _of(forwards: int, told: int, kept: int) -> str:
    if told == kept:
        return f"{count(forwards, 'forward')}, of which these began or changed something"
    return f"{count(forwards, 'forward')}, of which {told:,} began or changed something; these {kept} matter most"


def _told(points: Sequence[ForwardPoint], run: str, divergence: Divergence | None) -> Mapping[int, _Told]:
    """By place in ``points``."""
    told: dict[int, _Told] = defaultdict(_Told)
    place = {(point.forward, point.model): n for n, point in enumerate(points)}
    for said, forward in _asked(run, divergence):
        for model in ("target", "draft"):
            # Forwards are counted over both models, so that a number is of one of them.
            if (n := place.get((forward, model))) is not None:
                told[n].add(said, 0)
    before: dict[str, ForwardPoint] = {}
    for n, point in enumerate(points):
        for said, rank in _changed(before.get(point.model), point):
            told[n].add(said, rank)
        before[point.model] = point
    return told


def _asked(run: str, divergence: Divergence | None) -> Iterator[tuple[str, int]]:
    for request in () if divergence is None else divergence.requests:
        if request.origin is not None:
            forward = request.origin.forward_a if run == "a" else request.origin.forward_b
            yield f"birth of {named(request.id)}", forward
        if request.flip is not None:
            flip = request.flip.forward_a if run == "a" else request.flip.forward_b
            if flip is not None:
                yield f"flip of {named(request.id)}", flip


def _changed(before: ForwardPoint | None, point: ForwardPoint) -> Iterator[tuple[str, int]]:
    """What happened at a forward, with the rank of how much it matters."""
    if before is None:
        yield "first", 0
    else:
        if {m.request for m in before.members} != {m.request for m in point.members}:
            yield "others in the batch", 2
        if before.linear_path != point.linear_path:
            yield "another path", 1
    events = sorted(point.events, key=lambda event: not event.startswith(_TELLING))
    for event in events[:_EVENTS]:
        yield named(event, _SENTENCE), 3
    if len(events) > _EVENTS:
        yield count(len(events) - _EVENTS, "more event"), 3


def _row(point: ForwardPoint, why: Sequence[str]) -> tuple[str, ...]:
    who = [
        f"{member.rows:,} {member.phase} of {named(member.request)}" for member in point.members[:_MEMBERS]
    ]
    if len(point.members) > _MEMBERS:
        who.append(f"{len(point.members) - _MEMBERS} more")
    draft = "" if point.model == "target" else f" ({point.model})"
    return (
        f"{point.forward}{draft}",
        f"{point.rows:,}",
        " + ".join(who),
        short_path(point.linear_path) if point.linear_path else "-",
        "; ".join(dict.fromkeys(why)),
    )
