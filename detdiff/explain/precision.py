"""The control ``dtype``: the same two runs in another precision. Rounding scales with it, a bug does not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from detdiff.engines.mlx.deciding_rows import origin_port
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.reruns import Changes, Mark, Reruns, Row, Run, rerun
from detdiff.engines.mlx.serve import Models, Sessions

from .case import Case, Side
from .control import CannotRun
from .outcome import Outcome

UNIT = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""Unit roundoffs: half the distance from 1 to the next number."""

SHRUNK = 2.0**-6
"""Sums that are kept in float32 and rounded once differ in some elements only, so less than the ratio of the unit
roundoffs has to do."""
COARSE = 2.0**-10
"""Kernels that round operands to 11 bits give differences below this in float32 too."""


def dtype(case: Case) -> Outcome:
    """Both sides up to the first origin, in the model's dtype and in float32.

    The difference at the origin, relative to its values, is compared between the two. Result ``scales`` where it shrank,
    ``stays`` where it did not and is larger than a kernel of lower precision could make it, else ``undecided``.
    """
    origin = case.focus.origin
    if origin is None:
        raise CannotRun("no origin is known, so there is no place to measure at")
    own = activations(case.loaded)
    other = mx.float32
    if own == other:
        raise CannotRun(
            "the model's activations are float32 already, and in a lower precision sums that are kept in float32 would be "
            "rounded to equal bits"
        )
    before = _difference(case, None)
    after = _difference(case, other)
    expected = UNIT[other] / UNIT[own]
    names = [str(d).rpartition(".")[2] for d in (own, other)]
    detail = {
        "dtype": names[0],
        "other": names[1],
        "difference": before,
        "difference_other": after,
        "expected_ratio": expected,
        "site": origin.site,
        "position": origin.position,
    }
    where = f"{origin.site}, position {origin.position} of {case.focus.id}"
    if before == 0 or not math.isfinite(before) or not math.isfinite(after):
        raise CannotRun(f"the difference at {where} is {before:g} in {names[0]} and {after:g} in {names[1]}")
    ratio = after / before
    detail["ratio"] = ratio
    said = f"at {where} the runs differ by {before:.2g} of the values in {names[0]} and by {after:.2g} in {names[1]}"
    if ratio <= SHRUNK:
        return Outcome("scales", f"{said}: that shrinks with the precision, as rounding does", detail)
    if ratio >= 1 / 4 and after >= COARSE:
        return Outcome("stays", f"{said}: that does not shrink with the precision, as rounding would", detail)
    return Outcome("undecided", f"{said}: that can be rounding or a bug", detail)


def activations(loaded: LoadedModel) -> mx.Dtype:
    """The dtype that a model's activations have: that of its floating parameters, the most frequent one."""
    parameters: Any = tree_flatten(loaded.model.parameters())
    floats: list[mx.Dtype] = [array.dtype for _, array in parameters if array.dtype in UNIT]
    if not floats:
        raise CannotRun("the model has no float32, float16 or bfloat16 parameters")
    return max(UNIT, key=floats.count)


@contextlib.contextmanager
def in_dtype(models: Sequence[LoadedModel], wanted: mx.Dtype) -> Iterator[None]:
    """All floating parameters of the models in a dtype while the block lasts; the very arrays are back afterwards."""
    kept = [(loaded.model, loaded.model.parameters()) for loaded in models]
    try:
        for loaded in models:
            loaded.model.set_dtype(wanted)
        yield
    finally:
        for model, parameters in kept:
            model.update(parameters)


def _difference(case: Case, wanted: mx.Dtype | None) -> float:
    """How far the origin's outputs of the two runs are apart: the norm of the difference over the norm of a's."""
    models = [each for each in (case.loaded, case.draft) if each is not None]
    with contextlib.ExitStack() as stack:
        if wanted is not None:
            stack.enter_context(in_dtype(models, wanted))
        values = [_value(case, side, fresh=wanted is not None) for side in "ab"]
    a, b = values
    norm = float(np.linalg.norm(a))
    return float(np.linalg.norm(a - b)) / norm if norm else math.inf


def _value(case: Case, side: Side, *, fresh: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    wanted = origin_port(Reruns.of(case), side)
    ((site, port), row) = next(iter(wanted.items()))

    def decided(run: Run) -> bool:
        return Mark(site, port, row) in run.watch.marks and _fed(case, side, run, row)

    changes = Changes(wanted=wanted, decided=decided)
    if fresh:
        # What kernels made of the weights is of the other dtype.
        scenario = case.scenario(side)
        found = Reruns.of(case).models(scenario)
        draft = None if found.draft is None else replace(found.draft, staged={})
        sessions = Sessions.of(scenario, Models(replace(found.target, staged={}), draft), case.faults(side))
        changes = replace(changes, sessions=sessions)
    run = rerun(Reruns.of(case), side, changes)
    value = run.watch.values.get(Mark(site, port, row))
    if value is None:
        raise CannotRun(f"in this dtype side {side} ends before the row of the origin")
    _check_inputs(case, side, run, row)
    return np.asarray(value.astype(mx.float32)).astype(np.float64)


def _fed(case: Case, side: Side, run: Run, row: Row) -> bool:
    """Whether the row stays: the token that it chooses is settled, or it is inside of the prompt."""
    prompt = len(case.trace(side).requests[row.request]["tokens"])
    return row.position < prompt + len(run.tokens[row.request]) - 1


def _check_inputs(case: Case, side: Side, run: Run, row: Row) -> None:
    """In another dtype the text may be another one; the two sides must still have seen the same."""
    prompt = len(case.trace(side).requests[row.request]["tokens"])
    seen = tuple(run.tokens[row.request][: max(0, row.position + 1 - prompt)])
    key = ("dtype", row.position)
    known = case.known.setdefault(str(key), {})
    known[side] = seen
    if side == "b" and known.get("a") != seen:
        raise CannotRun("in another dtype the two sides' texts part before the row of the origin")
