"""A verdict: what kind of difference it is, on which evidence, after which controls. Needs no model and no mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Literal, NoReturn

from detdiff.compare.divergence import Divergence

from .control import Control
from .fragility import Fragility

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
    """One fact: ``fact`` names it, ``said`` is a sentence, ``detail`` holds its figures as JSON values.

    ``decided`` is true for the facts by which the verdict was reached.
    """

    fact: str
    said: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    decided: bool = False


@dataclass(frozen=True)
class Verdict:
    """What kind of difference it is. ``rule`` names the row of the table of rules that decided.

    ``said`` is the verdict in a sentence or two and ``advice`` what to do about it, empty where nothing is to be done.
    ``missing`` says, for ``undetermined``, what was not known. ``inconclusive`` is true where nothing diverged and not
    everything could be compared, or nothing was comparable; ``divergence`` is None only in that last case. ``fragile`` are
    the tokens of run a up to each flip, those nearest to another choice first; empty where nothing moved.
    """

    kind: Kind
    said: str
    evidence: tuple[Evidence, ...]
    controls: tuple[Control, ...]
    divergence: Divergence | None
    rule: str = ""
    advice: str = ""
    missing: tuple[str, ...] = ()
    fragile: tuple[Fragility, ...] = ()

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
