"""What a control is: a re-run, or a few, that change one thing to test a cause, and the registry of all of them.

A control is one file in ``controls/`` and one function of a ``Case`` under ``@control(...)``. Needs no model library.
``smallest`` finds the smallest part of a set that still has an effect, by halving first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

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

    ``result`` is a word for programs, ``sentence`` is for people; ``forwards`` and ``seconds`` are what it took;
    ``detail`` is the control's own ``Figures``, or the JSON object that was read of them. The result is ``not_run`` where
    it could not be run, and ``sentence`` says why.
    """

    name: str
    result: str
    sentence: str
    forwards: int
    seconds: float
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A control's result, its sentence and its figures, before it is known what it took."""

    result: str
    sentence: str
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
    ``asked_by`` says whether the facts so far are worth its re-runs, or why it need not be run where that is worth saying; a control
    that is asked for by name is run anyway.
    """

    name: str
    run: Callable[[Case], Outcome]
    needs: tuple[str, ...]
    after: str | None
    asked_by: Callable[[Facts], bool | str]


_REGISTERED: dict[str, Registered] = {}


def control(
    name: str,
    *,
    after: str | None,
    needs: tuple[str, ...] = (),
    asked_by: Callable[[Facts], bool | str] = lambda facts: True,
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


T = TypeVar("T")


def smallest(items: Sequence[T], works: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of ``items`` that works and of which no single item can be left out; ``items`` as a whole must work.

    Where one item does it alone, that takes at most two trials for each halving of their number. ``works`` is asked with
    items in their order, later ones first, and need not be monotonous.
    """
    found = list(items)
    parts = 2
    while len(found) > 1:
        cut = [found[n * len(found) // parts : (n + 1) * len(found) // parts] for n in range(parts)]
        part = next((each for each in reversed(cut) if works(each)), None)
        if part is not None:
            found, parts = part, 2
            continue
        if parts > 2:
            rest = next((others for others in _without_one(cut) if works(others)), None)
            if rest is not None:
                found, parts = rest, max(parts - 1, 2)
                continue
        if parts >= len(found):
            break
        parts = min(2 * parts, len(found))
    return found


def _without_one(cut: list[list[T]]) -> list[list[T]]:
    return [[item for m, each in enumerate(cut) if m != n for item in each] for n in range(len(cut))]


def by_groups(
    items: Sequence[T], keys: Sequence[Callable[[T], object]], works: Callable[[Sequence[T]], bool]
) -> list[T]:
    """``smallest``, group by group: whole groups of the first key first, then of the next, at last single items."""
    found = list(items)
    for key in keys:
        groups: dict[object, list[T]] = {}
        for item in found:
            groups.setdefault(key(item), []).append(item)
        kept = smallest(list(groups.values()), lambda some: works(_joined(some)))
        found = _joined(kept)
    return smallest(found, works)


def _joined(groups: Sequence[Sequence[T]]) -> list[T]:
    return [item for group in groups for item in group]


def ranges(positions: Sequence[int]) -> list[list[int]]:
    """Positions as inclusive ranges."""
    found: list[list[int]] = []
    for position in sorted(set(positions)):
        if found and found[-1][1] == position - 1:
            found[-1][1] = position
        else:
            found.append([position, position])
    return found
