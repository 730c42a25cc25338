"""The timeline: both runs' forwards, one above the other, with who was in them, on which kernel path, and what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..document import Block, Item, Table, ViewSubject
from ..svg import (
    Drawing,
)
from ..words import count, named, short_path
from .timeline_drawing import timeline_drawing
from .timeline_picture import timeline_svg

if TYPE_CHECKING:
    from detdiff.compare.divergence import Divergence
    from detdiff.compare.series import ForwardPoint


_MOST = 24
_MEMBERS = 6
_SENTENCE = 120
_EVENTS = 2
_TELLING = ("trim", "verify")
"""What begins the words of events that tell more than where pages lie."""


class TimelineView:
    """Every forward of both runs."""

    name = "timeline"
    title = "Timeline"
    sentence = "Every forward of both runs: its rows, who was in it, and on which kernel path."
    section = "timeline", "Forwards in time"
    of_request = False

    def shows(self, subject: ViewSubject) -> bool:
        return bool(subject.series.a or subject.series.b)

    def picture(self, subject: ViewSubject, *, columns: int, standalone: bool) -> str:
        return timeline_svg(subject.series, columns=columns, standalone=standalone)

    def drawings(self, subject: ViewSubject) -> Sequence[tuple[str, Callable[[], Drawing]]]:
        return [("all forwards", partial(timeline_drawing, subject.series))]

    def table(self, subject: ViewSubject, most: int) -> Table:
        """Forwards that are alike in one line; of many lines those that began or changed most."""
        series = subject.series
        lines = [
            line
            for run, points in (("a", series.a), ("b", series.b))
            for line in _lines(run, points, subject.divergence)
        ]
        kept = sorted(sorted(range(len(lines)), key=lambda n: (lines[n].rank, n))[:most])
        caption = f"{count(len(series.a), 'forward')} of run a and {len(series.b):,} of run b, those alike in one line"
        if len(kept) < len(lines):
            caption += f"; the {len(kept):,} of {len(lines):,} lines that matter most"
        headers = ("run", "forwards", "rows", "who", "path", "writes", "why")
        return Table(headers, tuple(lines[n].cells() for n in kept), 2, caption)

    def words(self, subject: ViewSubject, columns: int) -> Iterator[Block]:
        """The table, and the numbers of rows at which a run changed kernels."""
        table = self.table(subject, _MOST)
        yield Item("  forwards: ", table.caption)
        yield replace(table, caption="")
        for threshold in subject.series.thresholds:
            yield Item(
                f"  threshold in {threshold.run}: ",
                f"linear calls of at most {count(threshold.after, 'row')} took {_joined_paths(threshold.path_after)}, of "
                f"{threshold.before:,} and more {_joined_paths(threshold.path_before)}",
            )


def _joined_paths(joined: str) -> str:
    return " and ".join(short_path(path) for path in joined.split(", "))


@dataclass
class _AlikeForwards:
    """Forwards in a row that are alike, why they are worth a line, and how much that matters: 0 is most."""

    run: str
    points: list[ForwardPoint]
    why: list[str]
    rank: int

    def cells(self) -> tuple[str, ...]:
        first, last = self.points[0], self.points[-1]
        draft = "" if first.model == "target" else f" ({first.model})"
        span = f"{first.forward}" if first is last else f"{first.forward}–{last.forward}"
        return (
            self.run,
            f"{span}{draft}",
            f"{first.rows:,}",
            _members(first),
            short_path(first.linear_path) if first.linear_path else "-",
            f"{sum(point.writes for point in self.points):,}",
            "; ".join(dict.fromkeys(self.why)),
        )


def _members(point: ForwardPoint) -> str:
    who = [f"{m.rows:,} {m.phase} of {named(m.request)}" for m in point.members[:_MEMBERS]]
    if len(point.members) > _MEMBERS:
        who.append(f"{len(point.members) - _MEMBERS} more")
    return " + ".join(who)


def _lines(run: str, points: Sequence[ForwardPoint], divergence: Divergence | None) -> list[_AlikeForwards]:
    asked: dict[int, list[str]] = {}
    for reason, forward in _asked(run, divergence):
        asked.setdefault(forward, []).append(reason)
    lines: list[_AlikeForwards] = []
    before: dict[str, ForwardPoint] = {}
    for point in points:
        why = [(reason, 0) for reason in asked.get(point.forward, ())] + list(
            _changed(before.get(point.model), point)
        )
        last = lines[-1].points[-1] if lines else None
        before[point.model] = point
        alike = last is not None and (last.model, last.rows) == (point.model, point.rows)
        if alike and not why and not lines[-1].why:
            lines[-1].points.append(point)
        else:
            lines.append(
                _AlikeForwards(
                    run, [point], [reason for reason, _ in why], min((rank for _, rank in why), default=9)
                )
            )
    return lines


def _asked(run: str, divergence: Divergence | None) -> Iterator[tuple[str, int]]:
    for request in () if divergence is None else divergence.requests:
        if request.origin is not None:
            forward = request.origin.forward_a if run == "a" else request.origin.forward_b
            yield f"origin of {named(request.id)}", forward
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
