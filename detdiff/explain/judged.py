"""What the oracle said of many origins, put together: inside and outside, which side is nearer, in which precision."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .arithmetic import Arithmetic
from .bounds import Linear, Switch
from .captured import significant
from .oracle import Judgement, Operation, Sides, compare_sides, judge
from .origins import Born
from .roundoff import Float64

FAR: Final = 2.0
"""How many times as far from float64 one side has to be to be called far worse."""
PRECISIONS: Final = {11: "float16 or tf32", 8: "bfloat16"}
"""Lower precisions of operands that are tried, by their significant bits."""
LOWER: Final = (*PRECISIONS.values(), "none")
"""Names of the oracle for errors that float32 sums do not make."""
_LISTED: Final = 8

Side = tuple[Float64, Arithmetic, Judgement]


@dataclass(frozen=True, eq=False)
class Judged:
    """Origins of one site in one pair of forwards: the operation, and each side's output, arithmetic and judgement."""

    born: list[Born]
    operation: Operation
    a: Side
    b: Side

    def outside(self, run: str) -> NDArray[np.bool_]:
        """Which rows of a side have an element outside the bound, bool [rows]."""
        output, arithmetic, judgement = self.a if run == "a" else self.b
        if judgement.inside:
            return np.zeros(len(self.born), np.bool_)
        beyond = self._beyond(output, arithmetic, judgement).reshape(len(self.born), -1)
        return np.asarray(beyond.any(axis=1))

    def _beyond(self, output: Float64, arithmetic: Arithmetic, judgement: Judgement) -> NDArray[np.bool_]:
        found = self.operation.bounded(arithmetic)
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
        wrong = self._beyond(output, arithmetic, judgement)
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
        if not isinstance(self.operation, Linear | Switch):
            return None
        for bits in PRECISIONS:
            for nearest in (True, False):
                narrow = dataclasses.replace(
                    self.operation, x=significant(self.operation.x, bits, nearest=nearest)
                )
                if judge(narrow, output, arithmetic).inside:
                    return bits
        return None


@dataclass(frozen=True)
class Outside:
    """A row outside its bound. ``bits``: the operands' significant bits that would explain it."""

    born: Born
    run: str
    path: str
    worst: float
    bits: int | None
    places: dict[str, Any]
    not_finite: int

    @property
    def said(self) -> str:
        """In a clause."""
        size = f"{self.worst:.3g} times its rounding bound" if np.isfinite(self.worst) else "beyond any bound"
        where = ""
        if "heads" in self.places:
            heads = self.places["heads"]
            where = f", head{'s' * (len(heads) != 1)} {', '.join(map(str, heads[:8]))}"
        elif "columns" in self.places:
            first, last = self.places["columns"]
            where = f", columns {first} to {last}"
        forward = self.born.forward_a if self.run == "a" else self.born.forward_b
        return (
            f"{self.born.site.name} ({self.born.site.kind}{where}), position {self.born.position} of {self.born.request}, is off "
            f"float64 by {size} in run {self.run}, forward {forward}, on {self.path}"
        )


class Scores:
    """Sums over judged origins; ``total`` origins there are."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._judged: list[Judged] = []
        self._outside: list[Outside] = []
        self._skipped: Counter[str] = Counter()
        self._changed: list[Born] = []
        self._inside = {"a": 0, "b": 0}

    def skip(self, born: Born, why: str) -> None:
        """An origin that cannot be judged."""
        self._skipped[why] += 1

    def changed(self, born: Born) -> None:
        """An entry that was read otherwise than it was written: copying has a bound of zero."""
        self._changed.append(born)

    def add(self, judged: Judged) -> None:
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
                        judged.born[n],
                        run,
                        arithmetic.path,
                        judgement.worst,
                        bits,
                        places,
                        judgement.not_finite,
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
        order = sorted(self._outside, key=lambda each: each.born.forward_a)
        return next((each for each in order if each.bits is None), order[0] if order else None)

    def _pairs(self) -> dict[tuple[str, str | None, str | None], list[Judged]]:
        pairs: dict[tuple[str, str | None, str | None], list[Judged]] = {}
        for judged in self._judged:
            pairs.setdefault(judged.born[0].group, []).append(judged)
        return pairs

    def _nearer(self, judged: Sequence[Judged]) -> Sides:
        joined = [
            dataclasses.replace(
                side[0][2],
                errors=np.concatenate([each.errors.ravel() for _, _, each in side]),
                scale=np.concatenate([each.scale.ravel() for _, _, each in side]),
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
            "judged": sum(len(each.born) for each in self._judged) + len(self._changed),
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

    def _pair(self, group: tuple[str, str | None, str | None], judged: Sequence[Judged]) -> dict[str, Any]:
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
            "judged": sum(len(each.born) for each in judged),
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

    def said(self) -> str:
        """The answer in a few sentences."""
        judged = sum(len(each.born) for each in self._judged)
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
        "site": each.born.site.name,
        "kind": each.born.site.kind,
        "layer": each.born.site.layer,
        "request": each.born.request,
        "position": each.born.position,
        "run": each.run,
        "forward": each.born.forward_a if each.run == "a" else each.born.forward_b,
        "path": each.path,
        "worst": _finite(each.worst),
        "bits": each.bits,
        **each.places,
        "said": each.said,
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
