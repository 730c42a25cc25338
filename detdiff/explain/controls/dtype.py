"""The control ``dtype``: the same two runs in another precision. Rounding scales with it, a bug does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import DTYPE, VALUES, Overrides
from detdiff.scenario import Capture

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control
from ..deciding import deciding_row
from ..facts import Facts

OTHER: Final = "float32"
NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNIT: Final = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoffs: half the distance from 1 to the next number."""
SHRUNK: Final = 2.0**-6
"""Sums that are kept in float32 and rounded once differ in some elements only, so less than the ratio of the unit
roundoffs has to do."""
FINE: Final = 2.0**-18
"""What some float32 roundings on the way make of logits; there is nothing to shrink."""
COARSE: Final = 2.0**-10
"""Kernels that round operands to 11 bits give differences below this in float32 too."""


@dataclass(frozen=True, eq=False)
class DtypeFigures(Figures):
    """The relative difference at ``site`` and ``position`` in the model's own ``dtype`` and in the ``other`` one."""

    dtype: str
    other: str
    difference: float
    difference_other: float
    expected_ratio: float
    site: str
    position: int
    ratio: float


@dataclass(frozen=True, eq=False)
class _OriginValue:
    """What the origin gave in one run, its dtype, and the tokens that its request was fed before it."""

    numbers: NDArray[np.float64]
    dtype: str
    fed: Sequence[int]


@dataclass(frozen=True)
class _MeasuredPlace:
    """A site and a position of the focus; the value is of the first of ``ports`` that is an output, or of its first output."""

    site: str
    position: int
    ports: tuple[str, ...] = ()


def _asked(facts: Facts) -> bool | str:
    return facts.rests_without("another dtype") or True


@control("dtype", after="neighbour_length", needs=(DTYPE, VALUES), asked_by=_asked)
def dtype(case: Case) -> Outcome:
    """Both sides in the model's dtype and in float32, with the output of the first origin kept.

    The difference at the origin, relative to its values, is compared between the two. An engine whose activations are float32
    anyway, and whose ``operand_dtype`` says what products and the cache round to, is compared at the logits instead: what was
    rounded differently on the way is seen there. Result ``scales`` where it shrank,
    ``stays`` where it did not and is larger than a kernel of lower precision could make it, else ``undecided``.
    """
    origin = case.focus.origin
    if origin is None:
        raise CannotRun("no origin is known, so there is no place to measure at")
    operands: str | None = getattr(case.engine("a"), "operand_dtype", None)
    place = _MeasuredPlace(origin.site, origin.position, origin.ports) if operands is None else _logits(case)
    mine = _value(case, "a", None, place)
    if operands is None and mine.dtype == OTHER:
        raise CannotRun(
            "the model's activations are float32 already, and in a lower precision sums that are kept in float32 would be "
            "rounded to equal bits"
        )
    own, how = (
        (mine.dtype, f"in {mine.dtype}") if operands is None else (operands, f"with operands in {operands}")
    )
    before = _difference(mine, _value(case, "b", None, place))
    after = _difference(*(_value(case, side, OTHER, place) for side in "ab"))
    where = f"{place.site}, position {place.position} of {case.focus.id}"
    if before == 0 or not math.isfinite(before) or not math.isfinite(after):
        raise CannotRun(f"the difference at {where} is {before:g} {how} and {after:g} in {OTHER}")
    ratio, expected = after / before, UNIT[OTHER] / UNIT[own]
    figures = DtypeFigures(own, OTHER, before, after, expected, place.site, place.position, ratio)
    sentence = f"at {where} the runs differ by {before:.2g} of the values {how} and by {after:.2g} in {OTHER}"
    if ratio <= SHRUNK:
        return Outcome("scales", f"{sentence}: that shrinks with the precision, as rounding does", figures)
    if ratio >= 1 / 4 and after >= COARSE:
        return Outcome(
            "stays", f"{sentence}: that does not shrink with the precision, as rounding would", figures
        )
    if max(before, after) < FINE:
        return Outcome("undecided", f"{sentence}: both are of the size of float32's own rounding", figures)
    return Outcome("undecided", f"{sentence}: that can be rounding or a bug", figures)


def _difference(a: _OriginValue, b: _OriginValue) -> float:
    """How far the origin's outputs of the two runs are apart: the norm of the difference over the norm of a's."""
    if list(a.fed) != list(b.fed):
        # In another dtype the text may be another one; the two sides must still have seen the same.
        raise CannotRun("in another dtype the two sides' texts diverge before the row of the origin")
    norm = float(np.linalg.norm(a.numbers))
    return float(np.linalg.norm(a.numbers - b.numbers)) / norm if norm else math.inf


def _logits(case: Case) -> _MeasuredPlace:
    """The head's output in the deciding row. Raises CannotRun where a side has no such row."""
    head = next((site.name for site in case.a.sites if site.kind == "head"), None)
    if head is None:
        raise CannotRun(
            "the activations are float32 already, and no head is recorded whose logits could be compared"
        )
    return _MeasuredPlace(head, deciding_row(case, "a").position)


def _value(case: Case, side: Side, wanted: str | None, place: _MeasuredPlace) -> _OriginValue:
    from ..origins import DRAFT, Captured

    request, scenario = case.focus, case.scenario(side)
    capture = Capture(
        level="window",
        requests=tuple(sorted(scenario.turns_with(request.id))),
        positions=(place.position, place.position),
        sites=(place.site,),
        digest=scenario.capture.digest,
        memory_mb=scenario.capture.memory_mb,
    )
    overrides = Overrides(dtype=wanted)
    captured = Captured(case.record(replace(scenario, capture=capture), side, overrides=overrides))
    row = captured.row(request.id, place.position, draft=place.site.startswith(DRAFT))
    sites = {site.name: site for site in captured.trace.sites}
    outputs = sites[place.site].outputs
    port = next((name for name in place.ports if name in outputs), outputs[0])
    value = None if row is None else captured.value(row, place.site, port)
    if value is None or value.dtype not in NAMES:
        raise CannotRun(
            f"in this dtype side {side} ends before the row of the origin, or it is no floating value"
        )
    return _OriginValue(value.numbers(), NAMES[value.dtype], _fed(captured.trace, request.id, place.position))


def _fed(trace: Any, id: str, position: int) -> list[int]:
    """The generated tokens of a request that were fed up to a position."""
    number = next(n for n, request in enumerate(trace.requests) if request["id"] == id)
    generated = trace.generated()
    mine = generated.request == number
    count = max(0, position + 1 - len(trace.requests[number]["tokens"]))
    return [int(token) for token in generated.token[mine][np.argsort(generated.index[mine])]][:count]
