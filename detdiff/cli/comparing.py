"""The commands about two sides: compare, explain, reduce and report."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .group import (
    DIFFERENT,
    IDENTICAL,
    INCONCLUSIVE,
    JSON,
    answers_in_json,
    main,
    print_answer,
    progress,
    text_width,
)
from .options import (
    LocalPath,
    across_engines_option,
    across_models_option,
    comparison_asked,
    file_option,
    json_option,
    partial_option,
    replay_option,
    sides_options,
)

if TYPE_CHECKING:
    from detdiff.commands.sides import ComparisonArguments
    from detdiff.trace import Place


@main.command()
@sides_options("With traces and --replay")
@replay_option
@click.option(
    "--force-tokens",
    metavar="FROM",
    help="Feed side b the tokens of a, or those of a trace, to compare past the first flip.",
)
@across_models_option
@across_engines_option
@partial_option
@click.option(
    "--repeats", metavar="N", type=click.IntRange(1), help="Run each side N times, and sum up all requests."
)
@click.option(
    "--levels", metavar="N,N", help="Run side b with so many requests at once each, and sum up all requests."
)
@click.option(
    "--expect-invariant",
    is_flag=True,
    help="Sum up all requests; any difference, of repetitions too, is exit code 1.",
)
@click.option(
    "--html",
    metavar="FILE",
    type=LocalPath(),
    help="Sum up all requests, as a page with that picture as well.",
)
@click.option(
    "--plot",
    metavar="SVG",
    type=LocalPath(),
    help="Sum up all requests, and draw their drift by how many ran at once.",
)
@json_option
def compare(
    files: tuple[Place, ...],
    repeats: int | None,
    levels: str | None,
    expect_invariant: bool,
    plot: Path | None,
    html: Path | None,
    **options: Any,
) -> None:
    """Find where run B diverges from run A.

    A and B are traces, or scenario files, which are recorded first. One scenario file serves both sides, with --a
    and --b saying what differs. Without files, --model and --prompt, or --prompts, say what to run. With --prompts, --repeats,
    --levels, --expect-invariant, --plot or --html the answer is a summary over all requests.

    Example: detdiff compare --model builtin --prompt "In the beginning" --prompt "My son" --both "layout=packed
    kernels=candle-metal" --a schedule=serial --b "schedule=continuous arrivals=0,5"
    """
    wanted = SummaryOptions(repeats, levels, expect_invariant, plot, html)
    if options["prompts_file"] is not None or wanted != SummaryOptions():
        _summarise(files, wanted, options)
    from detdiff.commands.sides import check_replay, named, recorded, sides
    from detdiff.compare import compare as compare_traces
    from detdiff.report import divergence_text, to_json

    asked = comparison_asked(files, options)
    check_replay(asked, options["replay"])
    found = sides(asked)
    across, engines = asked.across_models, asked.across_engines
    with recorded(found, asked.keep, progress, across_models=across, across_engines=engines) as (a, b):
        answer = compare_traces(a, b, across_models=across, across_engines=engines)
        if options["replay"]:
            from detdiff.engines.record import replay

            with progress("replay") as on_token:
                # Without files, --model has said already what to record.
                moved = asked.model if files else None
                answer = replay(a, b, answer, progress=on_token, model=moved, across_models=across)
    answer = named(answer, found, asked.keep)
    print_answer(
        options["as_json"], lambda: to_json(answer), lambda: divergence_text(answer, width=text_width())
    )
    code = IDENTICAL if answer.identical else INCONCLUSIVE if answer.inconclusive else DIFFERENT
    click.get_current_context().exit(code)


@dataclasses.dataclass(frozen=True)
class SummaryOptions:
    """What says that compare sums up, as it was written."""

    repeats: int | None = None
    levels: str | None = None
    expect_invariant: bool = False
    plot: Path | None = None
    html: Path | None = None


def _summarise(files: tuple[Place, ...], wanted: SummaryOptions, options: Mapping[str, Any]) -> None:
    """Sum up all requests, and exit."""
    from detdiff.commands.summary import SummaryArguments, summarised, write_pictures
    from detdiff.report.summary import summary_json, summary_text

    asked = SummaryArguments.of(wanted.repeats, wanted.levels)
    found = summarised(comparison_asked(files, options), asked, progress)
    write_pictures(found, wanted.plot, wanted.html)
    print_answer(
        options["as_json"], lambda: summary_json(found), lambda: summary_text(found, width=text_width())
    )
    counted = (*found.arms, *found.repeats) if wanted.expect_invariant else found.arms
    differs = any(arm.differing for arm in counted)
    whole = all(arm.identical for arm in counted) and not found.unmet
    click.get_current_context().exit(DIFFERENT if differs else IDENTICAL if whole else INCONCLUSIVE)


@main.command()
@sides_options("With traces")
@click.option(
    "--control", "controls", metavar="NAME", multiple=True, help="Run this control alone; may be given again."
)
@click.option("--budget", metavar="N", type=click.IntRange(0), help="At most N re-runs.")
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(1),
    help="Repeat each side N times, even where nothing differs; default 2.",
)
@click.option(
    "--measure-fix",
    is_flag=True,
    help="Where kernels make the difference, pin them as detdiff.invariant does, and measure what that costs here.",
)
@click.option(
    "--inside",
    metavar="WHERE",
    help="With runs of a server: run what it was asked on a local model, scenario file, or trace of detdiff serve.",
)
@across_models_option
@across_engines_option
@partial_option
@json_option
def explain(
    files: tuple[Place, ...],
    controls: tuple[str, ...],
    budget: int | None,
    repeats: int | None,
    measure_fix: bool,
    inside: str | None,
    **options: Any,
) -> None:
    """Find why run B diverges from run A: rounding, a bug, a difference of configuration, or a run that does not repeat.

    A and B are what compare takes. Controls run them again, each with one thing changed; docs/explain.md has them all.
    Exit code 0: identical; 1: different, whatever the verdict; 3: undetermined.

    Example: detdiff explain --model builtin --prompt "In the beginning" --prompt "My son" --both "layout=packed
    kernels=candle-metal" --a schedule=serial --b "schedule=continuous arrivals=0,5"
    """
    from detdiff.commands.explain import explained
    from detdiff.report import verdict_json, verdict_text

    if inside is not None:
        _explain_inside(comparison_asked(files, options), inside, controls, budget, options["as_json"])
    verdict = explained(comparison_asked(files, options), controls, budget, progress, repeats, measure_fix)
    print_answer(
        options["as_json"], lambda: verdict_json(verdict), lambda: verdict_text(verdict, width=text_width())
    )
    codes = {"identical": IDENTICAL, "undetermined": INCONCLUSIVE}
    click.get_current_context().exit(codes.get(verdict.kind, DIFFERENT))


def _explain_inside(
    asked: ComparisonArguments, where: str, controls: tuple[str, ...], budget: int | None, as_json: bool
) -> NoReturn:
    """Say whether what a server did appears on a local engine, and exit."""
    from detdiff.commands.inside import seen_inside
    from detdiff.explain.inside import ANOTHER_MODEL, NO_DIFFERENCE
    from detdiff.report.inside import inside_json, inside_text

    found = seen_inside(asked, where, controls, budget, progress)
    print_answer(as_json, lambda: inside_json(found), lambda: inside_text(found, width=text_width()))
    codes = {NO_DIFFERENCE: IDENTICAL, ANOTHER_MODEL: INCONCLUSIVE}
    click.get_current_context().exit(codes.get(found.found, DIFFERENT))


@main.command()
@sides_options("With traces", keep=False)
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    type=LocalPath(),
    required=True,
    help="Directory of the reduction: new, or one that was interrupted.",
)
@click.option("--keep-flip", is_flag=True, help="A token has to flip still; without it, bits may be enough.")
@click.option(
    "--twin/--no-twin",
    default=None,
    help="Try random weights in the place of the model's. Default: unless it is a built-in model.",
)
@click.option("--budget", metavar="N", type=click.IntRange(1), help="Run at most N pairs.")
@json_option
def reduce(
    files: tuple[Place, ...],
    folder: Path,
    keep_flip: bool,
    twin: bool | None,
    budget: int | None,
    **options: Any,
) -> None:
    """Find the smallest pair of scenarios that still diverges as A and B do.

    Fewer requests, shorter prompts, fewer tokens, plainer settings, a model of random weights with fewer layers: as long as
    verdict, origin site and kernel paths stay the same. A and B are what compare takes; docs/reduce.md says more. After
    Ctrl-C the same command goes on where it was.

    Example: detdiff reduce traces/reference-case/serial.toml traces/reference-case/continuous.toml -o smaller
    """
    from detdiff.commands.reduce import ReduceArguments, reduced, reduction_json, reduction_text

    wanted = ReduceArguments(folder, budget, keep_flip, twin)
    shown = sys.stderr.isatty()
    found = reduced(
        comparison_asked(files, {"partial": False, "keep": None, **options}),
        wanted,
        progress,
        lambda step: click.echo(f"\r{step.sentence}: {step.rows:,} rows", err=True) if shown else None,
    )
    print_answer(
        options["as_json"], lambda: reduction_json(found), lambda: reduction_text(found, width=text_width())
    )


def _json_file(ctx: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
    ctx.meta[JSON] = value is not None and str(value) == "-"
    return value


@main.command()
@sides_options("With traces")
@click.option("--explain", "why", is_flag=True, help="Run the controls as well, for a verdict.")
@click.option("--budget", metavar="N", type=click.IntRange(0), help="With --explain: at most N re-runs.")
@replay_option
@file_option("--html", "FILE", "Write a page to look at: one file, which needs no network.")
@file_option("--markdown", "FILE", "Write Markdown, as an issue takes it.")
@file_option("--json", "FILE", "Write JSON; - is the standard output.", callback=_json_file, is_eager=True)
@file_option("--plots", "DIR", "Write each picture as an SVG file.")
@file_option("--pack", "ZIP", "Write all that running it again needs, weights left out.")
@across_models_option
@across_engines_option
@partial_option
def report(files: tuple[Place, ...], why: bool, budget: int | None, **options: Any) -> None:
    """Turn a comparison or a verdict into something to read, to paste into an issue, and to look at.

    A and B are what compare takes. A single file is an answer that compare, explain or report wrote with --json. A single
    directory that --keep made is its two traces; any other that is no trace is a folder of comparisons (such answers, and
    such directories), whose pages --html gathers under an index. Without a format, the report goes to the terminal.

    Example: detdiff report traces/a traces/b --html report.html --markdown report.md
    """
    from detdiff.commands import report as reports
    from detdiff.commands.report import ReportOutputs, check
    from detdiff.report.json import report_json_text
    from detdiff.report.text import report_text

    formats = ("html", "markdown", "json", "plots", "pack")
    wanted = ReportOutputs(**{name: options[name] for name in formats})
    asked = reports.kept_pair(comparison_asked(files, options))
    kept = () if asked.keep is None else (asked.keep / "a", asked.keep / "b")
    how_far = reports.ReportOptions(options["replay"], why, budget)
    if reports.is_folder(asked):
        from detdiff.commands.report import gathered

        for line in gathered(asked, how_far, wanted, text_width()):
            click.echo(line)
        return
    read = [path for path in asked.files if not isinstance(path, Path) or path.exists()]
    check(wanted, (*read, *kept))
    with reports.reported(asked, how_far, progress) as made:
        written = reports.write(made, wanted)
        if answers_in_json():
            click.echo(report_json_text(made.report), nl=False)
        elif written:
            click.echo(made.report.headline)
            for path in written:
                click.echo(f"  {path}")
        else:
            click.echo(report_text(made.report, width=text_width(), colour=_colourful()), nl=False)


def _colourful() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
