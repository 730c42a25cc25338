"""The timeline: both runs' forwards, one above the other, with who was in them, on which kernel path, and what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import sqrt
from typing import TYPE_CHECKING, Final, Literal

from ..document import Block, Item, Table, ViewSubject
from ..svg import (
    AREA,
    PATHS,
    REQUESTS,
    Axis,
    Canvas,
    CursorJump,
    CursorPlaces,
    Drawing,
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
from ..words import count, full_path, named, runs_of, short_path

if TYPE_CHECKING:
    from detdiff.compare.divergence import Divergence
    from detdiff.compare.series import ForwardPoint, Series, Threshold

_ROW: Final = 15
COLUMNS: Final = 240
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


What = Literal["origin", "flip"]
MARKED: Final[tuple[What, ...]] = ("origin", "flip")
BARS: Final = 84
"""The height of the bars of a lane, in pixels."""


@dataclass(frozen=True)
class TimelinePlan:
    """What both lanes share: the columns, the colours of requests, the rows of kernel paths."""

    series: Series
    limit: int

    def run(self, run: str) -> tuple[ForwardPoint, ...]:
        """The forwards of run ``a`` or ``b``."""
        return self.series.a if run == "a" else self.series.b

    @cached_property
    def forwards(self) -> int:
        """As many as the longer run has."""
        return max(1, len(self.series.a), len(self.series.b))

    @cached_property
    def per(self) -> int:
        """Forwards in a column."""
        return -(-self.forwards // self.limit)

    @cached_property
    def columns(self) -> int:
        """How many there are."""
        return -(-self.forwards // self.per)

    @cached_property
    def left(self) -> float:
        """Where columns begin; the names of rows end before it."""
        longest = max(text_width(words) for words in ("writes", *map(self.path, self.paths)))
        return float(round(min(longest + 20, AREA * self.limit * 0.3)))

    @cached_property
    def cell(self) -> float:
        """The width of a column."""
        return min(30.0, (AREA * self.limit - max(0.0, self.left - 60)) / self.columns)

    @cached_property
    def right(self) -> float:
        """Where columns end."""
        return self.left + self.cell * self.columns

    @cached_property
    def width(self) -> float:
        """The width of the whole picture."""
        return max(self.right, min(AREA * self.limit + 60, 640)) + 14

    @cached_property
    def paths(self) -> list[str]:
        """Linear paths of both runs, the most used first; all that find no row of their own are the last one."""
        used = Counter(
            point.linear_path for run in "ab" for point in self.run(run) if point.linear_path is not None
        )
        found = [path for path, _ in used.most_common()]
        return found if len(found) <= PATHS else [*found[: PATHS - 1], "other paths"]

    @cached_property
    def _tails(self) -> set[str]:
        """Last parts of path names that tell one path of the series only."""
        every = {point.linear_path or "" for run in "ab" for point in self.run(run)}
        for threshold in self.series.thresholds:
            every |= {*_path_parts(threshold.path_after), *_path_parts(threshold.path_before)}
        return {tail for tail, n in Counter(path.rpartition("/")[2] for path in every).items() if n == 1}

    def path(self, path: str) -> str:
        """A kernel path, as short as it can be said without confusion."""
        tail = path.rpartition("/")[2]
        return shortened(tail, 40) if tail in self._tails else full_path(path)

    def taken(self, threshold: Threshold) -> str:
        """Which paths lie on which side of a threshold."""
        after, before = (
            ", ".join(map(self.path, _path_parts(paths)))
            for paths in (threshold.path_after, threshold.path_before)
        )
        return f"{count(threshold.after, 'row')}: {after}, {threshold.before:,} and more: {before}"

    @cached_property
    def requests(self) -> list[str]:
        """Those of the series first, whose texts the report tells of."""
        ids = [request.id for request in self.series.requests]
        ids += [member.request for run in "ab" for point in self.run(run) for member in point.members]
        return list(dict.fromkeys(ids))

    @cached_property
    def classes(self) -> dict[str, str]:
        """The colour's class of each request."""
        return {id: f"r{n}" if n < REQUESTS else "rx" for n, id in enumerate(self.requests)}

    @cached_property
    def most(self) -> int:
        """The most rows of any forward."""
        return max((point.rows for run in "ab" for point in self.run(run)), default=1)

    @property
    def logarithmic(self) -> bool:
        """Whether one row beside the most would not be seen otherwise."""
        return self.most > 8

    def scale(self, bottom: float) -> LinearScale | Log:
        """From rows to pixels; no row is at ``bottom``."""
        top = bottom - BARS
        if self.logarithmic:
            return Log(0.5, float(self.most), bottom, top, bottom)
        return LinearScale(0, float(max(1, self.most)), bottom, top)

    def x(self, forward: int) -> float:
        """The middle of a forward's column."""
        return self.left + self.cell * (forward // self.per + 0.5)

    def binned(self, run: str) -> list[tuple[int, list[ForwardPoint]]]:
        """Columns of a run with their forwards."""
        points = self.run(run)
        return [
            (place // self.per, list(points[place : place + self.per]))
            for place in range(0, len(points), self.per)
        ]

    def marks_of(self, run: str, what: What) -> list[tuple[int, list[str]]]:
        """Forwards in which requests had their first origin or their flip, in order, with those requests."""
        side = "ab".index(run)
        found: dict[int, list[str]] = {}
        for request in self.series.requests:
            both = request.origin_forwards if what == "origin" else request.flip_forwards
            forward = None if both is None else both[side]
            if forward is not None:
                found.setdefault(forward, []).append(request.id)
        return sorted(found.items())

    @cached_property
    def marked(self) -> bool:
        """Whether any run has an origin or a flip."""
        return any(self.marks_of(run, what) for run in "ab" for what in MARKED)


def _path_parts(paths: str) -> list[str]:
    return paths[:200].split(", ")


def events(point: ForwardPoint, trims: bool) -> list[str]:
    """A forward's trims, or all other events."""
    return [event for event in point.events if event.startswith("trim ") == trims]


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
