"""What a control is: a re-run, or a few, that change one thing to test a cause, and the registry of all of them.

A control is one file in ``controls/`` and one function of a ``Case`` under ``@control(...)``. Needs no model library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .case import Case
    from .facts import Facts

NOT_RUN: Final = "not_run"


class Figures(Mapping[str, Any]):
    """The base of what controls find out: a frozen dataclass, which also reads as the object that JSON has of it.

    A field that is None by default is no key while it is None.
    """

    def __getitem__(self, key: str) -> Any:
        if key not in {each.name for each in dataclasses.fields(self)}:  # type: ignore[arg-type]
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            if each.default is not None or getattr(self, each.name) is not None:
                yield each.name

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Control:
    """What one control gave.

    ``result`` is a word for programs and ``said`` a sentence for people; ``forwards`` and ``seconds`` are what it took;
    ``detail`` is the control's own ``Figures``, or the JSON object that was read of them. The result is ``not_run`` where
    it could not be run, and ``said`` says why.
    """

    name: str
    result: str
    said: str
    forwards: int
    seconds: float
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A control's result, its sentence and its figures, before it is known what it took."""

    result: str
    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Registered:
    """A control as it was registered.

    ``needs`` are the capabilities that the engines of both sides must have, and ``after`` is the control that it follows.
    ``asked_by`` says whether the facts so far are worth its re-runs; a control that is asked for by name is run anyway.
    """

    name: str
    run: Callable[[Case], Outcome]
    needs: tuple[str, ...]
    after: str | None
    asked_by: Callable[[Facts], bool]


_REGISTERED: dict[str, Registered] = {}


def control(
    name: str,
    *,
    after: str | None,
    needs: tuple[str, ...] = (),
    asked_by: Callable[[Facts], bool] = lambda facts: True,
) -> Callable[[Callable[[Case], Outcome]], Callable[[Case], Outcome]]:
    """Registers a function of a case as the control ``name``, which is run after the control ``after``."""

    def register(run: Callable[[Case], Outcome]) -> Callable[[Case], Outcome]:
        _REGISTERED[name] = Registered(name, run, needs, after, asked_by)
        return run

    return register


def registered() -> dict[str, Registered]:
    """All controls, by name, in the order in which they are run."""
    import_module(".controls", __package__)
    found: dict[str, Registered] = {}

    def follow(name: str | None) -> None:
        for each in sorted(_REGISTERED.values(), key=lambda each: each.name):
            if each.after == name and each.name not in found:
                found[each.name] = each
                follow(each.name)

    follow(None)
    return found
