"""The control ``ranks``: every operation of a model over several processes, each judged by what its process was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import RANKS
from detdiff.scenario import Capture, Scenario

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control

if TYPE_CHECKING:
    from ..facts import Facts
    from ..oracle import Operation
    from ..origins import Captured
    from ..roundings import Float64

ROWS: Final = 64
"""Rows that are judged at most, of all requests together."""
_LISTED: Final = 8
Place = tuple[str, int, int]
"""A request's id, a position, and the row in the captured trace."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What ``site`` gave in the rows of ``places``, float64 [rows, items], and what it should have given; ``owners`` [items] is the
    process that each item comes from, None where all have it."""

    site: str
    owners: NDArray[np.int64] | None
    operation: Operation
    output: Float64
    dtype: str
    places: Sequence[Place]


@dataclass(frozen=True, eq=False)
class RanksFigures(Figures):
    """``operations`` of ``processes`` that were judged in ``rows`` rows of ``run``, at worst ``worst`` of their bounds; the first that are
    outside, and which could not be judged, by the reason."""

    run: str
    processes: int
    rows: int
    operations: int
    worst: float | None
    outside_where: Sequence[Mapping[str, Any]]
    not_judged: Mapping[str, Sequence[str]]


class RunsProcesses(Protocol):
    """What an engine with the capability ``ranks`` has."""

    @property
    def size(self) -> int:
        """How many processes run the model."""

    def pieces(
        self, captured: Captured, places: Sequence[Place], scenario: Scenario
    ) -> Iterator[Piece | tuple[str, str]]:
        """Every operation of every process in execution order; a site and a reason where one cannot be judged."""


def _over_processes(facts: Facts) -> bool:
    runs = () if facts.divergence is None else (facts.divergence.a, facts.divergence.b)
    asked = [run.scenario.get("engine") for run in runs]
    return any(isinstance(each, Mapping) and each.get("processes", 1) != 1 for each in asked)


@control("ranks", after="repeat", asked_by=_over_processes)
def ranks(case: Case) -> Outcome:
    """Judge what each process computes from what it was given, with the weights of the whole model.

    Result ``inside``, ``outside``, or ``partly`` where an operation could not be judged. Costs one re-run of a side over processes.
    """
    sides: list[Side] = [side for side in "ab" if RANKS in case.engine(side).capabilities]
    if not sides:
        raise CannotRun("no side runs over several processes")
    found = [_judged(case, side) for side in sides]
    wrong = next((each for each in found if each.outside_where), None)
    figures = wrong or next((each for each in found if each.not_judged), found[0])
    result = "outside" if wrong else "partly" if figures.not_judged else "inside"
    if wrong is not None:
        return Outcome(result, str(wrong.outside_where[0]["said"]), wrong)
    said = " ".join(_said(each) for each in found)
    return Outcome(result, said, figures)


def _said(found: RanksFigures) -> str:
    text = (
        f"{found.operations} operations of {found.processes} processes in run {found.run}, judged in {found.rows} rows by what each was given "
        f"and the whole model's weights, are at most {found.worst:.3g} of their rounding bounds; additions and activations between them "
        "were not judged"
    )
    for why, sites in list(found.not_judged.items())[:2]:
        text += f"; nor were {', '.join(sites[:3])}{', ...' if len(sites) > 3 else ''}: {why}"
    return text


def _judged(case: Case, side: Side) -> RanksFigures:
    from ..oracle import judge
    from ..roundings import Arithmetic

    engine: Any = case.engine(side)
    captured, places = _captured(case, side)
    outside: list[dict[str, Any]] = []
    refused: dict[str, list[str]] = {}
    operations, worst = 0, 0.0
    for piece in engine.pieces(captured, places, case.scenario(side)):
        if not isinstance(piece, Piece):
            refused.setdefault(piece[1], []).append(piece[0])
            continue
        backend: Any = captured.trace.header["environment"].get("backend", "cpu")
        arithmetic = Arithmetic("native", piece.dtype, backend)
        judgement = judge(piece.operation, piece.output, arithmetic)
        operations += 1
        worst = max(worst, judgement.worst)
        if not judgement.inside:
            outside.append(_entry(side, piece, arithmetic, judgement))
    if not operations:
        raise CannotRun(f"no operation of run {side} could be judged: {'; '.join(refused) or 'it has none'}")
    finite = worst if np.isfinite(worst) else None
    return RanksFigures(side, engine.size, len(places), operations, finite, outside[:_LISTED], refused)


def _captured(case: Case, side: Side) -> tuple[Captured, list[Place]]:
    """A re-run that keeps all values of the first rows of every request, and those rows."""
    from ..origins import Captured

    scenario = case.scenario(side)
    each = max(ROWS // len(scenario.requests), 1)
    last = each - 1
    origins = [request.origin.position for request in case.divergence.requests if request.origin is not None]
    if origins and min(origins) > last:
        raise CannotRun(
            f"the first origin is at position {min(origins)}, beyond the {each} positions of a request whose values are kept"
        )
    capture = Capture(
        level="window",
        positions=(0, last),
        digest=scenario.capture.digest,
        memory_mb=scenario.capture.memory_mb,
    )
    captured = Captured(case.record(replace(scenario, capture=capture), side))
    places = [
        (id, position, row)
        for id in case.ids(side)
        for position in range(each)
        if (row := captured.row(str(id), position)) is not None
    ]
    return captured, places


def _entry(side: Side, piece: Piece, arithmetic: Any, judgement: Any) -> dict[str, Any]:
    bounded = piece.operation.bounded(arithmetic)
    shape = piece.output.shape
    errors, bound, exact = (each.reshape(shape) for each in (judgement.errors, bounded.bound, bounded.exact))
    wrong = ~(errors <= bound)
    row = int(np.flatnonzero(wrong.any(axis=1))[0])
    request, position, _ = piece.places[row]
    columns = np.flatnonzero(wrong[row])
    owners = piece.owners
    mine = [] if owners is None else np.unique(owners[columns]).tolist()
    whose = f" of process {', '.join(map(str, mine))}" if mine else " of every process"
    other = _share_of(piece, mine[0], bound, exact) if len(mine) == 1 else None
    instead = "" if other is None else f"; it is what the share of process {other} gives"
    size = (
        f"{judgement.worst:.3g} times its rounding bound"
        if np.isfinite(judgement.worst)
        else "beyond any bound"
    )
    return {
        "run": side,
        "site": piece.site,
        "ranks": mine,
        "request": request,
        "position": position,
        "worst": float(judgement.worst) if np.isfinite(judgement.worst) else None,
        "share_of": other,
        "said": (
            f"{piece.site}{whose}, position {position} of {request} in run {side}, is off float64 by {size} (elements {columns[0]} to "
            f"{columns[-1]}), given its own inputs and the whole model's weights{instead}"
        ),
    }


def _share_of(piece: Piece, rank: int, bound: Float64, exact: Float64) -> int | None:
    """The process whose share of the exact outputs the outputs of ``rank`` are."""
    owners = piece.owners
    if owners is None:
        return None
    mine = piece.output[:, owners == rank]
    for other in np.unique(owners).tolist():
        there = owners == other
        if (
            other != rank
            and there.sum() == mine.shape[1]
            and (np.abs(mine - exact[:, there]) <= bound[:, there]).all()
        ):
            return int(other)
    return None
