"""`detdiff report`: a comparison, a verdict or a folder of them, turned into files to read, paste and look at."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from detdiff.commands.sides import Asked, Progress, Side, named, recorded, sides
from detdiff.compare import compare, series
from detdiff.errors import CommandError, TraceError
from detdiff.report.content import Report, build
from detdiff.report.saved import Saved, read_saved
from detdiff.trace import Trace
from detdiff.trace.header import HEADER

if TYPE_CHECKING:
    from detdiff.compare import Divergence

Pair = tuple[Trace, Trace]


@dataclass(frozen=True)
class Wanted:
    """Where each format goes; ``json`` may be ``-``, the standard output. ``plots`` is a directory, ``pack`` a zip file."""

    html: Path | None = None
    markdown: Path | None = None
    json: Path | None = None
    plots: Path | None = None
    pack: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them that are paths."""
        found = (self.html, self.markdown, self.json, self.plots, self.pack)
        return tuple(path for path in found if path is not None and str(path) != "-")


@dataclass(frozen=True)
class Why:
    """How far to go: run both sides again for values (``replay``), or run the controls (``explain``), at most ``budget``
    re-runs."""

    replay: bool = False
    explain: bool = False
    budget: int | None = None


@dataclass(frozen=True, eq=False)
class Made:
    """A report, and the two traces that it is of, where they are at hand."""

    report: Report
    traces: Pair | None


@contextmanager
def reported(asked: Asked, why: Why, progress: Progress) -> Iterator[Made]:
    """The report of what was asked for; its traces can be read inside the block.

    Raises CommandError for arguments that do not go together, AnswerError for a file that holds no answer, and what
    reading, recording and running raise.
    """
    if _saved(asked):
        path = asked.files[0]
        _check_saved(asked, why)
        yield opened_answer(read_saved(path), f"detdiff report {shlex.quote(str(path))}")
        return
    found = sides(replace(asked, replay=asked.replay or why.replay or why.explain))
    with ExitStack() as stack:
        if why.explain:
            from detdiff.commands.explain import Bars, model_of, verdict_on

            loaded = model_of(asked, found)
            traces = stack.enter_context(recorded(found, asked.keep, progress, loaded))
            with Bars(progress) as bars:
                verdict = verdict_on(traces, found, asked, loaded, bars, budget=why.budget)
            divergence = verdict.divergence
        else:
            verdict = None
            traces = stack.enter_context(recorded(found, asked.keep, progress))
            divergence = _divergence(traces, found, asked, why, progress)
        drawn = None if divergence is None else series(*traces, divergence)
        yield Made(build(divergence, verdict, drawn, command(asked, found)), traces)


def _divergence(
    traces: Pair, found: tuple[Side, Side], asked: Asked, why: Why, progress: Progress
) -> Divergence:
    answer = compare(*traces)
    if why.replay:
        from detdiff.replay import replay

        with progress("replay") as on_token:
            moved = asked.model if asked.files else None
            answer = replay(*traces, answer, progress=on_token, model=moved)
    return named(answer, found, asked.keep)


def _saved(asked: Asked) -> bool:
    return len(asked.files) == 1 and asked.files[0].suffix == ".json" and asked.files[0].is_file()


def _check_saved(asked: Asked, why: Why) -> None:
    if why.replay or why.explain or asked.a or asked.b or asked.both.strip() or asked.prompts or asked.model:
        raise CommandError(
            f"{asked.files[0]} holds an answer, which is reported as it is, and the other options say what to run. Leave them "
            "out, or name the two traces or scenarios in its place."
        )


def opened_answer(saved: Saved, told: str) -> Made:
    """The report of a saved answer; pictures are drawn where it holds them or its traces are still there."""
    divergence, verdict, drawn = saved.divergence, saved.verdict, saved.series
    traces = None if divergence is None else _still_there(divergence)
    if drawn is None and divergence is not None and traces is not None:
        drawn = series(*traces, divergence)
    return Made(build(divergence, verdict, drawn, saved.command or told), traces)


def _still_there(divergence: Divergence) -> Pair | None:
    """The traces that an answer names, if they are the ones that it is about."""
    try:
        a, b = (Trace.open(run.trace) for run in (divergence.a, divergence.b))
    except (TraceError, OSError, ValueError):
        return None
    same = all(
        trace.scenario == dict(run.scenario)
        and trace.model == dict(run.model)
        and len(trace.forwards()) == run.forwards
        for trace, run in ((a, divergence.a), (b, divergence.b))
    )
    return (a, b) if same else None


def command(asked: Asked, found: Sequence[Side]) -> str:
    """The command line that runs both sides again and says why they part."""
    words = ["detdiff", "explain", *(str(path) for path in asked.files)]
    if asked.model is not None:
        words += ["--model", asked.model]
    for prompt in asked.prompts:
        words += ["--prompt", prompt]
    for option, flags in (("--both", asked.both.strip()), ("--a", asked.a), ("--b", asked.b)):
        if flags:
            words += [option, flags]
    if asked.force_tokens is not None and any(side.fed for side in found):
        words += ["--force-tokens", asked.force_tokens]
    return shlex.join(words)


def write(made: Made, wanted: Wanted) -> list[Path]:
    """Write what is wanted, and say which files there are now. Raises CommandError and OSError."""
    from detdiff.report.markdown import markdown
    from detdiff.report.report_json import report_json_text

    written = []
    if wanted.html is not None:
        from detdiff.report.html import html

        written.append(put(wanted.html, html(made.report)))
    if wanted.markdown is not None:
        written.append(put(wanted.markdown, markdown(made.report)))
    if wanted.json is not None and str(wanted.json) != "-":
        written.append(put(wanted.json, report_json_text(made.report)))
    if wanted.plots is not None:
        from detdiff.report.plot import plots

        drawn = plots(made.report)
        if not drawn:
            raise CommandError(
                f"There is nothing to draw into {wanted.plots}: pictures come from the two traces, and they are not at hand, or "
                "nothing of them can be compared. Name the traces themselves."
            )
        written += [put(wanted.plots / name, svg) for name, svg in drawn.items()]
    if wanted.pack is not None:
        from detdiff.commands.pack import pack

        if made.traces is None:
            raise CommandError(
                f"{wanted.pack} would hold both traces, and those that the answer is about are not where it says. Name the "
                "two traces or scenarios themselves."
            )
        pack(made.report, made.traces, wanted.pack)
        written.append(wanted.pack)
    return written


def put(path: Path, text: str) -> Path:
    """Write a file whole or not at all, so that a page open in a browser is never half of one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path


def is_folder(asked: Asked) -> bool:
    """Whether one directory was named that is no trace: a folder of comparisons."""
    return len(asked.files) == 1 and asked.files[0].is_dir() and not (asked.files[0] / HEADER).exists()


def as_text(made: Made, width: int, *, colour: bool) -> str:
    """The report for a terminal of ``width`` characters."""
    from detdiff.report.terminal import report_text

    return report_text(made.report, width=width, colour=colour)


def as_json(made: Made) -> str:
    """The report as JSON text."""
    from detdiff.report.report_json import report_json_text

    return report_json_text(made.report)
