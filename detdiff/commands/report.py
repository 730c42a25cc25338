"""`detdiff report`: a comparison, a verdict or a folder of them, turned into files to read, paste and look at.

Where they go is checked before the first run, and each is written whole or not at all.
"""

from __future__ import annotations

import codecs
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from detdiff.commands.sides import (
    ComparisonArguments,
    Engines,
    Progress,
    Side,
    check_replay,
    named,
    recorded,
    sides,
)
from detdiff.compare import compare, series
from detdiff.errors import CommandError, DetdiffError, Interrupted, TraceError
from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.index import IndexEntry, index_html, index_text
from detdiff.report.saved import SavedAnswer, read_saved
from detdiff.report.words import escaped
from detdiff.trace import Place, Trace
from detdiff.trace.header import HEADER

if TYPE_CHECKING:
    from detdiff.compare import Divergence

STDOUT = "-"


@dataclass(frozen=True)
class ReportOutputs:
    """Where each format goes; ``json`` may be ``-``, the standard output. ``plots`` is a directory, ``pack`` a zip file."""

    html: Path | None = None
    markdown: Path | None = None
    json: Path | None = None
    plots: Path | None = None
    pack: Path | None = None

    @property
    def named(self) -> tuple[tuple[str, Path], ...]:
        """The options that were given, with their paths."""
        return tuple((f"--{name}", path) for name, path in vars(self).items() if path is not None)

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them that are paths."""
        return tuple(path for option, path in self.named if (option, str(path)) != ("--json", STDOUT))


def check(wanted: ReportOutputs, read: Sequence[Place]) -> None:
    """Raises CommandError for outputs that cannot be written, are one file, or are part of what is ``read``."""
    taken: dict[Path, str] = {}
    inputs = {Path(os.path.realpath(path)): path for path in read if isinstance(path, Path)}
    for option, path in wanted.named:
        if str(path) == STDOUT:
            if option == "--json":
                continue
            raise CommandError(
                f"{option} {path} would be a file of that name; only --json takes {STDOUT}, for the standard output. Name a file."
            )
        _check_place(option, path)
        place = Path(os.path.realpath(path))
        for given in (place, *place.parents):
            if given in inputs:
                raise CommandError(
                    f"{option} {path} would be written over {inputs[given]}, which the report is made from, or into "
                    "it. Name another place."
                )
        for other, name in taken.items():
            # A directory of pictures may hold the other formats; a file holds nothing.
            below = (option != "--plots" and place in other.parents) or (
                name != "--plots" and other in place.parents
            )
            if place == other or below:
                raise CommandError(
                    f"{name} and {option} both name {path}, or one lies below the other, which is a "
                    "file; expected one for each. Name another for one of them."
                )
        taken[place] = option


def _check_place(option: str, path: Path) -> None:
    if option == "--plots":
        if path.exists() and not path.is_dir():
            raise CommandError(
                f"--plots {path} is a file; expected a directory, for there is more than one picture. Name another."
            )
    elif path.is_dir():
        raise CommandError(
            f"{option} {path} is a directory; expected the file to write. Name one inside of it."
        )
    above = path if option == "--plots" and path.exists() else path.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise CommandError(
            f"{option} {path} lies below {above}, which is a file; expected a directory. Name another place."
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise CommandError(
            f"{option} {path} cannot be written: {above} is not yours to write to. Name another place, or change its permissions."
        )


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write a file at, which becomes ``path`` at the end of the block: a page open in a browser is never half
    of one. Raises OSError, which names ``path``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            # A device or a pipe is written to; a file in its place would take it from the whole system.
            yield path
            return
        # A link stays one.
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".detdiff-{os.getpid()}.tmp")
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def put(path: Path, text: str) -> Path:
    """Write a file whole or not at all. Raises OSError."""
    with whole(path) as place:
        place.write_text(text, encoding="utf-8")
    return path


Pair = tuple[Trace, Trace]


@dataclass(frozen=True)
class ReportOptions:
    """How far to go: run both sides again for values (``replay``), or run the controls (``explain``), at most ``budget``
    re-runs."""

    replay: bool = False
    explain: bool = False
    budget: int | None = None


@dataclass(frozen=True, eq=False)
class ReportWithTraces:
    """A report, and the two traces that it is of, where they are at hand."""

    report: Report
    traces: Pair | None


@contextmanager
def reported(
    asked: ComparisonArguments, why: ReportOptions, progress: Progress
) -> Iterator[ReportWithTraces]:
    """The report of what was asked for; its traces can be read inside the block.

    Raises CommandError for arguments that do not go together, AnswerError for a file that holds no answer, and what
    reading, recording and running raise.
    """
    _check_budget(why)
    check_replay(asked, why.replay)
    answers = [path for path in asked.files if isinstance(path, Path) and _is_answer(path)]
    if answers:
        _check_saved(asked, why, answers[0])
        found_again = read_saved(answers[0]), f"detdiff report {shlex.quote(str(answers[0]))}"
        yield opened_answer(*found_again, partial=asked.partial)
        return
    found = sides(replace(asked, replay=asked.replay or why.replay or why.explain))
    with ExitStack() as stack:
        if why.explain:
            from detdiff.commands.explain import ProgressBars, verdict_on

            engines = Engines()
            traces = stack.enter_context(
                recorded(
                    found,
                    asked.keep,
                    progress,
                    engines,
                    across_models=asked.across_models,
                    across_engines=asked.across_engines,
                )
            )
            with ProgressBars(progress) as bars:
                verdict = verdict_on(traces, found, asked, engines, bars, budget=why.budget)
            divergence = verdict.divergence
            if why.replay and divergence is not None:
                divergence = _divergence(traces, found, asked, why, progress)
        else:
            verdict = None
            traces = stack.enter_context(
                recorded(
                    found,
                    asked.keep,
                    progress,
                    across_models=asked.across_models,
                    across_engines=asked.across_engines,
                )
            )
            divergence = _divergence(traces, found, asked, why, progress)
        drawn = None if divergence is None else series(*traces, divergence)
        yield ReportWithTraces(build(divergence, verdict, drawn, command(asked, found)), traces)


def _divergence(
    traces: Pair, found: tuple[Side, Side], asked: ComparisonArguments, why: ReportOptions, progress: Progress
) -> Divergence:
    across = asked.across_engines
    answer = compare(*traces, across_models=asked.across_models, across_engines=across)
    if why.replay:
        from detdiff.engines.record import replay

        with progress("replay") as on_token:
            moved = asked.model if asked.files else None
            answer = replay(
                *traces, answer, progress=on_token, model=moved, across_models=asked.across_models
            )
    return named(answer, found, asked.keep)


def _is_answer(path: Path) -> bool:
    """Whether a file is meant to be a saved answer: by its name, or by how it begins, as no scenario does."""
    if not path.is_file():
        return False
    if path.suffix == ".json":
        return True
    with path.open("rb") as file:
        return file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")


def _check_budget(why: ReportOptions) -> None:
    if why.budget is not None and not why.explain:
        raise CommandError(
            f"--budget {why.budget} says how many re-runs the controls may take, and only --explain runs any. Add --explain, "
            "or leave --budget out."
        )


def _check_saved(asked: ComparisonArguments, why: ReportOptions, answer: Path) -> None:
    if len(asked.files) > 1:
        raise CommandError(
            f"{answer} holds an answer, which is of two sides already, and there is another file beside it. Name the answer alone, "
            "or two traces or scenarios."
        )
    if how_to_run(asked, why):
        raise CommandError(
            f"{answer} holds an answer, which is reported as it is, and the other options say what to run. Leave them "
            "out, or name the two traces or scenarios in its place."
        )


def how_to_run(asked: ComparisonArguments, why: ReportOptions) -> bool:
    """Whether anything says what to run, or how."""
    run = asked.a or asked.b or asked.both.strip() or asked.prompts or asked.model or asked.keep
    return bool(run) or why.replay or why.explain or why.budget is not None


def opened_answer(saved: SavedAnswer, told: str, *, partial: bool = False) -> ReportWithTraces:
    """The report of a saved answer; pictures are drawn where it holds them or its traces are still there. ``partial`` reads
    what is left of damaged ones."""
    divergence, verdict, drawn = saved.divergence, saved.verdict, saved.series
    traces = None if divergence is None else _still_there(divergence, partial)
    if drawn is None and divergence is not None and traces is not None:
        drawn = series(*traces, divergence)
    return ReportWithTraces(build(divergence, verdict, drawn, saved.command or told), traces)


def _still_there(divergence: Divergence, partial: bool) -> Pair | None:
    """The traces that an answer names, if they are the ones that it is about."""
    try:
        a, b = (Trace.open(run.trace, partial=partial) for run in (divergence.a, divergence.b))
    except (TraceError, OSError, ValueError):
        return None
    same = all(
        trace.scenario == dict(run.scenario)
        and trace.model == dict(run.model)
        and len(trace.forwards()) == run.forwards
        for trace, run in ((a, divergence.a), (b, divergence.b))
    )
    return (a, b) if same else None


def command(asked: ComparisonArguments, found: Sequence[Side]) -> str:
    """The command line that runs both sides again and says why they diverge."""
    words = ["detdiff", "explain", *(str(path) for path in asked.files)]
    if asked.partial:
        words.append("--partial")
    for option, wanted in (
        ("--across-models", asked.across_models),
        ("--across-engines", asked.across_engines),
    ):
        words += [option] if wanted else []
    for name in asked.imports:
        words += ["--import", name]
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


def write(made: ReportWithTraces, wanted: ReportOutputs) -> list[Path]:
    """Write what is wanted, and say which files there are now. Raises CommandError, Interrupted and OSError."""
    if made.traces is not None:
        # A saved answer says only now which traces it is drawn from.
        check(wanted, [trace.path for trace in made.traces])
    drawn = {} if wanted.plots is None else _drawn(made, wanted.plots)
    if wanted.pack is not None and made.traces is None:
        raise CommandError(
            f"{wanted.pack} would hold both traces, and those that the answer is about are not where it says. Name the "
            "two traces or scenarios themselves."
        )
    written: list[Path] = []
    try:
        for path in _each(made, wanted, drawn):
            written.append(path)
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted; {_so_far(written)} written.") from None
    return written


def _so_far(written: Sequence[Path]) -> str:
    return f"{', '.join(map(str, written))} and no more was" if written else "nothing was"


def _each(made: ReportWithTraces, wanted: ReportOutputs, drawn: Mapping[str, str]) -> Iterator[Path]:
    """Writes one file after the other, and gives each when it is there."""
    from detdiff.report.json import report_json_text
    from detdiff.report.markdown import markdown

    if wanted.html is not None:
        from detdiff.report.html import html

        yield put(wanted.html, html(made.report))
    if wanted.markdown is not None:
        yield put(wanted.markdown, markdown(made.report))
    if wanted.json is not None and str(wanted.json) != STDOUT:
        yield put(wanted.json, report_json_text(made.report))
    if wanted.plots is not None:
        yield from (put(wanted.plots / name, svg) for name, svg in drawn.items())
    if wanted.pack is not None and made.traces is not None:
        from detdiff.commands.pack import pack

        with whole(wanted.pack) as place:
            pack(made.report, made.traces, place)
        yield wanted.pack


def _drawn(made: ReportWithTraces, folder: Path) -> dict[str, str]:
    from detdiff.report.views import plots

    drawn = plots(made.report)
    if not drawn:
        raise CommandError(
            f"There is nothing to draw into {folder}: pictures come from the two traces, and they are not at hand, or "
            "nothing of them can be compared. Name the traces themselves."
        )
    return drawn


def kept_pair(asked: ComparisonArguments) -> ComparisonArguments:
    """A single directory with the traces a and b, as --keep makes it, is those two."""
    if len(asked.files) == 1 and not (asked.files[0] / HEADER).is_file():
        return replace(asked, files=pair_in(asked.files[0]) or asked.files)
    return asked


def pair_in(folder: Place) -> tuple[Place, Place] | None:
    """The traces a and b of a directory, or None where they are not there."""
    pair = folder / "a", folder / "b"
    return pair if all((path / HEADER).is_file() for path in pair) else None


def is_folder(asked: ComparisonArguments) -> bool:
    """Whether one directory was named that is no trace: a folder of comparisons."""
    if len(asked.files) != 1 or not isinstance(folder := asked.files[0], Path):
        return False
    return folder.is_dir() and not (folder / HEADER).exists()


def gathered(asked: ComparisonArguments, why: ReportOptions, wanted: ReportOutputs, width: int) -> list[str]:
    """Write an index at ``wanted.html`` with a page for each comparison beside it, and say in lines what there is.

    Raises CommandError where the folder holds no comparison, or for options that are of one comparison; what cannot be read
    is a line of its own.
    """
    folder = asked.files[0]
    assert isinstance(folder, Path)
    if any(option != "--html" for option, _ in wanted.named):
        raise CommandError(
            f"{folder} is a folder of comparisons, which --html gathers under an index; the other formats are of one comparison. "
            "Name that one, or leave the other formats out."
        )
    if how_to_run(asked, why):
        raise CommandError(
            f"{folder} is a folder of comparisons, which are gathered as they are, and the other options say what to run. Leave "
            "them out, or name the two traces or scenarios in its place."
        )
    found = list(_comparisons(folder, wanted.html))
    inputs = [
        each for _, path in found for each in ([path] if path.is_file() else [path / side for side in "ab"])
    ]
    check(wanted, inputs)
    entries, refused = [], []
    for name, path in found:
        try:
            made = _opened(path, asked.partial)
        except (DetdiffError, OSError) as error:
            message = str(error) if str(path) in str(error) else f"{path}: {error}"
            refused.append(escaped(" ".join(message.split()), ""))
            continue
        page = None if wanted.html is None else f"{name}.html"
        if page is not None and wanted.html is not None:
            write(made, ReportOutputs(html=wanted.html.with_name(page)))
        entries.append(IndexEntry.of(name, made.report, page))
    if not entries:
        raise CommandError(
            f"{folder} is no trace and holds no comparison; expected answers that were written with --json, or directories "
            f"with the traces a and b, as --keep makes them.{_refused(refused)}"
        )
    lines = [index_text(entries, width=width).rstrip("\n"), *(f"not read: {line}" for line in refused)]
    if wanted.html is not None:
        lines.append(f"  {put(wanted.html, index_html(entries))}")
    return lines


def _refused(refused: Sequence[str]) -> str:
    if not refused:
        return ""
    more = f" ({len(refused) - 1} more could not be read.)" if len(refused) > 1 else ""
    return f" {refused[0]}{more}"


def _comparisons(folder: Path, index: Path | None) -> Iterator[tuple[str, Path]]:
    """Each comparison's page name and where it is: a file of JSON, or a directory with two traces. No page has the name of
    the index."""
    taken = {"index" if index is None else index.stem.lower()}
    for path in sorted(folder.iterdir()):
        answer = path.is_file() and path.suffix == ".json"
        if answer or pair_in(path) is not None:
            stem = path.stem if answer else path.name
            name, number = stem, 2
            while name.lower() in taken:
                name, number = f"{stem}-{number}", number + 1
            taken.add(name.lower())
            yield name, path


def _opened(path: Path, partial: bool) -> ReportWithTraces:
    if path.is_file():
        return opened_answer(read_saved(path), "", partial=partial)
    a, b = (Trace.open(path / side, partial=partial, checked=True) for side in "ab")
    divergence = compare(a, b)
    return ReportWithTraces(build(divergence, None, series(a, b, divergence)), (a, b))
