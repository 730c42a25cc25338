"""What a packed run's next step depends on, so that it can be run again from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .forced import Forced
from .sampling import Draw
from .work import Work


class StopRun(Exception):
    """Raised before a step to end a run there."""


@dataclass(frozen=True)
class Progress:
    """How far one request is: rows in the caches, tokens generated, and what its sampler remembers."""

    done: int
    generated: tuple[int, ...]
    sampled: Any

    @classmethod
    def of(cls, work: Work) -> Progress:
        return cls(work.done, tuple(work.generated), _sampled(work.sampler))

    def put(self, work: Work) -> None:
        """Make ``work`` stand here."""
        work.done, work.generated = self.done, list(self.generated)
        if isinstance(work.sampler, Draw):
            work.sampler.index = self.sampled
        elif isinstance(work.sampler, Forced):
            work.sampler.chosen[:] = self.sampled


@dataclass(frozen=True)
class Snapshot:
    """A packed engine before one of its steps. ``waiting`` and ``active`` are request indices in order.

    ``forwards`` and ``steps`` are the numbers of the next forward of any model and of the target's next one; ``caches``
    are by model; ``counts`` are (proposed, accepted) by request.
    """

    progress: tuple[Progress, ...]
    waiting: tuple[int, ...]
    active: tuple[int, ...]
    forwards: int
    steps: int
    caches: tuple[object, ...]
    counts: Mapping[int, tuple[int, int]]


def _sampled(sampler: Any) -> Any:
    if isinstance(sampler, Draw):
        return sampler.index
    return list(sampler.chosen) if isinstance(sampler, Forced) else None
