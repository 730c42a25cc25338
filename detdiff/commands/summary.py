"""Many requests run under several schedules and again, and summed up."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from detdiff.commands.sides import ComparisonArguments, Engines, Progress, record_trace, sides
from detdiff.compare.summary import Summary, summed
from detdiff.errors import CommandError
from detdiff.report.drift import drift_svg
from detdiff.report.summary import summary_html
from detdiff.scenario import Scenario
from detdiff.trace import Trace


@dataclass(frozen=True)
class SummaryArguments:
    """How much is run: each side ``repeats`` times, and b at each of ``levels`` (how many requests at once) instead of once."""

    repeats: int = 1
    levels: tuple[int, ...] = ()

    @classmethod
    def of(cls, repeats: int | None, levels: str | None) -> SummaryArguments:
        """Raises CommandError for levels that are none."""
        words = [word.strip() for word in (levels or "").split(",") if word.strip()]
        if not all(word.isdigit() and 2 <= int(word) <= 4096 for word in words):
            raise CommandError(
                f"--levels is {levels!r}; expected whole numbers from 2, such as 2,4,8. Correct it."
            )
        return cls(repeats or 1, tuple(dict.fromkeys(map(int, words))))


def summarised(asked: ComparisonArguments, wanted: SummaryArguments, progress: Progress) -> Summary:
    """Record side a and side b, at each level and again, and sum up. Raises what ``sides`` and recording raise."""
    found = sides(asked)
    scenarios = [side.source for side in found]
    a, b = scenarios
    if not (isinstance(a, Scenario) and isinstance(b, Scenario)):
        raise CommandError(
            "--prompts, --repeats and --levels say what to run, and a side is a trace that was recorded already; give scenarios, or "
            "--model."
        )
    levels: dict[int, Scenario] = {
        level: b.with_changes(
            schedule="static" if b.schedule.kind == "serial" else b.schedule.kind, active=level
        )
        for level in wanted.levels
    } or {_at_once(b): b}
    engines = Engines()
    with ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="detdiff-")))

        def runs(name: str, scenario: Scenario) -> list[Trace]:
            made = []
            for again in range(wanted.repeats):
                where = folder / (name if not again else f"{name}-again{again}")
                with progress(f"run {where.name}") as on_token:
                    # One opened engine for all of them: that is what repeats.
                    made.append(record_trace(scenario, where, on_token, engines, kept=asked.keep is not None))
            return made

        of_a = runs("a", a)
        repeats, arms, notes = [], [], list(_notes(of_a[0]))
        if wanted.repeats > 1:
            repeats.append(summed("side a", _at_once(a), [(of_a[0], each) for each in of_a[1:]]))
        for level, scenario in levels.items():
            name = f"b{level}" if wanted.levels else "b"
            said = f"{scenario.schedule.kind}:{level}" if level > 1 else scenario.schedule.kind
            of_b = runs(name, scenario)
            if wanted.repeats > 1:
                repeats.append(summed(f"side b, {said}", level, [(of_b[0], each) for each in of_b[1:]]))
            arms.append(summed(said, level, list(zip(of_a, of_b, strict=True))))
            notes += _notes(of_b[0])
    return Summary(tuple(repeats), tuple(arms), tuple(dict.fromkeys(notes)))


def _at_once(scenario: Scenario) -> int:
    if scenario.schedule.kind == "serial":
        return 1
    return scenario.schedule.active or len(scenario.requests)


def _notes(trace: Trace) -> Sequence[str]:
    return [str(note) for note in trace.header["notes"]]


def write_pictures(summary: Summary, plot: Path | None, page: Path | None) -> None:
    """Write the picture of a summary, and its page, where they are asked for. Raises CommandError where a path cannot be written."""
    for option, path, made in (("--plot", plot, drift_svg), ("--html", page, summary_html)):
        if path is None:
            continue
        try:
            path.write_text(made(summary), encoding="utf-8")
        except OSError as error:
            raise CommandError(
                f"{option} {path} cannot be written ({error.strerror}); name a file in a folder that is there."
            ) from None
