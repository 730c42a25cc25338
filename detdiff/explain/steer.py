"""Takes the calls of a re-run onto other kernel paths: another run's, or one path for every number of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from detdiff.engines.mlx.instrument.attention import ROW_BY_ROW
from detdiff.engines.mlx.instrument.forward import Forward
from detdiff.engines.mlx.instrument.paths import NATIVE, Made, Path, Span
from detdiff.engines.mlx.instrument.paths import Place as Where
from detdiff.engines.mlx.instrument.sites import SiteMap
from detdiff_kernels import Call

from .watch import Paths, Row, rows_of

Spans = tuple[Span, ...]


class Steer:
    """Follows the plan; on its own it only makes a session say how every path was made."""

    doubts = False

    def __init__(self) -> None:
        self.rows: list[Row | None] = []
        self.forward: Forward | None = None

    def begin(self, sites: SiteMap, forward: Forward) -> None:
        self.forward, self.rows = forward, rows_of(forward)

    def spans(self, place: Where, call: Call, planned: Spans) -> Spans:
        return planned

    def others(self, place: Where, call: Call, planned: Spans) -> Spans:
        return planned

    def compare(self, place: Where, taken: mx.array, other: mx.array) -> None: ...

    def rows_at(self, place: Where, call: Call) -> list[Row | None]:
        """The forward's row behind each flat row of a call; empty where that cannot be told."""
        forward = self.forward
        assert forward is not None
        if place.columns is not None:
            return [self.rows[column] for column in place.columns]
        count, rows = call.rows * call.batch, self.rows
        if place.op == "head" and forward.selected is not None:
            rows = [rows[column] for column in forward.selected]
        several, rest = divmod(count, len(rows))
        return [] if rest else [row for row in rows for _ in range(several)]


class Held(Steer):
    """Every call on the path that a single row takes, whatever the number of rows."""

    def __init__(self, plan: Callable[[Where, Call], Spans]) -> None:
        """``plan`` is what the kernel plan says of a call."""
        super().__init__()
        self._plan = plan

    def spans(self, place: Where, call: Call, planned: Spans) -> Spans:
        if call.op == "attention":
            if call.rows * call.batch == 1:
                return planned
            return (Span(0, call.rows, Path(ROW_BY_ROW, "held: every row as a call of its own")),)
        path = self._plan(place, replace(call, rows=1, second_last=1, sorted=False))[0].path
        if path.kernel is None and path.name == NATIVE:
            path = Path("forced/rows", "held: every row as a call of its own")
        return (Span(0, call.rows, replace(path, rows=None if path.kernel is None else 1, asked=False)),)


class Change(NamedTuple):
    """One call of run B that took another path than run A's for some of its rows: a candidate of relaxing."""

    forward: int
    site: str


@dataclass
class PathChanges:
    """All path changes between two runs: by call of B its rows, and by row and site what A did there."""

    calls: dict[Change, list[Row]] = field(default_factory=dict)
    held: dict[tuple[str, Row], tuple[Change, Path]] = field(default_factory=dict)
    made: dict[Change, tuple[Made, Made]] = field(default_factory=dict)

    @classmethod
    def between(cls, a: Paths, b: Paths) -> PathChanges:
        """Rows are matched by model, request and position; what only one run has is no candidate."""
        found = cls()
        for row, (forward, flat) in b.places.items():
            if row not in a.places:
                continue
            for site, runs in b.forwards.get(forward, {}).items():
                mine = next((made for run, made in runs if flat in run), None)
                theirs = a.of(site, row)
                if mine is None or theirs is None or mine.same_as(theirs):
                    continue
                change = Change(forward, site)
                found.calls.setdefault(change, []).append(row)
                found.held[site, row] = change, theirs.path_again()
                found.made.setdefault(change, (theirs, mine))
        return found


Kept = tuple[Change, Path]


class Doubting(Steer):
    """Computes path changes both ways on the same inputs.

    ``effective`` holds, by change, the first forward in which the two ways differed in bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.effective: dict[Change, int] = {}
        self._others: Spans = ()
        self._asked: frozenset[Change] = frozenset()
        self._open: list[tuple[frozenset[Change], int, mx.array]] = []

    def begin(self, sites: SiteMap, forward: Forward) -> None:
        self.settle()
        super().begin(sites, forward)

    def others(self, place: Where, call: Call, planned: Spans) -> Spans:
        return self._others

    def compare(self, place: Where, taken: mx.array, other: mx.array) -> None:
        assert self.forward is not None
        bits = mx.uint32 if taken.itemsize == 4 else mx.uint16
        alike = taken.dtype == other.dtype
        same = mx.array_equal(taken.view(bits), other.view(bits)) if alike else mx.array(False)
        self._open.append((self._asked, self.forward.index, same))

    def settle(self) -> None:
        """Read what was compared so far."""
        mx.eval([same for _, _, same in self._open])
        for changes, forward, same in self._open:
            if not same.item():
                for change in changes:
                    self.effective.setdefault(change, forward)
        self._open.clear()


class Doubted(Doubting):
    """The plan's own paths, each call also computed on the paths that run A took for its rows."""

    def __init__(self, a: Paths) -> None:
        super().__init__()
        self._a = a

    def spans(self, place: Where, call: Call, planned: Spans) -> Spans:
        assert self.forward is not None
        rows = self.rows_at(place, call)
        change = Change(self.forward.index, place.site)
        own = planned[0].path
        here = Made(own, 0 if call.op in ("attention", "switch") else call.rows)
        known: dict[Row, Kept] = {}
        for row in set(rows) - {None}:
            assert row is not None
            made = self._a.of(place.site, row)
            if made is not None and (len(planned) > 1 or not _alike(made, here)):
                known[row] = change, made.path_again()
        self.doubts = bool(known)
        if known:
            self._asked = frozenset({change})
            self._others = _spans(rows, known, planned, call, lambda _: True)
        return planned


def _alike(a: Made, b: Made) -> bool:
    """Without the orders of kernels, which are not known before a call: the number of rows stands for them."""
    if a.path.kernel is not None and a.path.name == b.path.name:
        return a.path.arguments == b.path.arguments and a.rows == b.rows
    return a.same_as(b)


class Relaxed(Doubting):
    """Run A's paths for every row of a path change, but for the changes that are ``relaxed``, which stay B's.

    With ``doubting``, each change is also computed the other way.
    """

    def __init__(self, changes: PathChanges, relaxed: Collection[Change], *, doubting: bool = False) -> None:
        super().__init__()
        self._changes, self._relaxed, self._doubting = changes, frozenset(relaxed), doubting

    def spans(self, place: Where, call: Call, planned: Spans) -> Spans:
        rows = self.rows_at(place, call)
        found = {row: self._changes.held.get((place.site, row)) for row in set(rows) if row is not None}
        known = {row: each for row, each in found.items() if each is not None}
        self.doubts = self._doubting and bool(known)
        if not known:
            return planned
        if self.doubts:
            self._asked = frozenset(change for change, _ in known.values())
            self._others = _spans(rows, known, planned, call, lambda change: change in self._relaxed)
        return _spans(rows, known, planned, call, lambda change: change not in self._relaxed)


def _spans(
    rows: list[Row | None],
    known: Mapping[Row, tuple[Change, Path]],
    planned: Spans,
    call: Call,
    holds: Callable[[Change], bool],
) -> Spans:
    """The rows of a call as spans: A's path where a change is held, else the planned one as of the whole call."""
    paths: list[Path | None] = []
    for row in rows:
        found = known.get(row) if row is not None else None
        paths.append(found[1] if found is not None and holds(found[0]) else None)
    if not any(paths):
        return planned
    natural: list[Path] = []
    for first, last, path in planned:
        rows_then = path.rows or (call.rows if len(planned) == 1 else last - first)
        natural += [replace(path, rows=None if call.op == "attention" else rows_then, asked=False)] * (
            last - first
        )
    natural *= len(rows) // len(natural)
    chosen = [path or own for path, own in zip(paths, natural, strict=True)]
    spans: list[Span] = []
    start = 0
    for path, same in groupby(chosen):
        end = start + len(list(same))
        spans.append(Span(start, end, path))
        start = end
    return tuple(spans)
