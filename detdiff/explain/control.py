"""A control: one re-run, or a few, that change one thing to test a cause. Needs no model and no mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

NOT_RUN: Final = "not_run"


@dataclass(frozen=True)
class Control:
    """What one control gave.

    ``result`` is a word for programs and ``said`` a sentence for people; ``forwards`` and ``seconds`` are what it took;
    ``detail`` holds its figures as JSON values. The result is ``not_run`` where it could not be run, and ``said`` says
    why.
    """

    name: str
    result: str
    said: str
    forwards: int
    seconds: float
    detail: Mapping[str, Any] = field(default_factory=dict)


class CannotRun(Exception):
    """Why a control does not apply to a case; becomes a control that is ``not_run``."""


class BudgetSpent(CannotRun):
    """No re-runs or forwards are left."""


@dataclass
class Budget:
    """How many ``reruns`` and ``forwards`` the controls of one case may take, together; None: any number.

    A forward that is run again after a snapshot counts as one; a re-run that ends early counts as what it ran.
    """

    reruns: int | None = None
    forwards: int | None = None
    reruns_spent: int = 0
    forwards_spent: int = 0

    def begin(self) -> None:
        """A re-run starts. Raises BudgetSpent."""
        if self.reruns is not None and self.reruns_spent >= self.reruns:
            raise BudgetSpent(f"the budget of {self.reruns} re-runs is spent")
        self._check()
        self.reruns_spent += 1

    def forward(self) -> None:
        """One more forward. Raises BudgetSpent before one that is too many."""
        self._check()
        self.forwards_spent += 1

    def spend(self, forwards: int) -> None:
        """Forwards that another part of the program ran."""
        self.forwards_spent += forwards

    def _check(self) -> None:
        if self.forwards is not None and self.forwards_spent >= self.forwards:
            raise BudgetSpent(f"the budget of {self.forwards} forwards is spent")
