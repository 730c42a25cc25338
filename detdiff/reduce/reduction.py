"""What reducing gave: the pair that is left, and the steps that led to it. Needs no model and no mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from detdiff.explain import Verdict
from detdiff.scenario import Scenario


@dataclass(frozen=True)
class Wishes:
    """How to reduce. ``keep_flip``: a token has to flip still, where bits that differ would be enough. ``twin``: whether
    random weights may stand for the model's own; None: where those are no part of detdiff."""

    keep_flip: bool = False
    twin: bool | None = None


@dataclass(frozen=True)
class Step:
    """A pair that parts in the same way and is smaller than the one before; step 0 is the original.

    ``said`` is what was done. ``rows`` counts the rows of both runs, ``prompt_tokens`` and ``max_tokens`` are sums over
    the ``requests`` of side a. ``layers`` is the number of layers of a random-weight twin, None without one. ``key`` tells
    this pair from every other.
    """

    number: int
    said: str
    rows: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    layers: int | None
    key: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Step:
        """Raises TypeError for other keys."""
        return cls(**values)


@dataclass(frozen=True)
class Reduction:
    """``scenario_a`` and ``scenario_b`` are the smallest pair found, as they lie in ``folder``, and ``verdict`` is on them.

    ``rows_before`` and ``rows_after`` count the rows of both runs; ``tried`` counts the pairs that were run, the original
    among them. ``dropped`` are the settings that turned out not to be needed. ``finished`` is False where a budget ended
    the search.
    """

    scenario_a: Scenario
    scenario_b: Scenario
    verdict: Verdict
    rows_before: int
    rows_after: int
    steps: tuple[Step, ...]
    tried: int
    dropped: tuple[str, ...]
    twin: bool
    finished: bool
    folder: Path

    def __bool__(self) -> NoReturn:
        raise TypeError("a Reduction has no truth value; ask .rows_after")
