"""The check itself: record the run alone and the compositions, compare, ask the level, keep what fails."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from detdiff.compare import Divergence, RequestDivergence, compare
from detdiff.engines.base import FORWARDS, TEXT
from detdiff.engines.function import EngineRequest
from detdiff.errors import CheckSettingInvalid, DetdiffError, EngineAnswerInvalid, NothingToCheck
from detdiff.explain import Control, Verdict
from detdiff.report import headline
from detdiff.report.words import escaped
from detdiff.scenario import Scenario
from detdiff.trace import Trace
from detdiff.trace.store import remove_files

from .checked_engines import CheckedEngine, CheckedEngines, RecordedRuns
from .failure import (
    CheckCounts,
    CheckFailure,
    Keeper,
    against_committed,
    place,
    portable,
    relative,
    write_report,
)
from .levels import Ruling, rule
from .settings import (
    BOUNDED,
    EXACT,
    GOLDEN,
    LAYOUTS_BY_DEFAULT,
    TOKENS,
    CheckedSchedule,
    CheckSettings,
    fitting,
    requests,
)

_UNMET: Final = (
    "No two requests were served at a time, as far as can be seen: each had ended when the next one came, or nothing shows that it had not, so that this composition did not happen. Let "
    "them generate more tokens (max_tokens), or arrive closer to each other."
)
ORIGINS: Final = 1000
"""Origins that are judged at level ``bounded``: all of them, or as many spread over all."""


@dataclass(frozen=True)
class CompositionRun:
    """One run of a composition: its ``name`` says the seed and the batch where there are several."""

    name: str
    scenario: Scenario

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(request.id for request in self.scenario.requests)


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """What a run was found to be: the traces that were compared, and whether the level lets it through."""

    a: Trace | None
    b: Trace
    divergence: Divergence | None
    ruling: Ruling


@dataclass(frozen=True)
class CheckLocation:
    """Where a check runs: the test's file and name, whether golden traces are to be rewritten, and those that this session
    has ``written``."""

    file: Path
    test: str
    update: bool
    written: set[Path]


def prepared(
    checked: CheckedEngine,
    asked: CheckSettings,
    wanted: Sequence[CheckedSchedule],
    *,
    by_default: bool = False,
) -> tuple[list[dict[str, Any]], list[CheckedSchedule]]:
    """The requests as tables of a scenario, and the compositions that this engine and so many requests can make.

    Schedules ``by_default`` fit the number of prompts. Raises CheckSettingInvalid for what the engine cannot be told, and
    NothingToCheck.
    """
    engine = checked.engine
    if not checked.laid_out:
        _refuse(checked, asked)
        # How rows are laid out is the engine's own.
        wanted = list(dict.fromkeys(replace(each, layout=None) for each in wanted))
    vocabulary = engine.identity.get("vocab_size")
    encode = (lambda text: engine.encode(text, False)) if TEXT in engine.capabilities else None
    tables = requests(asked.prompts, encode, vocabulary, max(each.least for each in wanted))
    if by_default:
        wanted = fitting(wanted, len(tables))
    if not checked.laid_out:
        for table in tables:
            if "prompt" in table and not getattr(engine, "asks_text", False):
                # What cannot be encoded is said before anything runs.
                table["tokens"] = engine.encode(table.pop("prompt"), False)
    return tables, list(wanted)


def _refuse(checked: CheckedEngine, asked: CheckSettings) -> None:
    """Raises CheckSettingInvalid for what an engine of one's own cannot be told."""
    given = [
        key
        for key, differs in (
            ("layouts", tuple(asked.layouts) != LAYOUTS_BY_DEFAULT),
            ("kernels", asked.kernels != "native"),
            *((key, True) for key in asked.settings),
        )
        if differs
    ]
    if given:
        raise CheckSettingInvalid(
            f"{given[0]} cannot be told to the engine {checked.label}, which is asked for requests under a schedule alone. Leave "
            "it out, or set it in the engine."
        )
    if asked.level == BOUNDED:
        raise CheckSettingInvalid(
            f"level is {asked.level!r}, which an engine of its own cannot be checked at: what rounding may do there is not "
            f"known. Ask for {EXACT} or {TOKENS}."
        )


class ModelCheck:
    """One check of an engine in several compositions."""

    def __init__(
        self,
        checked: CheckedEngine,
        asked: CheckSettings,
        requests: Sequence[Mapping[str, Any]],
        recorded: RecordedRuns,
        keeper: Keeper | None = None,
        place: CheckLocation | None = None,
    ) -> None:
        self._checked, self._asked, self._requests = checked, asked, requests
        self._recorded, self._keeper, self._place = recorded, keeper, place
        self._fresh: set[str] = set()
        """Layouts whose run alone was recorded for this check."""
        self.tally = CheckCounts()

    def failures(self, wanted: Sequence[CheckedSchedule]) -> list[CheckFailure]:
        """Run every composition; those that are not let through, in order. What was compared is in ``tally``."""
        found = []
        for composition in wanted:
            started = time.perf_counter()
            try:
                failure = self._composition(composition)
            except DetdiffError as error:
                # It stands beside the others: one that cannot be run hides none of them, and is no pass.
                failure = CheckFailure(
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
        return found or self.asked_again(wanted[0]) if wanted else found

    def _base(self, composition: CheckedSchedule) -> Scenario:
        engine = self._checked.engine.name
        return self._asked.base(self._checked.name, self._requests, composition.layout, engine)

    def asked_again(self, composition: CheckedSchedule) -> list[CheckFailure]:
        """Where nothing failed: the first request of an engine of one's own once more, after all others. It may remember."""
        if self._checked.laid_out or self._asked.level == GOLDEN:
            return []
        base = self._base(composition)
        alone = self._recorded.base(self._checked, base).trace
        first = replace(base, requests=base.requests[:1])
        warm = self._recorded.run(self._checked, first, warm=True)
        found = compare(alone, warm, requests=[first.requests[0].id])
        remove_files(warm.path)
        if found.identical or rule(self._asked.level, found, self._no_oracle).passes:
            return []
        self.tally.failed += 1
        why = (
            f"{first.requests[0].id} alone, asked again after the others, is another answer: it depends on what was served "
            "before, or does not repeat, and so do the runs that were compared"
        )
        return [CheckFailure("again", "each request alone, first", "the first request, last", (why,), found)]

    def _no_oracle(self) -> Control:
        raise AssertionError("level bounded is not for engines of one's own")

    def _composition(self, composition: CheckedSchedule) -> CheckFailure | None:
        base = self._base(composition)
        failed: CheckFailure | None = None
        more: list[str] = []
        together = composition.one_at_a_time or self._asked.level == GOLDEN
        for run in self._runs(composition, base):
            seen = self.seen_of(run, base)
            self._count(seen)
            if seen.b.unmet and (seen.divergence is None or seen.divergence.stage is None):
                raise NothingToCheck(_UNMET)
            together = together or FORWARDS in seen.b.lacks or _together(seen.b)
            if not seen.ruling.passes:
                if failed is None:
                    failed = self._failure(composition, run, base, seen)
                else:
                    more.append(run.name)
            remove_files(seen.b.path)
        if failed is None and not together:
            raise NothingToCheck(_UNMET)
        return None if failed is None else replace(failed, more=tuple(more))

    def _runs(self, composition: CheckedSchedule, base: Scenario) -> Iterator[CompositionRun]:
        for seed in self._asked.seeds:
            scenarios = composition.draw(base, seed)
            for n, scenario in enumerate(scenarios):
                name = composition.name
                name += f", seed {seed}" if len(self._asked.seeds) > 1 or seed else ""
                name += f", batch {n}" if len(scenarios) > 1 else ""
                yield CompositionRun(name, scenario)

    def seen(self, composition: CheckedSchedule) -> Iterator[tuple[CompositionRun, ComparedRun]]:
        """The runs of a composition, and what each was found to be."""
        base = self._base(composition)
        for run in self._runs(composition, base):
            yield run, self.seen_of(run, base)

    def seen_of(self, run: CompositionRun, base: Scenario) -> ComparedRun:
        """A run against ``base``, its requests alone."""
        if self._asked.level == GOLDEN:
            return self._against_golden(run)
        alone = self._recorded.base(self._checked, base)
        if alone.fresh:
            self._fresh.add(base.schedule.layout)
        composed = self._recorded.run(self._checked, run.scenario)
        seen = self._ruled(alone.trace, composed, run)
        if not self._checked.laid_out:
            return seen if seen.ruling.passes else self._steady(seen, base, run)
        if not seen.ruling.passes and base.schedule.layout not in self._fresh:
            # The model may have been changed since the run alone was recorded, by this test or by another one.
            alone = self._recorded.base(self._checked, base, again=True)
            self._fresh.add(base.schedule.layout)
            seen = self._ruled(alone.trace, composed, run)
            if seen.ruling.passes and not self._repeats(alone.trace, base):
                seen = replace(
                    seen, ruling=Ruling(("the run alone, once more, gave other bits: it does not repeat",))
                )
        return seen

    def _steady(self, seen: ComparedRun, base: Scenario, run: CompositionRun) -> ComparedRun:
        """Whether it is about the batch: both sides once more. What does not repeat, or remembers, is said instead."""
        assert seen.a is not None
        again = self._recorded.run(self._checked, base)
        if self._same(seen.a, again, run):
            if self._same(seen.b, self._recorded.run(self._checked, run.scenario), run):
                return seen
            why = (
                "the batch, run again, gives other bits: it does not repeat, so that what the batch changes is not known; look "
                "for a race"
            )
            return replace(seen, ruling=Ruling((why, *seen.ruling.why)))
        if self._same(again, self._recorded.run(self._checked, base), run):
            why = (
                "alone again, after other requests, it gives other bits, and those once more: it depends on what was served "
                "before (a cache of prefixes, a warm-up, a stale buffer); let the engine have a reset(), or serve each run anew"
            )
        else:
            why = (
                "alone it gives other bits each time it is run, so that what the batch changes is not known: look for a race, "
                "or for sampling that is not greedy"
            )
        return replace(seen, ruling=Ruling((why,)))

    def _same(self, one: Trace, other: Trace, run: CompositionRun) -> bool:
        found = compare(one, other, requests=run.ids)
        return rule(self._asked.level, found, self._no_oracle).passes

    def _repeats(self, alone: Trace, base: Scenario) -> bool:
        again = self._recorded.run(self._checked, base)
        found = compare(alone, again).identical
        remove_files(again.path)
        return found

    def _ruled(self, alone: Trace, composed: Trace, run: CompositionRun) -> ComparedRun:
        if not self._checked.laid_out:
            _same_kinds(alone, composed, self._checked.label)
        divergence = compare(alone, composed, requests=run.ids)
        if not self._checked.laid_out:
            return ComparedRun(
                alone, composed, divergence, rule(self._asked.level, divergence, self._no_oracle)
            )

        def oracle() -> Control:
            from detdiff.explain.case import Case
            from detdiff.explain.investigate import judged_origins

            return judged_origins(Case.of(alone, composed, divergence, engine=self._checked.engine), ORIGINS)

        return ComparedRun(alone, composed, divergence, rule(self._asked.level, divergence, oracle))

    def _against_golden(self, run: CompositionRun) -> ComparedRun:
        assert self._place is not None
        made = self._recorded.run(self._checked, portable(run.scenario))
        path = place(self._place.file, self._place.test, run.name)
        found = against_committed(path, made, update=self._place.update, shown=relative(path))
        if not found.why and path in self._place.written:
            # A plugin that runs failed tests once more must not make a pass of it.
            found = replace(
                found, why=(f"{relative(path)} was written by this very session; run the test again",)
            )
        if found.wrote:
            self._place.written.add(path)
        return ComparedRun(found.committed, made, found.divergence, Ruling(found.why))

    def _count(self, seen: ComparedRun) -> None:
        if seen.divergence is not None:
            self.tally.rows += seen.divergence.compared.rows
            self.tally.tokens += sum(
                min(request.generated_a, request.generated_b) for request in seen.divergence.requests
            )
        sites = max(len(seen.b.sites), self.tally.sites.get(self._checked.name, 0))
        self.tally.sites[self._checked.name] = sites

    def _failure(
        self, composition: CheckedSchedule, run: CompositionRun, base: Scenario, seen: ComparedRun
    ) -> CheckFailure:
        compared = self._asked.level != GOLDEN
        failure = CheckFailure(
            composition.name,
            "each request alone (serial)" if compared else "the golden trace",
            f"{_said(composition)}{run.name.removeprefix(composition.name)}",
            seen.ruling.why,
            seen.divergence,
        )
        if seen.a is None or seen.divergence is None:
            return failure
        alone = replace(base, requests=tuple(r for r in base.requests if r.id in run.ids))
        scenarios = (alone, run.scenario) if self._checked.again and compared else ()
        part = run.name.removeprefix(composition.name).strip(", ")
        verdict = self._verdict(seen.a, seen.b) if self._asked.explain and compared else None
        failure = replace(failure, verdict=verdict)
        assert self._keeper is not None
        try:
            kept = self._keeper.keep(composition.name, part, seen.a, seen.b, scenarios)
            kept = write_report(kept, seen.a, seen.b, seen.divergence, verdict)
        except OSError as error:
            # What was found is to be said, whatever the disk or another session at the same place does.
            return replace(failure, unkept=str(error))
        return replace(failure, kept=kept)

    def _verdict(self, a: Trace, b: Trace) -> Verdict:
        from detdiff.explain import explain

        return explain(a, b, engine=self._checked.engine)


def _together(trace: Trace) -> bool:
    """Whether two requests at least were served at a time, if not in one forward."""
    spans: dict[int, tuple[int, int]] = {}
    for number, forward in enumerate(trace.forwards()):
        for row in forward["rows"]:
            first, _ = spans.get(row["request"], (number, number))
            spans[row["request"]] = first, number
    ordered = sorted(spans.values())
    return any(later[0] <= earlier[1] for earlier, later in pairwise(ordered))


def _said(composition: CheckedSchedule) -> str:
    return (
        composition.written
        if composition.layout is None
        else f"{composition.written}, layout {composition.layout}"
    )


def _same_kinds(alone: Trace, composed: Trace, label: str) -> None:
    """Raises EngineAnswerInvalid where one run shows what the other does not, NothingToCheck where neither generated."""
    for what, a, b in (
        ("taps of other sites", *({site.name for site in trace.sites} for trace in (alone, composed))),
        ("log-probabilities or top logits", *("logits" in trace.lacks for trace in (alone, composed))),
    ):
        if a != b:
            raise EngineAnswerInvalid(
                f"The engine {label} gave {what} in one run and not in the other; expected the same kinds of answer alone and in "
                "a batch, so that all of it can be compared. Correct the engine, or leave them out in both."
            )
    if not any(len(trace.generated(lens=False).token) for trace in (alone, composed)):
        raise NothingToCheck(
            f"The engine {label} generated no token for any request, alone or in the batch, so that nothing was compared. Give "
            "other prompts, or let it ignore end-of-text."
        )


@dataclass(frozen=True, eq=False)
class CheckedComposition:
    """One composition of an engine's requests: the divergence of each of its runs from the same requests alone, with the
    words that tell it from the others, and ``why`` it is not let through."""

    name: str
    engine: str
    runs: tuple[tuple[str, Divergence], ...]
    why: tuple[str, ...]

    def __bool__(self) -> NoReturn:
        raise TypeError("what was composed has no truth value; ask .identical")

    @property
    def identical(self) -> bool:
        return not self.why

    @property
    def diverged(self) -> tuple[RequestDivergence, ...]:
        """The requests that are not equal to themselves alone, of all runs."""
        return tuple(request for _, found in self.runs for request in found.requests if not request.identical)

    def text(self) -> str:
        """What was found, as lines of text."""
        lines = [
            f"{escaped(self.name)} of {escaped(self.engine)}: {headline(found)}" for _, found in self.runs
        ]
        return "\n".join([*dict.fromkeys(lines), *(f"  why: {why}" for why in dict.fromkeys(self.why))])


def check_engine(
    engine: Any,
    requests: Sequence[EngineRequest],
    compositions: Sequence[CheckedSchedule | str],
    level: str = EXACT,
    *,
    seeds: Sequence[int] = (0,),
) -> list[CheckedComposition]:
    """Each request alone against the same request in every composition: what was found in each, in their order.

    ``engine`` is an Engine, an object or function that generates, or a causal language model of transformers.
    ``compositions`` are written as ``static:2`` or ``continuous:3``; each of ``seeds`` draws other neighbours and arrivals.
    ``level`` is ``exact`` (tokens, log-probabilities and tapped rows to their bits, as far as the engine gives them) or
    ``tokens``. Raises NothingToCheck, CheckSettingInvalid, CheckSubjectInvalid, and what recording and comparing raise.
    """
    if not compositions or not seeds:
        raise NothingToCheck(
            "There is no composition, or no seed, so that nothing would be checked. Give one at least, such as 'static:2'."
        )
    if not requests or any(not each.tokens for each in requests):
        raise NothingToCheck(
            "There is no request, or one without a token, so that nothing would be checked. Give one prompt at least, each "
            "with a token at least."
        )
    asked = CheckSettings(prompts=[list(each.tokens) for each in requests], level=level, seeds=tuple(seeds))
    wanted = [CheckedSchedule.of(each, None) if isinstance(each, str) else each for each in compositions]
    with tempfile.TemporaryDirectory(prefix="detdiff-check-") as folder:
        checked = CheckedEngines().of(engine)
        _refuse(checked, asked)
        tables = [
            {"id": each.id, "tokens": list(each.tokens), "max_tokens": each.max_tokens} for each in requests
        ]
        check = ModelCheck(checked, asked, tables, RecordedRuns(Path(folder)))
        found = []
        for composition in wanted:
            runs = list(check.seen(composition))
            found.append(_composed(composition.name, checked.label, runs))
        again = check.asked_again(wanted[0]) if all(each.identical for each in found) else []
        return [replace(each, why=again[0].why) for each in found] if again else found


def check_scenario(engine: Any, scenario: Scenario, level: str = EXACT) -> CheckedComposition:
    """Each request of one whole batch, such as `detdiff.strategies` draws, alone against the same request in it.

    The scenario's requests have token ids; its model and what else it says of a run are not the engine's. Raises what
    `check_engine` raises.
    """
    asked = CheckSettings(level=level)
    with tempfile.TemporaryDirectory(prefix="detdiff-check-") as folder:
        checked = CheckedEngines().of(engine)
        _refuse(checked, asked)
        check = ModelCheck(checked, asked, (), RecordedRuns(Path(folder)))
        alone = scenario.with_changes(
            schedule="serial", layout="padded", arrivals=None, active=None, row_budget=None
        )
        run = CompositionRun(scenario.schedule.kind, scenario)
        return _composed(scenario.schedule.kind, checked.label, [(run, check.seen_of(run, alone))])


def _composed(
    name: str, engine: str, runs: Sequence[tuple[CompositionRun, ComparedRun]]
) -> CheckedComposition:
    divergences = tuple((run.name, seen.divergence) for run, seen in runs if seen.divergence is not None)
    return CheckedComposition(
        name, engine, divergences, tuple(why for _, seen in runs for why in seen.ruling.why)
    )
