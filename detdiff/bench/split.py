"""From how many requests at once one batch pays: its throughput beside that of its rows split, and what calls of M rows cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from detdiff.engines.base import CONTINUOUS, SPLIT_ROWS, CostsRows, Engine
from detdiff.errors import PolicyUnusable
from detdiff.probe.measures import RowCosts
from detdiff.scenario import Scenario

from .figures import factor
from .measure import CLOCKS, PolicyResult, Progress, measure
from .policies import policies
from .runs import Spread

LEVELS: Final = (*range(2, 9), 12, 16)
"""Requests at once that are measured."""


@dataclass
class SplitLevel:
    """So many requests at once: one after the other, in one batch, and in one whose rows are split, where the engine can."""

    serial: PolicyResult
    whole: PolicyResult
    split: PolicyResult | None = None

    @property
    def at_once(self) -> int:
        return self.whole.policy.at_once

    @property
    def results(self) -> list[PolicyResult]:
        return [each for each in (self.serial, self.whole, self.split) if each is not None]

    @property
    def gain(self) -> Spread | None:
        """The batch's throughput over that of its rows split, or of one request after the other where nothing can be split."""
        return factor(self.whole, self.split or self.serial)


@dataclass
class SplitSearch:
    """What was measured, from few requests at once to many. ``costs`` are by number of rows; ``finished`` is False where it was interrupted."""

    levels: list[SplitLevel]
    rounds: int
    workload: str
    environment: dict[str, Any]
    costs: Sequence[RowCosts] = field(default_factory=list)
    finished: bool = False

    @property
    def pays_from(self) -> int | None:
        """The least number at once from which on one batch is at no number slower in every round: a difference that changes its sign
        from round to round is none."""
        found = None
        for level in reversed(self.levels):
            gain = level.gain
            if gain is None or gain.high <= 1:
                break
            found = level.at_once
        return found

    @property
    def split_rows(self) -> int | None:
        """The most rows that are best split, of those measured; None where one batch always pays."""
        pays = self.pays_from
        return max(
            (each.at_once for each in self.levels if pays is None or each.at_once < pays), default=None
        )


def split_levels(scenario: Scenario, engine: Engine, most: int) -> list[SplitLevel]:
    """The levels up to ``most`` of a scenario with at least as many requests.

    Raises PolicyUnusable for an engine that runs no batches, and for fewer than two requests.
    """
    kind = "continuous" if CONTINUOUS in engine.capabilities else "static"
    found = []
    scenario = replace(scenario, kernels=replace(scenario.kernels, split_rows=None))
    for count in LEVELS:
        if count <= most:
            requests = replace(scenario, requests=scenario.requests[:count])
            asked = [f"{kind}:{count}"]
            if SPLIT_ROWS in engine.capabilities:
                asked.append(f"{kind}:{count} split_rows={count}")
            found.append(SplitLevel(*map(PolicyResult, policies(requests, asked))))
    if not found:
        raise PolicyUnusable(
            f"The threshold of one batch was asked for with {most} request; expected 2 at least. Raise --requests."
        )
    return found


def find_split(engine: Engine, search: SplitSearch, seed: int = 0, progress: Progress | None = None) -> None:
    """Measure what ``search`` asks for; what was measured stays in it where this is interrupted."""
    results = [result for level in search.levels for result in level.results]
    if isinstance(engine, CostsRows):
        if progress is not None:
            progress("what calls of M rows cost", 0, 1)
        rows = (1, *(level.at_once for level in search.levels))
        clock = CLOCKS[search.environment["clock"]]
        search.costs = engine.row_costs(search.levels[-1].whole.policy.scenario, rows, clock)
    measure(engine, results, search.rounds, seed=seed, clock=search.environment["clock"], progress=progress)
    search.finished = True


def other_answers(result: PolicyResult, baseline: PolicyResult) -> int | None:
    """How many requests got other tokens in any round than in the same round of ``baseline``; None where none are known."""
    pairs = list(zip(result.runs, baseline.runs, strict=False))
    if not pairs or not all(each.answers for pair in pairs for each in pair):
        return None
    return len(
        {
            n
            for a, b in pairs
            for n, two in enumerate(zip(a.answers, b.answers, strict=True))
            if two[0] != two[1]
        }
    )
