"""What the page's script tells of each forward of a timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from ..svg import Axis, CursorJump, Drawing
from ..words import count, full_path, named
from .timeline_picture import timeline_svg
from .timeline_plan import COLUMNS, MARKED, TimelinePlan

if TYPE_CHECKING:
    from detdiff.compare.series import ForwardPoint, Series


def timeline_drawing(series: Series) -> Drawing:
    """The picture with what is told of each forward; of those that share a column it is one that is marked, or the largest."""
    plan = TimelinePlan(series, COLUMNS)
    marks = {
        (run, forward): what for what in MARKED for run in "ab" for forward, _ in plan.marks_of(run, what)
    }
    told: list[ForwardPoint | None] = []
    for run in "ab":
        columns = [points for _, points in plan.binned(run)]
        told += [
            next((p for p in points if (run, p.forward) in marks), max(points, key=lambda point: point.rows))
            for points in columns
        ]
        told += [None] * (plan.columns - len(columns))
    runs = [run for run in "ab" for _ in range(plan.columns)]
    cells: list[tuple[str, list[str], list[int | None]]] = []
    for label, say in _TOLD.items():
        words = [None if point is None else say(point) for point in told]
        if label == "here":
            words = [
                None
                if point is None
                else f"the {marks[run, point.forward]}"
                if (run, point.forward) in marks
                else None
                for run, point in zip(runs, told, strict=True)
            ]
        known = list(dict.fromkeys(word for word in words if word))
        number = {word: n for n, word in enumerate(known)}
        if known:
            cells.append((label, known, [number.get(word) if word else None for word in words]))
    most = {run: len(plan.run(run)) for run in "ab"}
    titles = [
        f"forward {n}" if plan.per == 1 else f"forwards {n} to {min(plan.forwards, n + plan.per) - 1}"
        for n in range(0, plan.forwards, plan.per)
    ]
    jumps = []
    for key, label, what in (("b", "Origin", "origin"), ("f", "Flip", "flip")):
        stops = [
            ("ab".index(run), at // plan.per) for (run, at), found in sorted(marks.items()) if found == what
        ]
        if stops:
            jumps.append(CursorJump(key, label, stops, same_row=True))
    events = [
        ("ab".index(run), column)
        for run in "ab"
        for column, points in plan.binned(run)
        if any(point.events for point in points)
    ]
    if events:
        jumps.append(CursorJump("e", "Next event", events, same_row=True))
    rows = [f"Run {run}, {count(n, 'forward')}" for run, n in most.items()]
    origin_at = next((each.stops[0] for each in jumps if each.key == "b"), (0, 0))
    start = origin_at[0] or 0, origin_at[1]
    return Drawing(timeline_svg(series), rows, Axis(titles), cells, jumps, (), start)


def _who(point: ForwardPoint) -> str:
    who = [f"{m.rows} {m.phase} of {named(m.request)}, from position {m.start}" for m in point.members]
    return "\n".join(who[:12]) + (f"\n{len(who) - 12} more" if len(who) > 12 else "")


def _all_paths(point: ForwardPoint) -> str:
    paths = [f"{full_path(use.path)} at {count(use.sites, 'site')}" for use in point.paths]
    return "\n".join(paths) or "not recorded"


def _written(point: ForwardPoint) -> str:
    return f"cache entries of {count(point.writes, 'position')}"


_TOLD: Final[Mapping[str, Callable[[ForwardPoint], str]]] = {
    "here": lambda point: "",
    "forward": lambda point: str(point.forward),
    "model": lambda point: "" if point.model == "target" else point.model,
    "rows M": lambda point: f"{point.rows:,}",
    "who": _who,
    "linear calls": lambda point: (
        "not recorded" if point.linear_path is None else full_path(point.linear_path)
    ),
    "all paths": _all_paths,
    "writes": _written,
    "events": lambda point: "\n".join(map(named, point.events[:12])),
}
