"""What both lanes of a timeline share: its columns, the colours of requests, the rows of kernel paths, the marks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

from ..svg import (
    AREA,
    PATHS,
    REQUESTS,
    LinearScale,
    Log,
    shortened,
    text_width,
)
from ..words import count, full_path

if TYPE_CHECKING:
    from detdiff.compare.series import ForwardPoint, Series, Threshold

COLUMNS: Final = 240


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
            every |= {*path_parts(threshold.path_after), *path_parts(threshold.path_before)}
        return {tail for tail, n in Counter(path.rpartition("/")[2] for path in every).items() if n == 1}

    def path(self, path: str) -> str:
        """A kernel path, as short as it can be said without confusion."""
        tail = path.rpartition("/")[2]
        return shortened(tail, 40) if tail in self._tails else full_path(path)

    def taken(self, threshold: Threshold) -> str:
        """Which paths lie on which side of a threshold."""
        after, before = (
            ", ".join(map(self.path, path_parts(paths)))
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


def path_parts(paths: str) -> list[str]:
    return paths[:200].split(", ")


def events(point: ForwardPoint, trims: bool) -> list[str]:
    """A forward's trims, or all other events."""
    return [event for event in point.events if event.startswith("trim ") == trims]
