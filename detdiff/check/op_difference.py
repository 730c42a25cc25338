"""The first element in which a row's outputs differ, for each kind of difference that a probe found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from detdiff.compare.metrics import Values, ulp_distance
from detdiff.probe import Function, Probe
from detdiff.probe.operation import Operation
from detdiff.probe.sweep import Content, kept_rows
from detdiff_kernels.rounding import Float32

_FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class ElementDifference:
    """Output ``element`` of the row at ``position`` among ``rows``: ``found`` there, ``alone`` where it should be equal.

    ``kind`` is ``rows`` (against the row alone), ``position`` (against row 0, all rows alike) or ``neighbours`` (against the
    same row beside other content). ``ulp`` is None where a number is not finite or the dtypes differ. ``differing`` of
    ``outputs`` elements of that row differ.
    """

    kind: str
    seed: int
    rows: int
    position: int
    element: int
    alone: float
    found: float
    ulp: int | None
    differing: int
    outputs: int


def differences(target: Function, found: Probe) -> Iterator[ElementDifference]:
    """For each kind, at the smallest M and the first seed with which it was found, the first element.

    Nothing is given for a kind that does not come up again when it is run again.
    """
    changed = [each for each in found.against_one if not each.equal]
    if changed:
        yield from _again("rows", target, found, changed[0].seeds[0], changed[0].rows, 0)
    if found.position:
        first = found.position[0]
        yield from _again("position", target, found, first.seeds[0], first.rows, first.positions[0])
    if found.neighbours:
        first = found.neighbours[0]
        yield from _again("neighbours", target, found, first.seeds[0], first.rows, first.positions[0])


def _again(
    kind: str, target: Function, found: Probe, seed: int, rows: int, position: int
) -> Iterator[ElementDifference]:
    operation = target.operation(seed)
    content = Content.of_seed(seed, found.rows[-1], operation)
    for plain, other, at in _pairs(kind, operation, content, rows, position):
        a, b = (
            Values(values.data[place], values.dtype) for values, place in ((plain, at), (other, position))
        )
        if a.dtype != b.dtype:
            continue
        differing = a.bits() != b.bits()
        if differing.any():
            element = int(differing.argmax())
            x, y = float(a.numbers()[element]), float(b.numbers()[element])
            known = a.dtype in _FLOATS and np.isfinite(x) and np.isfinite(y)
            yield ElementDifference(
                kind=kind,
                seed=seed,
                rows=rows,
                position=position,
                element=element,
                alone=x,
                found=y,
                ulp=int(ulp_distance(a, b)[element]) if known else None,
                differing=int(differing.sum()),
                outputs=a.data.size,
            )
            return


def _pairs(
    kind: str, operation: Operation, content: Content, rows: int, position: int
) -> Iterator[tuple[Values, Values, int]]:
    """Two runs whose rows should be equal: at a place of the first, and at ``position`` of the second."""

    def run(x: Float32) -> Values:
        return operation.read(operation.run(operation.given(x)), len(x))

    given = content.rows[:rows]
    if kind == "rows":
        yield run(given[:1]), run(given), 0
        return
    alike = run(np.repeat(given[:1], rows, axis=0))
    if kind == "position":
        yield alike, alike, 0
        return
    plain = run(given)
    if position == 0:
        yield plain, alike, 0
    for kept in kept_rows(rows):
        if kept[position]:
            yield plain, run(np.where(kept[:, None], given, content.others[:rows])), position
