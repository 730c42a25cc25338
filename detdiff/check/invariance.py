"""The check itself: record the run alone and the compositions, compare, ask the level, keep what fails."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from detdiff.compare import Divergence, compare
from detdiff.errors import DetdiffError, NothingToCheck
from detdiff.explain import Control, Verdict
from detdiff.scenario import LAYOUTS, Scenario
from detdiff.trace import Trace

from . import golden
from .asked import Asked
from .base import Recorded
from .compositions import Composition
from .failure import Failure
from .kept import Keeper, relative, write_report
from .levels import GOLDEN, Ruling, rule
from .subject import Subject
from .tally import Tally

ORIGINS: Final = 1000
"""Origins that are judged at level ``bounded``: all of them, or as many spread over all."""


@dataclass(frozen=True)
class Run:
    """One run of a composition: its ``name`` says the seed and the batch where there are several."""

    name: str
    scenario: Scenario

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(request.id for request in self.scenario.requests)


@dataclass(frozen=True, eq=False)
class Seen:
    """What a run was found to be: the traces that were compared, and whether the level lets it through."""

    a: Trace | None
    b: Trace
    divergence: Divergence | None
    ruling: Ruling


@dataclass(frozen=True)
class Place:
    """Where a check runs: the test's file and name, whether golden traces are to be rewritten, and those that this session
    has ``written``."""

    file: Path
    test: str
    update: bool
    written: set[Path]


class ModelCheck:
    """One check of a model in several compositions."""

    def __init__(
        self,
        subject: Subject,
        asked: Asked,
        requests: Sequence[Mapping[str, Any]],
        recorded: Recorded,
        keeper: Keeper,
        place: Place,
    ) -> None:
        self._subject, self._asked, self._requests = subject, asked, requests
        self._recorded, self._keeper, self._place = recorded, keeper, place
        self._fresh: set[str] = set()
        """Layouts whose run alone was recorded for this check."""
        self.tally = Tally()

    def failures(self, wanted: Sequence[Composition]) -> list[Failure]:
        """Run every composition; those that are not let through, in order. What was compared is in ``tally``."""
        found = []
        for composition in wanted:
            started = time.perf_counter()
            try:
                failure = self._composition(composition)
            except DetdiffError as error:
                # It stands beside the others: one that cannot be run hides none of them, and is no pass.
                failure = Failure(
                    composition.name,
                    "each request alone (serial)",
                    _said(composition),
                    (str(error),),
                    checked=False,
                )
            self.tally.seconds += time.perf_counter() - started
            if failure is None or failure.checked:
                self.tally.compositions += 1
                self.tally.failed += failure is not None
            else:
                self.tally.unchecked += 1
            if failure is not None:
                found.append(failure)
        return found

    def _composition(self, composition: Composition) -> Failure | None:
        base = self._asked.base(self._subject.name, self._requests, composition.layout or LAYOUTS[0])
        failed: Failure | None = None
        more: list[str] = []
        together = composition.alone or self._asked.level == GOLDEN
        for run in self._runs(composition, base):
            seen = self._seen(run, base)
            self._count(seen)
            together = together or _together(seen.b)
            if not seen.ruling.passes:
                if failed is None:
                    failed = self._failure(composition, run, base, seen)
                else:
                    more.append(run.name)
            shutil.rmtree(seen.b.path, ignore_errors=True)
        if failed is None and not together:
            raise NothingToCheck(
                "No two requests were served at a time: each had ended when the next one came, so that this composition did not "
                "happen. Let them generate more tokens (max_tokens), or arrive closer to each other."
            )
        return None if failed is None else replace(failed, more=tuple(more))

    def _runs(self, composition: Composition, base: Scenario) -> Iterator[Run]:
        for seed in self._asked.seeds:
            scenarios = composition.draw(base, seed)
            for n, scenario in enumerate(scenarios):
                name = composition.name
                name += f", seed {seed}" if len(self._asked.seeds) > 1 or seed else ""
                name += f", batch {n}" if len(scenarios) > 1 else ""
                yield Run(name, scenario)

    def _seen(self, run: Run, base: Scenario) -> Seen:
        if self._asked.level == GOLDEN:
            return self._against_golden(run)
        alone = self._recorded.base(self._subject, base)
        if alone.fresh:
            self._fresh.add(base.schedule.layout)
        composed = self._recorded.run(self._subject, run.scenario)
        seen = self._ruled(alone.trace, composed, run)
        if not seen.ruling.passes and base.schedule.layout not in self._fresh:
            # The model may have been changed since the run alone was recorded, by this test or by another one.
            alone = self._recorded.base(self._subject, base, again=True)
            self._fresh.add(base.schedule.layout)
            seen = self._ruled(alone.trace, composed, run)
            if seen.ruling.passes and not self._repeats(alone.trace, base):
                seen = replace(
                    seen, ruling=Ruling(("the run alone, once more, gave other bits: it does not repeat",))
                )
        return seen

    def _repeats(self, alone: Trace, base: Scenario) -> bool:
        again = self._recorded.run(self._subject, base)
        found = compare(alone, again).identical
        shutil.rmtree(again.path, ignore_errors=True)
        return found

    def _ruled(self, alone: Trace, composed: Trace, run: Run) -> Seen:
        divergence = compare(alone, composed, requests=run.ids)

        def oracle() -> Control:
            from detdiff.explain.case import Case
            from detdiff.explain.investigate import judged_origins

            return judged_origins(Case.of(alone, composed, divergence, loaded=self._subject.loaded), ORIGINS)

        return Seen(alone, composed, divergence, rule(self._asked.level, divergence, oracle))

    def _against_golden(self, run: Run) -> Seen:
        made = self._recorded.run(self._subject, golden.portable(run.scenario))
        path = golden.place(self._place.file, self._place.test, run.name)
        found = golden.check(path, made, update=self._place.update, shown=relative(path))
        if not found.why and path in self._place.written:
            # A plugin that runs failed tests once more must not make a pass of it.
            found = replace(
                found, why=(f"{relative(path)} was written by this very session; run the test again",)
            )
        if found.wrote:
            self._place.written.add(path)
        return Seen(found.committed, made, found.divergence, Ruling(found.why))

    def _count(self, seen: Seen) -> None:
        if seen.divergence is not None:
            self.tally.rows += seen.divergence.compared.rows
            self.tally.tokens += sum(
                min(request.generated_a, request.generated_b) for request in seen.divergence.requests
            )
        sites = max(len(seen.b.sites), self.tally.sites.get(self._subject.name, 0))
        self.tally.sites[self._subject.name] = sites

    def _failure(self, composition: Composition, run: Run, base: Scenario, seen: Seen) -> Failure:
        compared = self._asked.level != GOLDEN
        failure = Failure(
            composition.name,
            "each request alone (serial)" if compared else "the golden trace",
            f"{_said(composition)}{run.name.removeprefix(composition.name)}",
            seen.ruling.why,
            seen.divergence,
        )
        if seen.a is None or seen.divergence is None:
            return failure
        alone = replace(base, requests=tuple(r for r in base.requests if r.id in run.ids))
        scenarios = (alone, run.scenario) if self._subject.again and compared else ()
        part = run.name.removeprefix(composition.name).strip(", ")
        verdict = self._verdict(seen.a, seen.b) if self._asked.explain and compared else None
        failure = replace(failure, verdict=verdict)
        try:
            kept = self._keeper.keep(composition.name, part, seen.a, seen.b, scenarios)
            kept = write_report(kept, seen.a, seen.b, seen.divergence, verdict)
        except OSError as error:
            # What was found is to be said, whatever the disk or another session at the same place does.
            return replace(failure, unkept=str(error))
        return replace(failure, kept=kept)

    def _verdict(self, a: Trace, b: Trace) -> Verdict:
        from detdiff.explain import explain

        return explain(a, b, loaded=self._subject.loaded)


def _together(trace: Trace) -> bool:
    """Whether two requests at least were served at a time, if not in one forward."""
    spans: dict[int, tuple[int, int]] = {}
    for number, forward in enumerate(trace.forwards()):
        for row in forward["rows"]:
            first, _ = spans.get(row["request"], (number, number))
            spans[row["request"]] = first, number
    ordered = sorted(spans.values())
    return any(later[0] <= earlier[1] for earlier, later in pairwise(ordered))


def _said(composition: Composition) -> str:
    return f"{composition.written}, layout {composition.layout}"
