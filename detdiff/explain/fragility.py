"""How near each generated token was to another choice: its margin beside what a change of kernels does to logits.

Two runs that chose the same tokens so far show, token by token, by how much rounding moved the difference of the two
highest logits. Those movements are the measure: a token whose margin is smaller than many of them is fragile. Nothing
about their distribution is assumed, except that rounding favours no side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.tokens import Steps
from detdiff.errors import NothingComparable
from detdiff.trace import Trace

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
class Movements:
    """How far a change of kernels moved margins: absolute values, float64 [n], ascending."""

    sizes: Float64

    @classmethod
    def between(cls, a: Trace, b: Trace) -> Movements:
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


def fragility(a: Trace, b: Trace, movements: Movements | None = None) -> tuple[Fragility, ...]:
    """Every token of run ``a`` up to each request's flip, most fragile first.

    ``movements`` are those between the two runs unless others are given, such as those of other prompts. Raises
    NothingComparable where the traces share no token.
    """
    movements = movements or Movements.between(a, b)
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
