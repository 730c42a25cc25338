"""A verdict: what kind of difference it is, on which evidence, after which controls, with which fragile tokens.

Needs no model and no mlx.

Fragility is how near each generated token was to another choice: its margin beside what a change of kernels does to
logits. Two runs that chose the same tokens so far show, token by token, by how much rounding moved the difference of the
two highest logits. Those movements are the measure: a token whose margin is smaller than many of them is fragile. Nothing
about their distribution is assumed, except that rounding favours no side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.divergence import Divergence
from detdiff.compare.tokens import Steps
from detdiff.errors import NothingComparable
from detdiff.trace import Trace

from .control import Control

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Fragility:
    """One generated token. ``margin`` is the top logit minus the second one; ``delta`` by how much the other run moved
    it, None where the other run cannot say; ``chance`` that a change like the measured ones flips the token."""

    request: str
    index: int
    token: int
    margin: float
    delta: float | None
    chance: float


@dataclass(frozen=True, eq=False)
class MarginMovements:
    """How far a change of kernels moved margins: absolute values, float64 [n], ascending."""

    sizes: Float64

    @classmethod
    def between(cls, a: Trace, b: Trace) -> MarginMovements:
        """From every token that both runs chose after equal tokens, the flip's own included.

        Raises NothingComparable where the traces share none.
        """
        sizes = [delta for *_, delta in _tokens(a, b) if delta is not None]
        if not sizes:
            raise NothingComparable(
                f"Run a ({a.path}) and run b ({b.path}) share no generated token whose two highest logits are known in both. "
                "Expected requests of the same id that generate at least one token each. Record both again."
            )
        return cls(np.sort(np.abs(np.array(sizes, np.float64))))

    def chance(self, margin: float) -> float:
        """The chance that one of these movements, of either sign alike, reverses a margin.

        A movement that equals the margin makes a tie, which either token may win; a tie that does not move stays as it
        was decided. Add-one smoothing keeps what was never seen possible.
        """
        count = len(self.sizes)
        above = count - int(np.searchsorted(self.sizes, margin, side="right"))
        ties = count - int(np.searchsorted(self.sizes, margin, side="left")) - above if margin > 0 else 0
        return (above + ties / 2 + 1) / (2 * (count + 2))


def fragility(a: Trace, b: Trace, movements: MarginMovements | None = None) -> tuple[Fragility, ...]:
    """Every token of run ``a`` up to each request's flip, most fragile first.

    ``movements`` are those between the two runs unless others are given, such as those of other prompts. Raises
    NothingComparable where the traces share no token.
    """
    movements = movements or MarginMovements.between(a, b)
    found = []
    for request, index, token, margin, delta in _tokens(a, b):
        found.append(Fragility(request, index, token, margin, delta, movements.chance(margin)))
    return tuple(sorted(found, key=lambda token: (-token.chance, token.request, token.index)))


def _tokens(a: Trace, b: Trace) -> list[tuple[str, int, int, float, float | None]]:
    """(request, index, a's token, its margin, movement) of the tokens up to each flip."""
    numbers = {str(request["id"]): number for number, request in enumerate(b.requests)}
    made_a, made_b = a.generated(), b.generated()
    found = []
    for number, request in enumerate(a.requests):
        name = str(request["id"])
        if name not in numbers or list(request["tokens"]) != list(b.requests[numbers[name]]["tokens"]):
            continue
        steps_a, steps_b = Steps.of(made_a, number), Steps.of(made_b, numbers[name])
        margins, moved = steps_a.margins(), steps_a.moved(steps_b)
        for index in range(min(len(steps_a), len(steps_b))):
            delta = None if np.isnan(moved[index]) else float(moved[index])
            found.append((name, index, int(steps_a.token[index]), float(margins[index]), delta))
            if steps_a.token[index] != steps_b.token[index]:
                break
    return found


Kind = Literal["identical", "numerics", "bug", "configuration", "nondeterminism", "undetermined"]
KINDS: Final[tuple[Kind, ...]] = (
    "identical",
    "numerics",
    "bug",
    "configuration",
    "nondeterminism",
    "undetermined",
)


@dataclass(frozen=True)
class Evidence:
    """One fact: ``fact`` names it, ``sentence`` says it, ``detail`` holds its figures as JSON values.

    ``decided`` is true for the facts by which the verdict was reached.
    """

    fact: str
    sentence: str
    decided: bool = field(default=False, kw_only=True)
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What kind of difference it is. ``rule`` names the row of the table of rules that decided.

    ``sentence`` is the verdict in a sentence or two and ``advice`` what to do about it, empty where nothing is to be done.
    ``missing`` says, for ``undetermined``, what was not known. ``inconclusive`` is true where nothing diverged and not
    everything could be compared, or nothing was comparable; ``divergence`` is None only in that last case. ``fragile`` are
    the tokens of run a up to each flip, those nearest to another choice first; empty where nothing moved.
    """

    kind: Kind
    sentence: str
    rule: str = ""
    advice: str = ""
    missing: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    controls: tuple[Control, ...] = ()
    fragile: tuple[Fragility, ...] = ()
    divergence: Divergence | None = None

    def __bool__(self) -> NoReturn:
        raise TypeError("a Verdict has no truth value; ask .kind")

    def __str__(self) -> str:
        """Its report as text."""
        # Reports are made of verdicts, so that no import here may name them.
        text: str = import_module("detdiff.report").verdict_text(self)
        return text

    def control(self, name: str) -> Control | None:
        """The control of that name, or None where it was not asked for."""
        return next((control for control in self.controls if control.name == name), None)

    @property
    def deciding(self) -> tuple[Evidence, ...]:
        """The evidence by which the verdict was reached."""
        return tuple(each for each in self.evidence if each.decided)
