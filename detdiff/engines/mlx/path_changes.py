"""Takes the calls of a re-run onto other kernel paths: one path for every number of rows, or another run's for some.

A path change is a call of b (forward and site) in which a row takes another path than it took in a. Three runs are known:
a, b, and b with every change held. In b and in the held run each change is computed both ways on the same inputs, so it is
known which of them move a bit there. A trial follows the held run until its first allowed change that moves a bit, and b
as long as every held change moves none: it starts at the later of the two, and where it never leaves a known run its
answer is known without a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx

from detdiff.engines.mlx.taps.forward import Forward, PathOverride
from detdiff.engines.mlx.taps.kernel_plan import (
    NATIVE,
    ROW_BY_ROW,
    CallSite,
    KernelPath,
    RowComputation,
    Span,
)
from detdiff.engines.mlx.taps.sites import SiteMap
from detdiff.explain.case import Side
from detdiff.explain.control import CannotRun
from detdiff.explain.deciding import deciding_row
from detdiff_kernels import Call

from .rerun_findings import FlipOf, RerunTarget, divergence_of, flip_of, origin_port
from .reruns import Rerun, RerunChanges, Reruns, Row, TakenPaths, rerun, rows_of

Spans = tuple[Span, ...]


class RowOverride(PathOverride):
    """Knows which row of the forward each row of a call is."""

    def __init__(self) -> None:
        self.rows: list[Row | None] = []
        self.forward: Forward | None = None

    def begin(self, sites: SiteMap, forward: Forward) -> None:
        self.forward, self.rows = forward, rows_of(forward)

    def rows_at(self, place: CallSite, call: Call) -> list[Row | None]:
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


class SingleRowPaths(PathOverride):
    """Every call on the path that a single row takes, whatever the number of rows."""

    single_scans = True

    def __init__(self, plan: Callable[[CallSite, Call], Spans]) -> None:
        """``plan`` is what the kernel plan says of a call."""
        self._plan = plan

    def spans(self, place: CallSite, call: Call, planned: Spans) -> Spans:
        if call.op == "attention":
            return (Span(0, call.rows, KernelPath(ROW_BY_ROW, "held: every row as a call of its own")),)
        path = self._plan(place, replace(call, rows=1, second_last=1, sorted=False))[0].path
        if path.kernel is None and path.name == NATIVE:
            path = KernelPath("forced/rows", "held: every row as a call of its own")
        return (Span(0, call.rows, replace(path, rows=None if path.kernel is None else 1, asked=False)),)


class PathChange(NamedTuple):
    """One call of run B that took another path than run A's for some of its rows: a candidate of minimal_change."""

    forward: int
    site: str


@dataclass
class PathChanges:
    """All path changes between two runs: by call of B its rows, and by row and site what A did there."""

    calls: dict[PathChange, list[Row]] = field(default_factory=dict)
    held: dict[tuple[str, Row], tuple[PathChange, KernelPath]] = field(default_factory=dict)
    made: dict[PathChange, tuple[RowComputation, RowComputation]] = field(default_factory=dict)

    @classmethod
    def between(cls, a: TakenPaths, b: TakenPaths) -> PathChanges:
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
                change = PathChange(forward, site)
                found.calls.setdefault(change, []).append(row)
                found.held[site, row] = change, theirs.path_again()
                found.made.setdefault(change, (theirs, mine))
        return found


Kept = tuple[PathChange, KernelPath]


class TwoWays(RowOverride):
    """Computes path changes both ways on the same inputs.

    ``effective`` holds, by change, the first forward in which the two ways differed in bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.effective: dict[PathChange, int] = {}
        self._others: Spans = ()
        self._asked: frozenset[PathChange] = frozenset()
        self._open: list[tuple[frozenset[PathChange], int, mx.array]] = []

    def begin(self, sites: SiteMap, forward: Forward) -> None:
        self.settle()
        super().begin(sites, forward)

    def others(self, place: CallSite, call: Call, planned: Spans) -> Spans:
        return self._others

    def compare(self, place: CallSite, taken: mx.array, other: mx.array) -> None:
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


class BesidePathsOfA(TwoWays):
    """The plan's own paths, each call also computed on the paths that run A took for its rows."""

    def __init__(self, a: TakenPaths) -> None:
        super().__init__()
        self._a = a

    def spans(self, place: CallSite, call: Call, planned: Spans) -> Spans:
        assert self.forward is not None
        rows = self.rows_at(place, call)
        change = PathChange(self.forward.index, place.site)
        own = planned[0].path
        here = RowComputation(own, 0 if call.op in ("attention", "switch") else call.rows)
        known: dict[Row, Kept] = {}
        for row in set(rows) - {None}:
            assert row is not None
            made = self._a.of(place.site, row)
            if made is not None and (len(planned) > 1 or not _alike(made, here)):
                known[row] = change, made.path_again()
        self.has_others = bool(known)
        if known:
            self._asked = frozenset({change})
            self._others = _spans(rows, known, planned, call, lambda _: True)
        return planned


def _alike(a: RowComputation, b: RowComputation) -> bool:
    """Without the orders of kernels, which are not known before a call: the number of rows stands for them."""
    if a.path.kernel is not None and a.path.name == b.path.name:
        return a.path.arguments == b.path.arguments and a.rows == b.rows
    return a.same_as(b)


class AllowedChanges(TwoWays):
    """Run A's paths for every row of a path change, but for the changes that are ``allowed``, which stay B's.

    With ``both_ways``, each change is also computed the other way.
    """

    def __init__(
        self, changes: PathChanges, allowed: Collection[PathChange], *, both_ways: bool = False
    ) -> None:
        super().__init__()
        self._changes, self._allowed, self._both_ways = changes, frozenset(allowed), both_ways

    def spans(self, place: CallSite, call: Call, planned: Spans) -> Spans:
        rows = self.rows_at(place, call)
        found = {row: self._changes.held.get((place.site, row)) for row in set(rows) if row is not None}
        known = {row: each for row, each in found.items() if each is not None}
        self.has_others = self._both_ways and bool(known)
        if not known:
            return planned
        if self.has_others:
            self._asked = frozenset(change for change, _ in known.values())
            self._others = _spans(rows, known, planned, call, lambda change: change in self._allowed)
        return _spans(rows, known, planned, call, lambda change: change not in self._allowed)


def _spans(
    rows: list[Row | None],
    known: Mapping[Row, tuple[PathChange, KernelPath]],
    planned: Spans,
    call: Call,
    holds: Callable[[PathChange], bool],
) -> Spans:
    """The rows of a call as spans: A's path where a change is held, else the planned one as of the whole call."""
    paths: list[KernelPath | None] = []
    for row in rows:
        found = known.get(row) if row is not None else None
        paths.append(found[1] if found is not None and holds(found[0]) else None)
    if not any(paths):
        return planned
    natural: list[KernelPath] = []
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


@dataclass(frozen=True, eq=False)
class Baseline:
    """Run a as far as b goes, run b until the target is decided; ``changes`` are b's path changes up to there, and
    ``effective`` those that moved bits on b's own inputs, with their forwards."""

    a: Rerun
    b: Rerun
    target: RerunTarget
    flip: FlipOf | None
    changes: PathChanges
    effective: dict[PathChange, int]
    wanted: dict[tuple[str, str], Row]

    @property
    def forwards(self) -> int:
        return self.a.forwards + self.b.forwards


def baseline(runs: Reruns) -> Baseline:
    """The baseline of a case, run when it is first asked for. Raises CannotRun where a re-run gives other tokens."""
    found = runs.case.known.get("baseline")
    if not isinstance(found, Baseline):
        found = runs.case.known["baseline"] = _baseline(runs)
    return found


def _baseline(runs: Reruns) -> Baseline:
    flip = flip_of(runs)
    at = [_deciding(runs, side) for side in "ab"]
    ports: tuple[dict[tuple[str, str], Row], ...] = (
        ({}, {}) if flip is not None else (origin_port(runs, "a"), origin_port(runs, "b"))
    )
    enough = None if flip is None or at[1] is None else _reached(runs, at[1])
    a = rerun(
        runs, "a", RerunChanges(override=RowOverride(), keep=True, at=at[0], wanted=ports[0], decided=enough)
    )
    beside = BesidePathsOfA(a.watch.paths)
    decided = None if flip is None else lambda run: flip.happened(run) is not None
    b = rerun(runs, "b", RerunChanges(override=beside, keep=True, at=at[1], decided=decided, wanted=ports[1]))
    beside.settle()
    if flip is not None and not flip.happened(b):
        raise CannotRun(f"{flip.sentence} did not happen when b was run again (see the control repeat)")
    target: RerunTarget = flip if flip is not None else divergence_of(runs, a, b)
    changes = PathChanges.between(a.watch.paths, b.watch.paths)
    effective = {change: n for change, n in beside.effective.items() if change in changes.calls}
    return Baseline(a, b, target, flip, changes, effective, ports[1])


def _deciding(runs: Reruns, side: Side) -> int | None:
    """The forward that a patch is put before, so that there is a snapshot."""
    try:
        return deciding_row(runs.case, side).forward
    except CannotRun:
        return None


def _reached(runs: Reruns, forward: int) -> Callable[[Rerun], bool]:
    """Whether a run of a has all rows that b had when ``forward`` was done."""
    index = runs.case.b.row_index()
    needed: dict[int, int] = {}
    for number, request in enumerate(runs.case.a.requests):
        if request["id"] not in runs.case.ids("b"):
            continue
        mine = index.request == runs.case.number("b", request["id"])
        last = index.position[mine & (index.forward <= forward)].max(initial=-1)
        # A row chooses the token after its own.
        needed[number] = int(last) + 2 - len(request["tokens"])
    return lambda run: all(len(run.tokens[number]) >= count for number, count in needed.items())


NEVER = 1 << 60


@dataclass
class _KnownRun:
    """A run that a trial may fall together with: which changes move bits on its inputs, and how it ended."""

    run: Rerun
    effective: dict[PathChange, int]
    happened: bool

    def leaves(self, changes: Collection[PathChange], from_: int = 0) -> int:
        """The first forward, from one on, in which one of these changes would leave this run."""
        found = (n for change, n in self.effective.items() if n >= from_ and change in changes)
        return min(found, default=NEVER)


class MinimalChangeTrials:
    """What the control ``minimal_change`` asks; see its protocol there. ``asked`` counts trials whose answer was known
    without a forward too. Where no path change moves a bit in b, nothing is held and there is nothing to try."""

    def __init__(self, runs: Reruns) -> None:
        self.runs, self.base = runs, baseline(runs)
        self.target = self.base.target.sentence
        self.candidates = len(self.base.changes.calls)
        self.effective = sorted(self.base.effective)
        self.baseline_forwards = self.base.forwards
        self.asked = self.run = self.forwards = self.held_forwards = 0
        self.remains = False
        self.answers: dict[frozenset[PathChange], bool] = {}
        self.natural = _KnownRun(self.base.b, self.base.effective, True)
        if self.effective:
            self.held = self._hold()
            self.held_forwards, self.remains = self.held.run.forwards, self.held.happened

    def _hold(self) -> _KnownRun:
        base = self.base
        beside = AllowedChanges(base.changes, (), both_ways=True)
        first = base.b.snapshots.before(min(base.effective.values()))
        held = rerun(
            self.runs,
            "b",
            RerunChanges(
                override=beside,
                keep=True,
                decided=lambda run: base.target.happened(run) is not None,
                start=None if first is None else (base.b, first[1]),
                wanted=base.wanted,
            ),
        )
        beside.settle()
        return _KnownRun(held, beside.effective, bool(base.target.happened(held)))

    def happens(self, allowed: Sequence[PathChange]) -> bool:
        """Whether the target still happens where only these changes are left as b has them."""
        key = frozenset(allowed)
        if key not in self.answers:
            self.asked += 1
            self.answers[key] = self._answer(key)
        return self.answers[key]

    def _answer(self, allowed: frozenset[PathChange]) -> bool:
        kept = frozenset(self.base.changes.calls) - allowed
        leaves_held, leaves_natural = self.held.leaves(allowed), self.natural.leaves(kept)
        if NEVER in (leaves_held, leaves_natural):
            return (self.held if leaves_held == NEVER else self.natural).happened
        known = self.held if leaves_held >= leaves_natural else self.natural
        start = known.run.snapshots.before(max(leaves_held, leaves_natural))
        answer: list[bool] = []

        def decided(run: Rerun) -> bool:
            happened = self.base.target.happened(run)
            if happened is None:
                for each, others in ((self.held, allowed), (self.natural, kept)):
                    if _together(run, each.run) and each.leaves(others, run.last) == NEVER:
                        happened = each.happened
            if happened is not None:
                answer[:] = [happened]
            return happened is not None

        trial = rerun(
            self.runs,
            "b",
            RerunChanges(
                override=AllowedChanges(self.base.changes, allowed),
                decided=decided,
                start=None if start is None else (known.run, start[1]),
                wanted=self.base.wanted,
            ),
        )
        self.run += 1
        self.forwards += trial.forwards
        return answer[0] if answer else bool(self.base.target.happened(trial))

    def entry(self, change: PathChange) -> dict[str, Any]:
        """A change as JSON values."""
        base = self.base
        made_a, made_b = base.changes.made[change]
        rows = base.changes.calls[change]
        ids = self.runs.case.ids("b")
        return {
            "forward": change.forward,
            "site": change.site,
            "path_a": made_a.path.name,
            "path_b": made_b.path.name,
            "rule_a": made_a.path.rule,
            "rule_b": made_b.path.rule,
            "rows_a": made_a.rows or None,
            "rows_b": made_b.rows or None,
            "rows": [
                {"request": ids[row.request], "position": row.position, "model": row.model}
                for row in sorted(rows)[:8]
            ],
            "row_count": len(rows),
        }


def _together(run: Rerun, known: Rerun) -> bool:
    """Whether the caches of both are bit-equal now, after equal forwards."""
    n = run.last
    return 0 < n <= known.last and run.watch.chain[n - 1] == known.watch.chain[n - 1]
