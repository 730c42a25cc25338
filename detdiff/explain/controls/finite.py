"""The control ``finite``: which operation gave the first value that is not finite, and whether in a row of padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from detdiff.engines.base import FIRST_NOT_FINITE

from ..case import Case, Side
from ..control import Figures, Outcome, control
from ..facts import Facts


@dataclass(frozen=True)
class NotFiniteValue:
    """The first one of a run: ``site`` and ``forward``; ``row`` is its flat place there, and ``padding`` whether that
    belongs to no request. ``entry`` says that the cache already held one, in a place that the model never wrote so."""

    run: str
    site: str
    kind: str
    forward: int
    row: int
    padding: bool
    request: int | None
    position: int | None
    nan: bool
    entry: str = ""

    @property
    def sentence(self) -> str:
        """In a clause."""
        what = "a NaN" if self.nan else "an infinity"
        who = (
            "a row of padding"
            if self.padding
            else f"position {self.position} of request number {self.request}"
        )
        cache = f"; the cache held one before: {self.entry}" if self.entry else ""
        return (
            f"{self.site} ({self.kind}) gave {what} in run {self.run}, forward {self.forward}, row {self.row} ({who}), from "
            f"inputs that are finite{cache}"
        )


@dataclass(frozen=True, eq=False)
class FiniteFigures(Figures):
    """``first`` is the earliest of both runs, with its clause as ``said``; ``runs`` are the sides that have one."""

    first: Mapping[str, Any] | None = None
    runs: tuple[Side, ...] = ()


class FindsNotFinite(Protocol):
    """What an engine with the capability ``first_not_finite`` has."""

    def first_not_finite(self, case: Case, side: Side) -> NotFiniteValue | None:
        """Runs a side up to its first value that is not finite."""


def _spoken_for(facts: Facts) -> bool:
    oracle = facts.oracle
    return bool(facts.recorded.not_finite) or (oracle is not None and bool(oracle.not_finite))


@control("finite", after="oracle", needs=(FIRST_NOT_FINITE,), asked_by=_spoken_for)
def finite(case: Case) -> Outcome:
    """Run both sides again, up to the first value that is not finite in each. Result ``finite`` or ``not_finite``."""
    found: list[NotFiniteValue] = []
    for side in "ab":
        engine: Any = case.engine(side)
        first = engine.first_not_finite(case, side)
        if first is not None:
            found.append(first)
    if not found:
        return Outcome(
            "finite", "every value of every site is finite in both runs, padding included", FiniteFigures()
        )
    first = min(found, key=lambda each: each.forward)
    figures = FiniteFigures({**asdict(first), "said": first.sentence}, tuple(each.run for each in found))
    return Outcome("not_finite", first.sentence, figures)
