"""``probe``: the sweep, the comparison of its classes with float64, and the times, in one answer.

The answer is a plain value that text, JSON and the chart are made of.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from detdiff.engines.base import blas_in_use, machine
from detdiff.errors import ProbeRowsInvalid, ProbeTargetInvalid

from .measures import CallTime, Error, RowChange, change, crossing, error, measure
from .operation import FORM, ONE_AFTER_THE_OTHER, LinearSizes, ProbedOperation, ProbeTarget, Route
from .sweep import (
    RUNS,
    ChangedRows,
    OnCalls,
    RowContent,
    SeedSweep,
    classes,
    findings,
    look,
    row_counts,
    work,
)
from .targets import Function, LinearTarget, check_reference, find_function

SCHEMA = "detdiff.probe/1"


@dataclass(frozen=True)
class Probe:
    """One operation over a range of M. Has no truth value; ask ``invariant``.

    ``classes`` is a partition of ``rows``: all M of one give row 0 the same bits, for each of ``seeds`` seeds.
    ``against_one`` has an entry for every M but 1; ``position``, ``neighbours`` and ``repeat`` one for every M
    at which something was found. ``errors`` has one per class, in the order of ``classes``, or is None where the
    float64 answer is not known; ``times`` one per M, or is None where no time was taken. ``paths`` are by M.
    """

    target: str
    on: str
    layout: str
    k: int
    n: int
    dtype: str
    output_dtype: str
    rows: tuple[int, ...]
    seeds: int
    runs: int
    classes: tuple[tuple[int, ...], ...]
    against_one: tuple[RowChange, ...]
    position: tuple[ChangedRows, ...]
    neighbours: tuple[ChangedRows, ...]
    repeat: tuple[ChangedRows, ...]
    errors: tuple[Error, ...] | None
    times: tuple[CallTime, ...] | None
    paths: Mapping[int, tuple[Route, ...]]
    notes: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    lies: str = ""
    """How rows lie in memory where the model's own call has them otherwise than one after the other."""

    def __bool__(self) -> NoReturn:
        raise TypeError("a Probe has no truth value; ask .invariant")

    @property
    def invariant(self) -> bool:
        """A row's bits depended on nothing but the row, whatever was tried."""
        return len(self.classes) == 1 and not (self.position or self.neighbours or self.repeat)

    @property
    def bits_change_at(self) -> tuple[int, ...]:
        """Every M at which row 0 has other bits than at the M swept before it."""
        home = {m: number for number, members in enumerate(self.classes) for m in members}
        return tuple(
            m for before, m in zip(self.rows, self.rows[1:], strict=False) if home[m] != home[before]
        )

    @property
    def time_crosses_at(self) -> int | None:
        """The M from which on one call costs less than row by row; None where none does, or nothing was timed."""
        return None if self.times is None else crossing(self.times)

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values; ``docs/probe.md`` lists the keys."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "on": self.on,
            "layout": self.layout,
            **({"lies": self.lies} if self.lies else {}),
            "k": self.k,
            "n": self.n,
            "dtype": self.dtype,
            "output_dtype": self.output_dtype,
            "invariant": self.invariant,
            "rows": list(self.rows),
            "seeds": self.seeds,
            "classes": [list(members) for members in self.classes],
            "against_one": [_plain(one) | {"equal": one.equal} for one in self.against_one],
            "position": {"matters": bool(self.position), "found": [_plain(f) for f in self.position]},
            "neighbours": {"matters": bool(self.neighbours), "found": [_plain(f) for f in self.neighbours]},
            "repeat": {
                "differs": bool(self.repeat),
                "runs": self.runs,
                "found": [_plain(f) for f in self.repeat],
            },
            "errors": None if self.errors is None else [_plain(one) for one in self.errors],
            "times": None
            if self.times is None
            else [_plain(one) | {"per_row": one.per_row} for one in self.times],
            "thresholds": {"bits": list(self.bits_change_at), "time": self.time_crosses_at},
            "paths": [
                {"rows": m, "parts": [_plain(route) for route in routes]} for m, routes in self.paths.items()
            ],
            "notes": list(self.notes),
            "environment": dict(self.environment),
        }


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON values, which have no NaN and no infinity."""
    found = dataclasses.asdict(value)
    return {
        key: list(item) if isinstance(item, tuple) else _number(item) if isinstance(item, float) else item
        for key, item in found.items()
    }


def _number(x: float) -> float | str:
    if math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


DEFAULT_ROWS = "1..16"
SEEDS = 3
MOST_SEEDS = 1000


def find_target(text: str, on: str = "native", layout: str = "packed") -> ProbeTarget:
    """``linear:K,N,dtype[,bits[,group_size]]`` on a backend, or ``module:function``.

    Raises ProbeTargetInvalid and ProbeFunctionMissing.
    """
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise ProbeTargetInvalid(
            f"The target {text!r} is neither {FORM} nor module:function, a function of your own. Write it so, or give "
            "--model for the linear sites of a model."
        )
    if kind == "linear":
        return LinearTarget(LinearSizes.parse(rest), on, layout)
    return Function(*find_function(text))


def probe(
    target: str | ProbeTarget | Callable[[Any], Any],
    *,
    rows: str | Iterable[int] = DEFAULT_ROWS,
    seeds: int = SEEDS,
    on: str = "native",
    timed: bool = True,
    progress: OnCalls | None = None,
) -> Probe:
    """Which numbers of rows M change a row's bits, and what each M costs.

    ``target`` is text (see `find_target`), a function that takes a numpy array (rows, k) and returns (rows, ...),
    or a `LinearTarget`, `Function` or site of a model; ``on`` is the backend of a text's linear operation. ``rows`` are
    numbers or text such as "1..8,16"; 1 is always among them. ``seeds`` (2 or more) is from how many draws of rows,
    and of weights where they are drawn, the answer comes. ``progress`` is told the rows done and the rows in all.

    Raises ProbeError: a class of its own for each thing that cannot be probed.
    """
    swept = row_counts(rows)
    if not 2 <= seeds <= MOST_SEEDS:
        raise ProbeRowsInvalid(
            f"{seeds!r} seeds were asked for; a probe takes 2 to {MOST_SEEDS}, because rows drawn once may be equal by "
            "chance. Ask for 2 or more."
        )
    return _probe(_target(target, on), swept, seeds, timed, progress)


def _target(given: str | ProbeTarget | Callable[[Any], Any], on: str) -> ProbeTarget:
    if isinstance(given, str):
        return find_target(given, on)
    if isinstance(given, ProbeTarget):
        return given
    name = getattr(given, "__qualname__", type(given).__name__)
    return Function(given, f"{getattr(given, '__module__', None) or 'function'}:{name}")


def _probe(
    target: ProbeTarget, rows: tuple[int, ...], seeds: int, timed: bool, progress: OnCalls | None
) -> Probe:
    seen: list[SeedSweep] = []
    exact = []
    total, done = work(rows) * seeds, 0

    def on_rows(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    times: tuple[CallTime, ...] | None = None
    for seed in range(seeds):
        operation = target.operation(seed)
        content = RowContent.of_seed(seed, rows[-1], operation)
        seen.append(look(operation, content, rows, seed, on_rows))
        _check_width(seen)
        with np.errstate(over="ignore", invalid="ignore"):
            truth = operation.exact(content.rows[:1].astype(np.float64))
        if truth is not None:
            check_reference(truth, seen[-1].first[1].data.shape[1], target.name)
            exact.append(truth)
        if timed and seed == 0:
            times = measure(operation, content, rows)
    groups = classes(seen, rows)
    errors = [error(seen, exact, members) for members in groups] if exact else []
    paths = _paths(operation, rows)
    found = Probe(
        target=target.name,
        on=target.on,
        layout=operation.layout,
        k=operation.k,
        n=seen[0].first[1].data.shape[1],
        dtype=operation.dtype,
        output_dtype=seen[0].first[1].dtype,
        rows=rows,
        seeds=seeds,
        runs=RUNS,
        classes=groups,
        against_one=tuple(change(seen, m) for m in rows[1:]),
        position=findings(seen, lambda one: one.position),
        neighbours=findings(seen, lambda one: one.neighbours),
        repeat=findings(seen, lambda one: one.repeat),
        errors=_all(errors),
        times=times,
        paths=paths,
        environment=_environment(),
        lies="" if operation.lies == ONE_AFTER_THE_OTHER else str(operation.lies),
    )
    return _noted(found)


def _check_width(seen: list[SeedSweep]) -> None:
    first, last = seen[0].first[1].data.shape[1], seen[-1].first[1].data.shape[1]
    if first != last:
        raise ProbeTargetInvalid(
            f"The operation returns {first} values a row with the first seed and {last} with a later one; expected the "
            "same number. What is probed must not change between calls."
        )


def _all(errors: list[Error | None]) -> tuple[Error, ...] | None:
    found = tuple(one for one in errors if one is not None)
    return found if found and len(found) == len(errors) else None


def _paths(operation: ProbedOperation, rows: tuple[int, ...]) -> dict[int, tuple[Route, ...]]:
    return {} if operation.routes is None else {m: operation.routes(m) for m in rows}


def _noted(found: Probe) -> Probe:
    return replace(found, notes=tuple(_notes(found)))


def _notes(found: Probe) -> Iterator[str]:
    if found.repeat:
        yield (
            "A repeat of the same call differs, so the classes, and what positions and neighbours do, may be chance: "
            "look for a race first."
        )
    elif found.neighbours:
        yield (
            "A row's bits depend on what is in other rows, so row 0 may differ between two M because of its neighbours, "
            "not because of M."
        )
    if found.lies:
        yield f"Rows lie in memory as the model's own call has them, {found.lies}; rows that follow each other may take other kernels."
    families = {route.path.partition("/")[0] for routes in found.paths.values() for route in routes}
    if "reference" in families and found.times is not None:
        yield (
            "Times are those of reference kernels on this machine's CPU; of the real kernels they say nothing."
        )
    if found.on == "torch":
        from detdiff.engines.transformers.linear_sites import torch_note

        yield torch_note()
    if found.errors is None:
        yield (
            "No float64 answer is known for this operation, so no error is given; a function can bring one as its "
            "attribute reference."
        )


def _environment() -> dict[str, Any]:
    if "mlx.core" not in sys.modules:  # a numpy operation needs no mlx, and says nothing of it
        return {**machine(), "blas": blas_in_use()}
    from detdiff.engines.mlx.engine import environment

    return environment()
