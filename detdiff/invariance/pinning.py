"""What an engine that can pin its model gives: groups of sites that are computed alike, and the model with them pinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from detdiff.probe.operation import ProbeTarget
from detdiff.scenario import KernelPlan

from .policies import RowPolicy

KEYS = "keys"
"""Attention: each row as a call of its own over the keys that it sees. Elsewhere the words are those of `policies`."""

FEWEST = 5
PATIENCE = 12.0

SitePolicy = RowPolicy | str
"""Of rows a `RowPolicy`; of attention, experts and activations a path: native, keys, rows, tile:N."""
Pins = Mapping["SiteGroup", SitePolicy]


@dataclass(frozen=True)
class SiteGroup:
    """Sites of one ``kind`` (linear, head, switch, activation, attention) and shape, which one policy serves."""

    kind: str
    shape: str
    sites: tuple[str, ...]

    @property
    def by_rows(self) -> bool:
        """Whether its calls are rows of equals, which a probe can sweep."""
        return self.kind in ("linear", "head")

    def __str__(self) -> str:
        more = len(self.sites) - 1
        return f"{self.kind} {self.shape} ({self.sites[0]}{f' and {more:,} more' if more else ''})"


class Pinnable(Protocol):
    """A model whose kernels can be pinned. ``notes`` are sentences about what this engine's pins depend on."""

    @property
    def groups(self) -> Sequence[SiteGroup]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def priced(self) -> str:
        """Why times here say nothing of the price; empty where they do."""

    def targets(self, group: SiteGroup) -> Sequence[ProbeTarget]:
        """Of a group by rows: what to probe, the first one with calls as policies make them, the others as the model makes them."""

    def sizes(self, group: SiteGroup, sizes: Sequence[int]) -> Sequence[int]:
        """Of these numbers of rows those that are small enough to probe."""

    def paths(self, group: SiteGroup) -> Sequence[str]:
        """The paths of a group not by rows, cheapest first."""

    def first_difference(self, group: SiteGroup, path: str, seed: int) -> str:
        """In which arrangement of drawn rows a row came out otherwise than alone, in words; empty where none did."""

    def plan(self, pins: Pins) -> KernelPlan | None:
        """The kernel plan that says the same in a scenario; None where the engine takes none."""

    def pinned(self, pins: Pins) -> AbstractContextManager[Any]:
        """The model under these pins while the block lasts."""

    def step_seconds(self, batch: int, rounds: int, pins: Pins) -> Sequence[tuple[float, float]]:
        """Of each round: the seconds of a decode step of ``batch`` requests as the model is, and under the pins."""


class PinsKernels(Protocol):
    """What an engine with the capability ``invariance`` has."""

    def pinning(self, kernels: KernelPlan) -> Pinnable:
        """Its model, whose kernels can be pinned; ``kernels`` is what runs it otherwise."""


def paired_seconds(
    native: Callable[[], Any],
    held: Callable[[], Any],
    pinned: Callable[[], AbstractContextManager[Any]],
    rounds: int,
) -> list[tuple[float, float]]:
    """Seconds of ``native`` as the model is and of ``held`` within ``pinned``, for each round, in changing order after one that
    warms up; of fewer than ``rounds``, but no fewer than `FEWEST`, once they took `PATIENCE` seconds."""

    def timed(step: Callable[[], Any]) -> float:
        # Pins that were just put on, or taken off, make one call slow.
        for _ in range(2):
            start = perf_counter()
            step()
        return perf_counter() - start

    def within() -> float:
        with pinned():
            return timed(held)

    found: list[tuple[float, float]] = []
    began = perf_counter()
    for turn in range(-1, rounds):
        if len(found) >= FEWEST and perf_counter() - began > PATIENCE:
            break
        if turn % 2:
            one, other = timed(native), within()
        else:
            other, one = within(), timed(native)
        if turn >= 0:
            found.append((one, other))
    return found
