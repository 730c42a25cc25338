"""Both runs again as they are, once for all controls that need their paths, states and snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .case import Case, Side
from .control import CannotRun
from .deciding import place
from .rerun import Changes, Run, rerun
from .steer import Change, Doubted, PathChanges, Steer
from .target import FlipOf, Target, flip_of, origin_port, parting_of
from .watch import Row


@dataclass(frozen=True, eq=False)
class Baseline:
    """Run a as far as b goes, run b until the target is decided; ``changes`` are b's path changes up to there, and
    ``effective`` those that moved bits on b's own inputs, with their forwards."""

    a: Run
    b: Run
    target: Target
    flip: FlipOf | None
    changes: PathChanges
    effective: dict[Change, int]
    wanted: dict[tuple[str, str], Row]

    @property
    def forwards(self) -> int:
        return self.a.forwards + self.b.forwards


def baseline(case: Case) -> Baseline:
    """The baseline of a case, run when it is first asked for. Raises CannotRun where a re-run gives other tokens."""
    found = case.known.get("baseline")
    if not isinstance(found, Baseline):
        found = case.known["baseline"] = _baseline(case)
    return found


def _baseline(case: Case) -> Baseline:
    flip = flip_of(case)
    at = [_deciding(case, side) for side in "ab"]
    ports: tuple[dict[tuple[str, str], Row], ...] = (
        ({}, {}) if flip is not None else (origin_port(case, "a"), origin_port(case, "b"))
    )
    enough = None if flip is None or at[1] is None else _reached(case, at[1])
    a = rerun(case, "a", Changes(steering=Steer(), keep=True, at=at[0], wanted=ports[0], decided=enough))
    doubts = Doubted(a.watch.paths)
    decided = None if flip is None else lambda run: flip.happened(run) is not None
    b = rerun(case, "b", Changes(steering=doubts, keep=True, at=at[1], decided=decided, wanted=ports[1]))
    doubts.settle()
    if flip is not None and not flip.happened(b):
        raise CannotRun(f"{flip.said} did not happen when b was run again (see the control repeat)")
    target: Target = flip if flip is not None else parting_of(case, a, b)
    changes = PathChanges.between(a.watch.paths, b.watch.paths)
    effective = {change: n for change, n in doubts.effective.items() if change in changes.calls}
    return Baseline(a, b, target, flip, changes, effective, ports[1])


def _deciding(case: Case, side: Side) -> int | None:
    """The forward that a graft is put before, so that there is a snapshot."""
    try:
        return place(case, side).forward
    except CannotRun:
        return None


def _reached(case: Case, forward: int) -> Callable[[Run], bool]:
    """Whether a run of a has all rows that b had when ``forward`` was done."""
    index = case.b.row_index()
    needed: dict[int, int] = {}
    for number, request in enumerate(case.a.requests):
        if request["id"] not in case.ids("b"):
            continue
        mine = index.request == case.number("b", request["id"])
        last = index.position[mine & (index.forward <= forward)].max(initial=-1)
        # A row chooses the token after its own.
        needed[number] = int(last) + 2 - len(request["tokens"])
    return lambda run: all(len(run.tokens[number]) >= count for number, count in needed.items())
