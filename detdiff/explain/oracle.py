"""Scores outputs against float64: inside what rounding allows or not, which side is nearer, in which precision."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import OracleRefused

from .bounds import BoundedOutputs, Linear, Switch
from .origins import OriginRow, significant
from .roundings import UNIT, Arithmetic, Float64, numbers

# A side is nearer if its root mean square error is at most this share of the other's, and as many elements are nearer
# as chance would give less often than that.
_SHARE = 0.8
_CHANCE = 0.01
# The median of a normal variable's size.
_MEDIAN_OF_NORMAL = 0.6745
_NAMES = {"float32": "float32", "float16": "float16 or tf32", "bfloat16": "bfloat16"}


class Operation(Protocol):
    """An operation with what it was given: ``Linear``, ``Switch``, ``Embedding``, ``Copied``, ``AttentionOperation``,
    ``Norm`` or ``Rope``."""

    def bounded(self, arithmetic: Arithmetic) -> BoundedOutputs:
        """Its outputs in float64 and the bound of a path; raises OracleRefused."""
        ...


@dataclass(frozen=True, eq=False)
class Judgement:
    """An output against float64, in units of the bound of the path that gave it.

    ``worst`` is at ``where``, an index of the output; ``outside`` counts elements beyond the bound, ``not_finite`` those
    among them that are NaN or infinite although no overflow is possible there. ``float32_units`` is the worst error in
    units of the bound that float32 sums over the same operands have, output rounding included: far above 1 where operands or
    sums were in less. ``precision`` is the unit roundoff of operands that would give the common element's error, 0 where the
    output's own rounding explains it, and ``precision_name`` the dtype that is nearest: "exact", "float32", "float16 or
    tf32", "bfloat16", or "none" from 1/2 on. ``errors`` are absolute, inf where not finite; ``scale`` is what a
    single rounding of operands leads to on average, over its unit.
    """

    path: str
    dtype: str
    bound: str
    worst: float
    where: tuple[int, ...]
    mean: float
    outside: int
    not_finite: int
    elements: int
    float32_units: float
    precision: float
    precision_name: str
    errors: Float64 = field(repr=False)
    scale: Float64 = field(repr=False)

    @property
    def inside(self) -> bool:
        """Whether rounding explains every element."""
        return self.outside == 0

    def as_json(self) -> dict[str, Any]:
        """All but the arrays; infinite figures as None."""
        figures = {
            name: value if np.isfinite(value) else None
            for name, value in (
                ("worst", self.worst), ("mean", self.mean), ("float32_units", self.float32_units),
                ("precision", self.precision),
            )
        }  # fmt: skip
        return {
            "path": self.path,
            "dtype": self.dtype,
            "bound": self.bound,
            "inside": self.inside,
            "where": list(self.where),
            "outside": self.outside,
            "not_finite": self.not_finite,
            "elements": self.elements,
            "precision_name": self.precision_name,
            **figures,
        }


@dataclass(frozen=True)
class Sides:
    """Which of two outputs of one operation is nearer to float64.

    ``ratio`` is A's root mean square error over B's, each element's error in units of its own scale; ``a_nearer`` and
    ``b_nearer`` count elements.
    """

    nearer: Literal["a", "b", "equal"]
    ratio: float
    a_nearer: int
    b_nearer: int


def judge(operation: Operation, output: Any, arithmetic: Arithmetic) -> Judgement:
    """Scores ``output``, an array of the operation's output shape, widened, or recorded ``Values``.

    Raises OracleRefused for another shape, for nothing to judge, and where the operation's bound is not known.
    """
    found = operation.bounded(arithmetic)
    given = numbers(output)
    if given.size != found.exact.size or not given.size:
        raise OracleRefused(
            f"The oracle was given an output of shape {given.shape}; expected one of {found.exact.shape} with at least one "
            "element. Give the rows that the operation's inputs are of."
        )
    given = given.reshape(found.exact.shape)
    finite = np.isfinite(given)
    allowed = found.unbounded & ~finite
    # What is not finite in float64 either, bit for bit the same kind, is no error.
    same = (np.isnan(given) & np.isnan(found.exact)) | (given == found.exact)
    signed = (found.bound == 0) & (given == 0) & (found.exact == 0)
    signed &= np.signbit(given) != np.signbit(found.exact)
    with np.errstate(all="ignore"):
        errors = np.where(same, 0.0, np.where(finite, np.abs(given - found.exact), np.inf))
        units = _ratio(errors, found.bound)
        units[allowed] = 0.0
        units[~finite & ~allowed & ~same] = np.inf
        plain = _ratio(errors, found.yardstick)
        plain[found.unbounded] = 0.0
    units[np.isnan(units) | signed] = np.inf
    where = np.unravel_index(int(np.argmax(units)), units.shape)
    outside = units > 1.0
    precision = _precision(errors, found, arithmetic)
    return Judgement(
        path=arithmetic.path,
        dtype=arithmetic.dtype,
        bound=found.text,
        worst=float(units.max()),
        where=tuple(int(i) for i in where),
        mean=float(np.mean(units)),
        outside=int(np.count_nonzero(outside)),
        not_finite=int(np.count_nonzero(outside & ~finite)),
        elements=units.size,
        float32_units=float(np.nanmax(plain, initial=0.0)),
        precision=precision,
        precision_name=_name(precision),
        errors=errors,
        scale=found.scale,
    )


def compare_sides(a: Judgement, b: Judgement) -> Sides:
    """Which side is nearer: its root mean square error is smaller by a fifth, and more elements are nearer than chance
    allows (a sign test on those that differ), so that no single element decides. Raises OracleRefused for two shapes."""
    if a.errors.shape != b.errors.shape:
        raise OracleRefused(
            f"Sides of shapes {a.errors.shape} and {b.errors.shape} were given; expected two outputs of one operation. Judge "
            "the same rows on both sides."
        )
    a_nearer = int(np.count_nonzero(a.errors < b.errors))
    b_nearer = int(np.count_nonzero(b.errors < a.errors))
    with np.errstate(all="ignore"):
        sizes = [_root_mean_square(_ratio(side.errors, side.scale)) for side in (a, b)]
        ratio = 1.0 if sizes[0] == sizes[1] else float(np.divide(sizes[0], sizes[1]))
    if not _by_chance(a_nearer, b_nearer):
        if a_nearer > b_nearer and ratio <= _SHARE:
            return Sides("a", ratio, a_nearer, b_nearer)
        if b_nearer > a_nearer and ratio >= 1 / _SHARE:
            return Sides("b", ratio, a_nearer, b_nearer)
    return Sides("equal", ratio, a_nearer, b_nearer)


def _by_chance(one: int, other: int) -> bool:
    """Whether a fair coin gives so uneven a count more often than ``_CHANCE``, on both sides."""
    n, few = one + other, min(one, other)
    if n > 1000:
        return bool(abs(one - other) / np.sqrt(n) < 2.58)
    tail = sum(comb(n, i) for i in range(few + 1))
    return bool(2 * tail / 2**n > _CHANCE)


def _ratio(errors: Float64, by: Float64) -> Float64:
    """Zero over zero, and anything over infinity, is zero."""
    found: Float64 = np.divide(errors, by, out=np.where(errors > 0, np.inf, 0.0), where=by > 0)
    return np.where((by == np.inf) & np.isfinite(errors), 0.0, found)


def _root_mean_square(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if np.isfinite(values).all() else float("inf")


def _precision(errors: Float64, found: BoundedOutputs, arithmetic: Arithmetic) -> float:
    """The unit roundoff of operands that would give such errors, without what rounding the output explains."""
    usable: NDArray[np.bool_] = np.isfinite(errors) & (found.scale > 0) & np.isfinite(found.scale)
    if not usable.any():
        return 0.0
    explained = arithmetic.unit * np.abs(found.exact[usable]) + arithmetic.smallest
    if arithmetic.dtype == "float32":
        explained = np.zeros_like(explained)
    left = np.maximum(errors[usable] - explained, 0.0)
    # Even over plus and minus the unit, such errors are normal by the time they are summed. The median is that of the
    # common element: a fault in a few leaves it alone.
    return float(np.sqrt(3.0) / _MEDIAN_OF_NORMAL * np.median(left / found.scale[usable]))


def _name(precision: float) -> str:
    if precision == 0:
        return "exact"
    if precision >= 0.5:
        return "none"
    return _NAMES[min(UNIT, key=lambda dtype: abs(np.log2(precision) - np.log2(UNIT[dtype])))]


FAR: Final = 2.0
"""How many times as far from float64 one side has to be to be called far worse."""
PRECISIONS: Final = {11: "float16 or tf32", 8: "bfloat16"}
"""Lower precisions of operands that are tried, by their significant bits."""
LOWER: Final = (*PRECISIONS.values(), "none")
"""Names of the oracle for errors that float32 sums do not make."""
_LISTED: Final = 8

Side = tuple[Float64, Arithmetic, Judgement]


@dataclass(frozen=True, eq=False)
class JudgedOrigins:
    """Origins of one site in one pair of forwards: the operation, and each side's output, arithmetic and judgement."""

    origin_rows: list[OriginRow]
    operation: Operation
    a: Side
    b: Side
    operation_b: Operation | None = None
    """Where each side is judged by what it was given itself."""

    def _of(self, run: str) -> Operation:
        return self.operation if run == "a" or self.operation_b is None else self.operation_b

    def outside(self, run: str) -> NDArray[np.bool_]:
        """Which rows of a side have an element outside the bound, bool [rows]."""
        output, arithmetic, judgement = self.a if run == "a" else self.b
        if judgement.inside:
            return np.zeros(len(self.origin_rows), np.bool_)
        beyond = self._beyond(run, output, arithmetic, judgement).reshape(len(self.origin_rows), -1)
        return np.asarray(beyond.any(axis=1))

    def _beyond(
        self, run: str, output: Float64, arithmetic: Arithmetic, judgement: Judgement
    ) -> NDArray[np.bool_]:
        found = self._of(run).bounded(arithmetic)
        wrong = ~(judgement.errors <= found.bound) & ~(found.unbounded & ~np.isfinite(judgement.errors))
        # A zero of the wrong sign is outside where the operation only copies.
        wrong |= (
            (found.bound == 0)
            & (output.reshape(wrong.shape) == 0)
            & (np.signbit(output.reshape(wrong.shape)) != np.signbit(found.exact))
        )
        return wrong

    def places(self, run: str) -> dict[str, Any]:
        """Where a side is outside: columns (inclusive range), heads where the output has some."""
        output, arithmetic, judgement = self.a if run == "a" else self.b
        wrong = self._beyond(run, output, arithmetic, judgement)
        found: dict[str, Any] = {}
        if wrong.ndim == 3:
            found["heads"] = np.flatnonzero(wrong.any(axis=(0, 2))).tolist()
        elif wrong.ndim == 2 and wrong.any():
            columns = np.flatnonzero(wrong.any(axis=0))
            found["columns"] = [int(columns[0]), int(columns[-1])]
            found["elements"] = int(wrong.sum())
        return found

    def explained(self, run: str) -> int | None:
        """The significant bits of inputs that bring a side inside its bound; None where none of those tried does."""
        output, arithmetic, _ = self.a if run == "a" else self.b
        operation = self._of(run)
        if not isinstance(operation, Linear | Switch):
            return None
        for bits in PRECISIONS:
            for nearest in (True, False):
                narrow = dataclasses.replace(operation, x=significant(operation.x, bits, nearest=nearest))
                if judge(narrow, output, arithmetic).inside:
                    return bits
        return None


@dataclass(frozen=True)
class Outside:
    """A row outside its bound. ``bits``: the operands' significant bits that would explain it."""

    origin_row: OriginRow
    run: str
    path: str
    worst: float
    bits: int | None
    places: dict[str, Any]
    not_finite: int
    handed: str = ""
    """The output inside a composite that the other run hands on bit for bit; float64 has no part in it then."""

    @property
    def sentence(self) -> str:
        """In a clause."""
        size = f"{self.worst:.3g} times its rounding bound" if np.isfinite(self.worst) else "beyond any bound"
        where = ""
        if "heads" in self.places:
            heads = self.places["heads"]
            where = f", head{'s' * (len(heads) != 1)} {', '.join(map(str, heads[:8]))}"
        elif "columns" in self.places:
            first, last = self.places["columns"]
            where = f", columns {first} to {last}"
        forward = self.origin_row.forward_a if self.run == "a" else self.origin_row.forward_b
        if self.handed:
            other = "b" if self.run == "a" else "a"
            return (
                f"{self.origin_row.site.name} ({self.origin_row.site.kind}{where}), position {self.origin_row.position} of "
                f"{self.origin_row.request}, hands on the bits of {self.handed} in run {other}, and from equal inputs gives others in "
                f"run {self.run}, forward {forward}, {size.replace('its rounding bound', 'what roundings allow')} away"
            )
        return (
            f"{self.origin_row.site.name} ({self.origin_row.site.kind}{where}), position {self.origin_row.position} of {self.origin_row.request}, is off "
            f"float64 by {size} in run {self.run}, forward {forward}, on {self.path}"
        )


class Scores:
    """Sums over judged origins; ``total`` origins there are."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._judged: list[JudgedOrigins] = []
        self._outside: list[Outside] = []
        self._skipped: Counter[str] = Counter()
        self._changed: list[OriginRow] = []
        self._inside = {"a": 0, "b": 0}

    def skip(self, origin_row: OriginRow, why: str) -> None:
        """An origin that cannot be judged."""
        self._skipped[why] += 1

    def changed(self, origin_row: OriginRow) -> None:
        """An entry that was read otherwise than it was written: copying has a bound of zero."""
        self._changed.append(origin_row)

    def add(self, judged: JudgedOrigins) -> None:
        """Judged origins of one site."""
        self._judged.append(judged)
        for run, (_, arithmetic, judgement) in (("a", judged.a), ("b", judged.b)):
            outside = judged.outside(run)
            self._inside[run] += int(np.count_nonzero(~outside))
            if not outside.any():
                continue
            bits, places = judged.explained(run), judged.places(run)
            for n in np.flatnonzero(outside).tolist():
                self._outside.append(
                    Outside(
                        judged.origin_rows[n],
                        run,
                        arithmetic.path,
                        judgement.worst,
                        bits,
                        places,
                        judgement.not_finite,
                        getattr(judged.operation, "of", ""),
                    )
                )

    @property
    def result(self) -> str:
        """``inside``, ``outside`` or ``not_run``."""
        if self._outside or self._changed:
            return "outside"
        return "inside" if self._judged else "not_run"

    def first_outside(self) -> Outside | None:
        """The first in execution order that no lower precision explains, else the first."""
        order = sorted(self._outside, key=lambda each: each.origin_row.forward_a)
        return next((each for each in order if each.bits is None), order[0] if order else None)

    def _pairs(self) -> dict[tuple[str, str | None, str | None], list[JudgedOrigins]]:
        pairs: dict[tuple[str, str | None, str | None], list[JudgedOrigins]] = {}
        for judged in self._judged:
            pairs.setdefault(judged.origin_rows[0].group, []).append(judged)
        return pairs

    def _nearer(self, judged: Sequence[JudgedOrigins]) -> Sides:
        # Where a forward ends with a row on one side alone, that side has the state behind the row's output too.
        sizes = [min(each.a[2].errors.size, each.b[2].errors.size) for each in judged]
        joined = [
            dataclasses.replace(
                side[0][2],
                errors=np.concatenate(
                    [each.errors.ravel()[:n] for (_, _, each), n in zip(side, sizes, strict=True)]
                ),
                scale=np.concatenate(
                    [each.scale.ravel()[:n] for (_, _, each), n in zip(side, sizes, strict=True)]
                ),
            )
            for side in ([each.a for each in judged], [each.b for each in judged])
        ]
        return compare_sides(*joined)

    def _precision(self) -> dict[str, Any] | None:
        """What operands of lower precision explain, where they explain all that is outside, on one side."""
        found = {(each.run, each.bits) for each in self._outside}
        if self._changed or len(found) != 1:
            return None
        ((run, bits),) = found
        if bits is None:
            return None
        path = self._outside[0].path
        return {
            "run": run,
            "bits": bits,
            "name": PRECISIONS[bits],
            "path": path,
            "said": f"run {run} ({path}) is outside the bound of its path, and inside it with inputs of {bits} significant bits "
            f"({PRECISIONS[bits]})",
        }

    def detail(self, pattern: str) -> dict[str, Any]:
        """Figures as JSON values."""
        first = self.first_outside()
        listed = ([first] if first else []) + [each for each in self._outside if each is not first]
        sides = self._nearer(self._judged) if self._judged else None
        pairs = [self._pair(*item) for item in self._pairs().items()]
        return {
            "origins": self._total,
            "judged": sum(len(each.origin_rows) for each in self._judged) + len(self._changed),
            "inside_a": self._inside["a"],
            "inside_b": self._inside["b"],
            "outside_a": sum(each.run == "a" for each in self._outside),
            "outside_b": sum(each.run == "b" for each in self._outside),
            "changed": len(self._changed),
            "not_finite": sum(bool(each.not_finite) for each in self._outside),
            "skipped": dict(self._skipped),
            "nearer": None if sides is None else sides.nearer,
            "ratio": None if sides is None or not np.isfinite(sides.ratio) else sides.ratio,
            "pairs": pairs,
            "far": next((pair["far"] for pair in pairs if pair["far"]), None),
            "precision": self._precision(),
            "pattern": pattern,
            "outside_where": [_where(each) for each in listed[:_LISTED]],
        }

    def _pair(
        self, group: tuple[str, str | None, str | None], judged: Sequence[JudgedOrigins]
    ) -> dict[str, Any]:
        kind, path_a, path_b = group
        sides = self._nearer(judged)
        worst = [
            max(side[2].worst for side in each) for each in zip(*((j.a, j.b) for j in judged), strict=True)
        ]
        far: dict[str, Any] | None = None
        times = _times(sides)
        names = [
            _common([side[2].precision_name for side in each])
            for each in zip(*((j.a, j.b) for j in judged), strict=True)
        ]
        run = "a" if sides.nearer == "b" else "b"
        worse, better = names if run == "a" else names[::-1]
        # Another order of float32 sums may be a few times as far off; less precision shows in the size of the error as well.
        if np.isfinite(times) and times >= FAR and worse in LOWER and worse != better:
            far = {
                "worse": run,
                "path": (path_a if run == "a" else path_b) or "native",
                "ratio": times,
                "precision": worse,
            }
        return {
            "kind": kind,
            "path_a": path_a,
            "path_b": path_b,
            "judged": sum(len(each.origin_rows) for each in judged),
            "worst_a": _finite(worst[0]),
            "worst_b": _finite(worst[1]),
            "precision_a": names[0],
            "precision_b": names[1],
            "nearer": sides.nearer,
            "ratio": _finite(sides.ratio),
            "bound_a": judged[0].a[2].bound,
            "bound_b": judged[0].b[2].bound,
            "far": far,
        }

    def sentence(self) -> str:
        """The answer in a few sentences."""
        judged = sum(len(each.origin_rows) for each in self._judged)
        which = f"all {judged} origins" if judged == self._total else f"{judged} of {self._total:,} origins"
        if judged < self._total:
            which += " (the first of each site kind and path pair, evenly spread ones, the largest)"
        parts = []
        if judged:
            worst = {
                run: max((each.a if run == "a" else each.b)[2].worst for each in self._judged) for run in "ab"
            }
            parts.append(
                f"{which} recomputed in float64: outside the rounding bound {self._count('a')} in a and {self._count('b')} in b; "
                f"at worst {_units(worst['a'])} of the bound in a, {_units(worst['b'])} in b"
            )
            sides = self._nearer(self._judged)
            times = _times(sides)
            if sides.nearer != "equal":
                factor = f", by a factor of {times:.3g} on average" if np.isfinite(times) else ""
                parts.append(f"run {sides.nearer} is nearer to float64{factor}")
            elif np.isfinite(sides.ratio):
                parts.append(
                    f"neither side is nearer to float64 (the errors' ratio, a to b, is {sides.ratio:.3g})"
                )
        if self._changed:
            parts.append(
                f"{len(self._changed)} cache reads gave other entries than were written there, and copying has a bound of zero"
            )
        for why, count in self._skipped.most_common(2):
            parts.append(f"{count} not judged: {why[0].lower()}{why[1:]}")
        return "; ".join(parts)

    def _count(self, run: str) -> int:
        return sum(each.run == run for each in self._outside)


def _where(each: Outside) -> dict[str, Any]:
    return {
        "site": each.origin_row.site.name,
        "kind": each.origin_row.site.kind,
        "layer": each.origin_row.site.layer,
        "request": each.origin_row.request,
        "position": each.origin_row.position,
        "run": each.run,
        "forward": each.origin_row.forward_a if each.run == "a" else each.origin_row.forward_b,
        "path": each.path,
        "worst": _finite(each.worst),
        "bits": each.bits,
        **each.places,
        "said": each.sentence,
    }


def _times(sides: Sides) -> float:
    """How many times as far from float64 the worse side is as the nearer one; 1 where neither is nearer."""
    if sides.nearer == "equal":
        return 1.0
    with np.errstate(divide="ignore"):
        return float(sides.ratio if sides.nearer == "b" else np.divide(1.0, sides.ratio))


def _common(names: Sequence[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _units(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "beyond any multiple"
