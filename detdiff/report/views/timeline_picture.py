"""The picture of a timeline: a lane of forwards for each run, with bars of rows, kernel paths and what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Final

from ..svg import (
    PATHS,
    REQUESTS,
    Canvas,
    CursorPlaces,
    LinearScale,
    Log,
    Symbol,
    coordinate,
    cross,
    diamond,
    fitted,
    hatched,
    mark,
    shortened,
    stroke,
    swatch,
    text_width,
    triangle,
)
from ..words import count, full_path, runs_of
from .timeline_plan import BARS, COLUMNS, MARKED, TimelinePlan, events

if TYPE_CHECKING:
    from detdiff.compare.series import Series

_ROW: Final = 15
_MARKS: Final = 30
_PHASES: Final = ("prefill", "decode", "draft", "verify")


def timeline_svg(series: Series, *, columns: int = COLUMNS, standalone: bool = False) -> str:
    """Both runs over the number of the forward; more than ``columns`` forwards share columns.

    Such a column shows its forward of the most rows, every kernel path that was taken, and whether anything was trimmed.
    """
    plan = TimelinePlan(series, columns)
    canvas = Canvas()
    title = "Timeline of the forwards of both runs"
    top = canvas.heading(title, plan.width, standalone)
    lanes = []
    for run in "ab":
        first = top + 20 + (_MARKS if plan.marked else 0)
        below = _lane(canvas, plan, run, top)
        lanes.append((first, below - first))
        top = below + 12
    _axis(canvas, plan, top - 12)
    height = canvas.legend(8, top + 24, plan.width - 16, _legend(plan)) + 6
    return canvas.svg(
        "dd-timeline",
        title,
        _said(plan),
        (plan.width, height),
        standalone,
        CursorPlaces(plan.left, plan.cell, lanes),
    )


def _lane(canvas: Canvas, plan: TimelinePlan, run: str, top: float) -> float:
    """One run; gives the y below it."""
    points = plan.run(run)
    most = max((point.rows for point in points), default=0)
    canvas.text(8, top + 13, f"run {run}", "dd-t dd-h2")
    canvas.text(60, top + 13, f"{count(len(points), 'forward')}, at most {count(most, 'row')}", "dd-t2")
    first = top + 20 + (_MARKS if plan.marked else 0)
    bottom = first + BARS
    scale = plan.scale(bottom)
    whole = [tick for tick in scale.ticks(4) if tick > 0 and tick == int(tick)]
    canvas.levels(scale, (plan.left, plan.right), whole)
    _bars(canvas, plan, run, scale, bottom)
    canvas.line(plan.left, bottom, plan.right, bottom, "dd-axis")
    below = _path_rows(canvas, plan, run, bottom + 4)
    below = _deeds(canvas, plan, run, below)
    _thresholds(canvas, plan, run, scale, first)
    _mark_lines(canvas, plan, run, first, below)
    return below


def _bars(canvas: Canvas, plan: TimelinePlan, run: str, scale: LinearScale | Log, bottom: float) -> None:
    shapes: dict[str, list[str]] = {}
    gap = 1.5 if plan.cell >= 6 else 0.0
    dense = " dd-dense" if plan.cell < 8 else ""
    for column, points in plan.binned(run):
        tallest = max(points, key=lambda point: point.rows)
        rows = max(tallest.rows, sum(member.rows for member in tallest.members))
        if rows <= 0:
            continue
        x, wide = plan.left + plan.cell * column + gap / 2, plan.cell - gap
        height, y = bottom - scale(tallest.rows), bottom
        for member in tallest.members:
            part = height * member.rows / rows
            y -= part
            box = (
                f"M{coordinate(x)} {coordinate(y)}h{coordinate(wide)}v{coordinate(part)}h{coordinate(-wide)}z"
            )
            shapes.setdefault(f"dd-{plan.classes[member.request]} dd-{member.phase}{dense}", []).append(box)
            if over := _over(member.phase, plan.classes[member.request]):
                shapes.setdefault(over, []).append(hatched(x, y, wide, part, 4))
        rest = y - (bottom - height)
        if rest > 0.5:
            box = f"M{coordinate(x)} {coordinate(y - rest)}h{coordinate(wide)}v{coordinate(rest)}h{coordinate(-wide)}z"
            shapes.setdefault("dd-padding", []).append(box)
    # What lies over a bar is painted after all bars.
    for cls in sorted(shapes, key=lambda cls: cls.startswith(("dd-drafted", "dd-verified"))):
        canvas.path("".join(shapes[cls]), cls)


def _over(phase: str, request: str) -> str:
    """The class of the diagonals over a bar; empty where a phase has none."""
    return {"draft": f"dd-drafted dd-{request}", "verify": "dd-verified"}.get(phase, "")


def _path_rows(canvas: Canvas, plan: TimelinePlan, run: str, top: float) -> float:
    """A row for each kernel path, filled where most linear sites took it."""
    columns = plan.binned(run)
    for place, path in enumerate(plan.paths):
        rest = place == PATHS - 1 and path == "other paths"
        known = plan.paths[:-1]
        taken = [
            column
            for column, points in columns
            if any(
                point.linear_path == path
                or (rest and point.linear_path is not None and point.linear_path not in known)
                for point in points
            )
        ]
        boxes = ""
        for first, last in runs_of(taken):
            length = last - first + 1
            boxes += (
                f"M{coordinate(plan.left + plan.cell * first)} {coordinate(top + 3)}h{coordinate(plan.cell * length)}"
                f"v9h{coordinate(-plan.cell * length)}z"
            )
        shown = fitted(plan.path(path), plan.left - 12)
        canvas.text(plan.left - 6, top + 12, shown, "dd-t", "end", full=full_path(path))
        canvas.line(plan.left, top + 7.5, plan.right, top + 7.5, "dd-grid")
        canvas.path(boxes, f"dd-p{place}")
        top += _ROW
    return top


def _deeds(canvas: Canvas, plan: TimelinePlan, run: str, top: float) -> float:
    """Rows for cache writes, trims and other events, each where there are any in either run."""
    every = [point for each in "ab" for point in plan.run(each)]
    most = max((point.writes for point in every), default=0)
    if most:
        scale = Log(0.5, float(max(1, most)), top + 13, top + 3, top + 13)
        bars = ""
        for column, points in plan.binned(run):
            if wrote := max(point.writes for point in points):
                x, wide = plan.left + plan.cell * column, plan.cell - (1 if plan.cell >= 6 else 0)
                bars += f"M{coordinate(x)} {coordinate(top + 13)}V{coordinate(scale(wrote))}h{coordinate(wide)}V{coordinate(top + 13)}z"
        canvas.text(plan.left - 6, top + 12, "writes", "dd-t", "end")
        canvas.path(bars, "dd-write")
        top += _ROW
    for words, cls, trims in (("trims", "dd-trim", True), ("events", "dd-event", False)):
        if not any(events(point, trims) for point in every):
            continue
        marks = ""
        for column, points in plan.binned(run):
            if any(events(point, trims) for point in points):
                x = plan.left + plan.cell * (column + 0.5)
                marks += triangle(x, top + 13, 5) if trims else cross(x, top + 8, 3.5)
        canvas.text(plan.left - 6, top + 12, words, "dd-t", "end")
        canvas.path(marks, cls)
        top += _ROW
    return top


def _thresholds(canvas: Canvas, plan: TimelinePlan, run: str, scale: LinearScale | Log, top: float) -> None:
    free = None
    for threshold in plan.series.thresholds:
        if threshold.run != run:
            continue
        after, before = threshold.after, threshold.before
        y = scale(sqrt(after * before) if plan.logarithmic else (after + before) / 2)
        canvas.line(plan.left, y, plan.right, y, "dd-threshold")
        full = plan.taken(threshold)
        beside = text_width(full) < plan.width - plan.right - 8
        at = y + 4 if beside else y - 4
        if free is not None:
            at = min(at, free - 14)
        if at <= top + 8:
            # No room above the line; below it only the first finds some.
            if free is not None:
                continue
            at = y + (4 if beside else 13)
        free = at
        if beside:
            canvas.text(plan.right + 6, at, full)
        else:
            words = fitted(full, plan.right - plan.left - 8)
            canvas.text(plan.right - 4, at, words, anchor="end", full=full, halo=True)


def _mark_lines(canvas: Canvas, plan: TimelinePlan, run: str, first: float, below: float) -> None:
    for what in MARKED:
        # The flip's mark is lower, so that origin and flip of one forward are both seen.
        y = first - (22 if what == "origin" else 6)
        found = plan.marks_of(run, what)
        for forward, _ in found:
            x = plan.x(forward)
            canvas.line(x, y, x, below, "dd-origin-line" if what == "origin" else "dd-flip")
            if what == "origin":
                canvas.path(diamond(x, y, 6), "dd-origin")
            else:
                canvas.path(triangle(x, y + 4, 6), "dd-flip-mark")
        free = 0.0
        for place, (forward, requests) in enumerate(found):
            x = plan.x(forward)
            end = plan.x(found[place + 1][0]) - 10 if place + 1 < len(found) else plan.width
            for words in _variants(plan, what, forward, requests):
                wide = text_width(words)
                if x + 10 + wide <= end:
                    canvas.text(x + 10, y + 4, words, halo=True)
                    free = x + 10 + wide
                elif free <= x - 10 - wide:
                    canvas.text(x - 10, y + 4, words, anchor="end", halo=True)
                    free = x + 10
                else:
                    continue
                break
            else:
                free = x + 10


def _variants(plan: TimelinePlan, what: str, forward: int, requests: list[str]) -> list[str]:
    """What to write beside a mark, the most telling first."""
    short = f"{what}, forward {forward:,}"
    if len(plan.series.requests) < 2:
        return [short, what]
    more = f" and {len(requests) - 2} more" if len(requests) > 2 else ""
    return [f"{short} ({', '.join(shortened(id, 16) for id in requests[:2])}{more})", short, what]


def _axis(canvas: Canvas, plan: TimelinePlan, y: float) -> None:
    scale = LinearScale(0, plan.forwards - 1, plan.x(0), plan.x(plan.forwards - 1))
    canvas.line(plan.left, y + 4, plan.right, y + 4, "dd-axis")
    canvas.axis(scale, (plan.left, plan.right), y + 4, 60, "forward")


def _legend(plan: TimelinePlan) -> list[tuple[Sequence[Symbol], str]]:
    items: list[tuple[Sequence[Symbol], str]] = []
    for id in plan.requests[:REQUESTS]:
        items.append(((swatch(f"dd-{plan.classes[id]}"),), shortened(id, 30)))
    if len(plan.requests) > REQUESTS:
        items.append(((swatch("dd-rx"),), f"{len(plan.requests) - REQUESTS:,} more"))
    every = [point for run in "ab" for point in plan.run(run)]
    phases = {member.phase for point in every for member in point.members}
    for phase in _PHASES:
        if phase in phases:
            items.append(((_phase(phase),), phase))
    if any(point.rows > sum(member.rows for member in point.members) for point in every):
        items.append(((swatch("dd-padding"),), "padding"))
    log = ", logarithmic, its parts in proportion" if plan.logarithmic else ""
    items.append(((), f"Height: rows M{log}."))
    if plan.series.thresholds:
        items.append(((stroke("dd-threshold"),), "the rows at which linear sites change their kernel path"))
    if plan.paths:
        colours = [swatch(f"dd-p{n}") for n in range(len(plan.paths))]
        items.append((colours, f"kernel path of most linear sites: {', '.join(map(full_path, plan.paths))}"))
    if any(events(point, True) for point in every):
        items.append(((mark(lambda x, y: triangle(x, y + 5, 5), "dd-trim"),), "cache trimmed"))
    if any(events(point, False) for point in every):
        items.append(((mark(lambda x, y: cross(x, y, 3.5), "dd-event"),), "another event"))
    if plan.per > 1:
        words = f"A column is {plan.per:,} forwards and shows the one of the most rows."
        items.append(((), words))
    return items


def _phase(phase: str) -> Symbol:
    def draw(canvas: Canvas, x: float, y: float) -> None:
        canvas.rect(x - 6, y - 6, 12, 12, f"dd-rx dd-{phase}")
        if over := _over(phase, "rx"):
            canvas.path(hatched(x - 6, y - 6, 12, 12, 4), over)

    return draw


def _said(plan: TimelinePlan) -> str:
    """The picture in words."""
    parts = []
    for run in "ab":
        points = plan.run(run)
        used = Counter(full_path(point.linear_path) for point in points if point.linear_path is not None)
        paths = ", ".join(f"{path} in {count(n, 'forward')}" for path, n in used.most_common(4))
        most = max((point.rows for point in points), default=0)
        trims = sum(len(events(point, True)) for point in points)
        sentence = f"Run {run}: {count(len(points), 'forward')}, at most {count(most, 'row')}"
        sentence += f"; linear sites on {paths}" if paths else ""
        sentence += f"; {count(trims, 'trim')}" if trims else ""
        for threshold in plan.series.thresholds:
            if threshold.run == run:
                sentence += f"; {plan.taken(threshold)}"
        for what in MARKED:
            for forward, requests in plan.marks_of(run, what)[:4]:
                sentence += f"; {what} of {', '.join(map(shortened, requests[:4]))} in forward {forward:,}"
        parts.append(sentence)
    return ". ".join(parts) + "."
