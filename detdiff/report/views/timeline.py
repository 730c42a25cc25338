"""The timeline: both runs' forwards, one above the other, with who was in them, on which kernel path, and what was born."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import sqrt
from typing import TYPE_CHECKING, Final, Literal

from ..document import Block, Item, Report, Table
from ..svg import (
    AREA,
    PATHS,
    REQUESTS,
    Canvas,
    Linear,
    Log,
    Symbol,
    axis_label,
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
from ..words import count, named, runs_of, short_path

if TYPE_CHECKING:
    from detdiff.compare.divergence import Divergence
    from detdiff.compare.series import ForwardPoint, Series, Threshold

_ROW: Final = 15
_MARKS: Final = 30
_PHASES: Final = ("prefill", "decode", "draft", "verify")


def timeline_svg(series: Series, *, columns: int = 240, standalone: bool = False) -> str:
    """Both runs over the number of the forward; more than ``columns`` forwards share columns.

    Such a column shows its forward of the most rows, every kernel path that was taken, and whether anything was trimmed.
    """
    plan = Plan(series, columns)
    canvas, top = Canvas(), 4.0
    title = "Timeline of the forwards of both runs"
    if standalone:
        canvas.text(8, top + 16, fitted(title, plan.width - 16, 15), "dd-t dd-h")
        top += 28
    for run in "ab":
        top = _lane(canvas, plan, run, top) + 12
    _axis(canvas, plan, top - 12)
    height = canvas.legend(8, top + 24, plan.width - 16, _legend(plan)) + 6
    return canvas.svg("dd-timeline", title, _said(plan), (plan.width, height), standalone)


def _lane(canvas: Canvas, plan: Plan, run: str, top: float) -> float:
    """One run; gives the y below it."""
    points = plan.run(run)
    most = max((point.rows for point in points), default=0)
    canvas.text(8, top + 13, f"run {run}", "dd-t dd-h2")
    canvas.text(60, top + 13, f"{count(len(points), 'forward')}, at most {count(most, 'row')}", "dd-t2")
    first = top + 20 + (_MARKS if plan.marked else 0)
    bottom = first + BARS
    scale = plan.scale(bottom)
    for tick in scale.ticks(4):
        if tick > 0 and tick == int(tick):
            canvas.line(plan.left, scale(tick), plan.right, scale(tick), "dd-grid")
            canvas.text(plan.left - 6, scale(tick) + 4, axis_label(tick), "dd-t2", "end")
    _bars(canvas, plan, run, scale, bottom)
    canvas.line(plan.left, bottom, plan.right, bottom, "dd-axis")
    below = _path_rows(canvas, plan, run, bottom + 4)
    below = _deeds(canvas, plan, run, below)
    _thresholds(canvas, plan, run, scale, first)
    _moments(canvas, plan, run, first, below)
    return below


def _bars(canvas: Canvas, plan: Plan, run: str, scale: Linear | Log, bottom: float) -> None:
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


def _path_rows(canvas: Canvas, plan: Plan, run: str, top: float) -> float:
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


def _deeds(canvas: Canvas, plan: Plan, run: str, top: float) -> float:
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


def _thresholds(canvas: Canvas, plan: Plan, run: str, scale: Linear | Log, top: float) -> None:
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


def _moments(canvas: Canvas, plan: Plan, run: str, first: float, below: float) -> None:
    for what in MOMENTS:
        # The flip's mark is lower, so that birth and flip of one forward are both seen.
        y = first - (22 if what == "birth" else 6)
        found = plan.moments(run, what)
        for forward, _ in found:
            x = plan.x(forward)
            canvas.line(x, y, x, below, "dd-birth" if what == "birth" else "dd-flip")
            if what == "birth":
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


def _variants(plan: Plan, what: str, forward: int, requests: list[str]) -> list[str]:
    """What to write beside a mark, the most telling first."""
    short = f"{what}, forward {forward:,}"
    if len(plan.series.requests) < 2:
        return [short, what]
    more = f" and {len(requests) - 2} more" if len(requests) > 2 else ""
    return [f"{short} ({', '.join(shortened(id, 16) for id in requests[:2])}{more})", short, what]


def _axis(canvas: Canvas, plan: Plan, y: float) -> None:
    scale = Linear(0, plan.forwards - 1, plan.x(0), plan.x(plan.forwards - 1))
    canvas.line(plan.left, y + 4, plan.right, y + 4, "dd-axis")
    for forward in scale.whole_ticks(max(1, int((plan.right - plan.left) / 60))):
        canvas.line(plan.x(forward), y + 4, plan.x(forward), y + 8, "dd-axis")
        canvas.text(plan.x(forward), y + 20, f"{forward:,}", "dd-t2", "middle")
    canvas.text(plan.left, y + 34, "forward", "dd-t2")


def _legend(plan: Plan) -> list[tuple[Sequence[Symbol], str]]:
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


def _said(plan: Plan) -> str:
    """The picture in words."""
    parts = []
    for run in "ab":
        points = plan.run(run)
        used = Counter(full_path(point.linear_path) for point in points if point.linear_path is not None)
        paths = ", ".join(f"{path} in {count(n, 'forward')}" for path, n in used.most_common(4))
        most = max((point.rows for point in points), default=0)
        trims = sum(len(events(point, True)) for point in points)
        said = f"Run {run}: {count(len(points), 'forward')}, at most {count(most, 'row')}"
        said += f"; linear sites on {paths}" if paths else ""
        said += f"; {count(trims, 'trim')}" if trims else ""
        for threshold in plan.series.thresholds:
            if threshold.run == run:
                said += f"; {plan.taken(threshold)}"
        for what in MOMENTS:
            for forward, requests in plan.moments(run, what)[:4]:
                said += f"; {what} of {', '.join(map(shortened, requests[:4]))} in forward {forward:,}"
        parts.append(said)
    return ". ".join(parts) + "."


What = Literal["birth", "flip"]
MOMENTS: Final[tuple[What, ...]] = ("birth", "flip")
BARS: Final = 84
"""The height of the bars of a lane, in pixels."""


@dataclass(frozen=True)
class Plan:
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

    def scale(self, bottom: float) -> Linear | Log:
        """From rows to pixels; no row is at ``bottom``."""
        top = bottom - BARS
        if self.logarithmic:
            return Log(0.5, float(self.most), bottom, top, bottom)
        return Linear(0, float(max(1, self.most)), bottom, top)

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

    def moments(self, run: str, what: What) -> list[tuple[int, list[str]]]:
        """Forwards in which requests had their first birth or their flip, in order, with those requests."""
        side = "ab".index(run)
        found: dict[int, list[str]] = {}
        for request in self.series.requests:
            both = request.birth_forwards if what == "birth" else request.flip_forwards
            forward = None if both is None else both[side]
            if forward is not None:
                found.setdefault(forward, []).append(request.id)
        return sorted(found.items())

    @cached_property
    def marked(self) -> bool:
        """Whether any run has a birth or a flip."""
        return any(self.moments(run, what) for run in "ab" for what in MOMENTS)


def _path_parts(paths: str) -> list[str]:
    return paths[:200].split(", ")


def full_path(path: str) -> str:
    """A kernel path as reports say it, cut where it is long."""
    return short_path(path if len(path) <= 60 else f"{path[:30]}…{path[-30:]}")


def events(point: ForwardPoint, trims: bool) -> list[str]:
    """A forward's trims, or all other events."""
    return [said for said in point.events if said.startswith("trim ") == trims]


def timeline_table(series: Series, most: int) -> Table:
    headers = ("run", "forwards", "model", "rows", "who", "linear path", "writes", "events")
    rows = [row for run, points in (("a", series.a), ("b", series.b)) for row in _stretches(run, points)]
    caption = "Forwards, those alike in one line"
    if len(rows) > most:
        caption += f"; the first {most} of {len(rows):,} lines"
    return Table(headers, tuple(rows[:most]), caption=caption)


def _stretches(run: str, points: Sequence[ForwardPoint]) -> Iterator[tuple[str, ...]]:
    for (model, rows, who, path, _), group in groupby(points, key=_alike):
        alike = list(group)
        first, last = alike[0].forward, alike[-1].forward
        events = "; ".join(named(event) for event in alike[0].events[:3]) or "-"
        more = len(alike[0].events) - 3
        yield (
            run,
            str(first) if first == last else f"{first}–{last}",
            model,
            f"{rows:,}",
            who,
            short_path(path),
            f"{sum(point.writes for point in alike):,}",
            events if more <= 0 else f"{events}; and {more} more",
        )


def _alike(point: ForwardPoint) -> tuple[str, int, str, str | None, tuple[str, ...]]:
    who = " + ".join(f"{m.rows:,} {m.phase} of {named(m.request)}" for m in point.members[:6])
    if len(point.members) > 6:
        who += f" + {len(point.members) - 6} more"
    return point.model, point.rows, who, point.linear_path, point.events


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
            f"linear calls of at most {count(threshold.after, 'row')} took {_joined_paths(threshold.path_after)}, of "
            f"{threshold.before:,} and more {_joined_paths(threshold.path_before)}",
        )


def _joined_paths(joined: str) -> str:
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
