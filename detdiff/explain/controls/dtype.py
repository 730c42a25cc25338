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

OTHER: Final = "float32"
NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNIT: Final = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoffs: half the distance from 1 to the next number."""
SHRUNK: Final = 2.0**-6
"""Sums that are kept in float32 and rounded once differ in some elements only, so less than the ratio of the unit
roundoffs has to do."""
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


@control("dtype", after="neighbour_length", needs=(DTYPE, VALUES))
def dtype(case: Case) -> Outcome:
    """Both sides in the model's dtype and in float32, with the output of the first origin kept.

    The difference at the origin, relative to its values, is compared between the two. Result ``scales`` where it shrank,
    ``stays`` where it did not and is larger than a kernel of lower precision could make it, else ``undecided``.
    """
    origin = case.focus.origin
    if origin is None:
        raise CannotRun("no origin is known, so there is no place to measure at")
    mine = _value(case, "a", None)
    if mine.dtype == OTHER:
        raise CannotRun(
            "the model's activations are float32 already, and in a lower precision sums that are kept in float32 would be "
            "rounded to equal bits"
        )
    before = _difference(mine, _value(case, "b", None))
    after = _difference(*(_value(case, side, OTHER) for side in "ab"))
    where = f"{origin.site}, position {origin.position} of {case.focus.id}"
    if before == 0 or not math.isfinite(before) or not math.isfinite(after):
        raise CannotRun(f"the difference at {where} is {before:g} in {mine.dtype} and {after:g} in {OTHER}")
    ratio, expected = after / before, UNIT[OTHER] / UNIT[mine.dtype]
    figures = DtypeFigures(mine.dtype, OTHER, before, after, expected, origin.site, origin.position, ratio)
    sentence = f"at {where} the runs differ by {before:.2g} of the values in {mine.dtype} and by {after:.2g} in {OTHER}"
    if ratio <= SHRUNK:
        return Outcome("scales", f"{sentence}: that shrinks with the precision, as rounding does", figures)
    if ratio >= 1 / 4 and after >= COARSE:
        return Outcome(
            "stays", f"{sentence}: that does not shrink with the precision, as rounding would", figures
        )
    return Outcome("undecided", f"{sentence}: that can be rounding or a bug", figures)


def _difference(a: _OriginValue, b: _OriginValue) -> float:
    """How far the origin's outputs of the two runs are apart: the norm of the difference over the norm of a's."""
    if list(a.fed) != list(b.fed):
        # In another dtype the text may be another one; the two sides must still have seen the same.
        raise CannotRun("in another dtype the two sides' texts diverge before the row of the origin")
    norm = float(np.linalg.norm(a.numbers))
    return float(np.linalg.norm(a.numbers - b.numbers)) / norm if norm else math.inf


def _value(case: Case, side: Side, wanted: str | None) -> _OriginValue:
    from ..origins import DRAFT, Captured

    request, origin = case.focus, case.focus.origin
    assert origin is not None
    scenario = case.scenario(side)
    capture = Capture(
        level="window",
        requests=(request.id,),
        positions=(origin.position, origin.position),
        sites=(origin.site,),
        digest=scenario.capture.digest,
        memory_mb=scenario.capture.memory_mb,
    )
    overrides = Overrides(dtype=wanted)
    captured = Captured(case.record(replace(scenario, capture=capture), side, overrides=overrides))
    row = captured.row(request.id, origin.position, draft=origin.site.startswith(DRAFT))
    sites = {site.name: site for site in captured.trace.sites}
    outputs = sites[origin.site].outputs
    port = next((name for name in origin.ports if name in outputs), outputs[0])
    value = None if row is None else captured.value(row, origin.site, port)
    if value is None or value.dtype not in NAMES:
        raise CannotRun(
            f"in this dtype side {side} ends before the row of the origin, or it is no floating value"
        )
    return _OriginValue(
        value.numbers(), NAMES[value.dtype], _fed(captured.trace, request.id, origin.position)
    )


def _fed(trace: Any, id: str, position: int) -> list[int]:
    """The generated tokens of a request that were fed up to a position."""
    number = next(n for n, request in enumerate(trace.requests) if request["id"] == id)
    generated = trace.generated()
    mine = generated.request == number
    count = max(0, position + 1 - len(trace.requests[number]["tokens"]))
    return [int(token) for token in generated.token[mine][np.argsort(generated.index[mine])]][:count]
