"""The command line: one function a command, nothing but arguments in and answers out."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from detdiff import __version__
from detdiff.errors import Failure

if TYPE_CHECKING:
    # What a command needs is imported by it: --help of all of them loads nothing.
    from detdiff.commands.sides import ComparisonArguments, OnToken
    from detdiff.trace import Place

IDENTICAL, DIFFERENT, TROUBLE, INCONCLUSIVE = 0, 1, 2, 3
EXIT_CODES = """\b
Exit codes:
  0  identical (compare, explain, sweep), bits depend on the row alone (probe), done (other commands)
  1  different
  2  trouble: bad arguments or input, interrupted, disk full
  3  inconclusive: nothing comparable, not everything compared, cause undetermined (explain)"""
# Read by the libraries that load models when they are imported: a command is quiet about them. What the user has set stays.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
}
_JSON, _DEBUG = "detdiff.json", "detdiff.debug"

F = TypeVar("F", bound=Callable[..., Any])


class TracePath(click.Path):
    """A local path, or an address of fsspec's where a trace lies."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and ("://" in value or value.endswith(".zip")):
            from detdiff.trace import place

            return place(value)
        return super().convert(value, param, ctx)


class LocalPath(click.Path):
    """A path that something is written to, which cannot be an address."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and ":/" in value:
            from detdiff.trace import local

            return local(value)
        return super().convert(value, param, ctx)


class Commands(click.Group):
    """Turns every error into one paragraph and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as error:
            if ctx.meta.get(_JSON):
                _write_json(Failure("UsageError", error.format_message(), error.exit_code).to_json())
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                # Whoever read the answer has stopped, as `head` does. Nothing may be written at exit either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            elif ctx.meta.get(_DEBUG):
                traceback.print_exc()
            else:
                _fail(Failure.of(error), bool(ctx.meta.get(_JSON)))
            ctx.exit(Failure.of(error).exit_code)


def _fail(failure: Failure, as_json: bool) -> None:
    if as_json:
        _write_json(failure.to_json())
    # As an indent, because a path that fills the line would push the next word from it.
    text = textwrap.fill(
        failure.message,
        _width(),
        initial_indent="detdiff: ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo(text, err=True)


def _width() -> int:
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def _write_json(answer: Mapping[str, Any]) -> None:
    click.echo(json.dumps(answer, indent=1, allow_nan=False))


def _answer(as_json: bool, answer: Callable[[], Mapping[str, Any]], text: Callable[[], str]) -> None:
    """Print one of the two; the other is not made."""
    if as_json:
        _write_json(answer())
    else:
        click.echo(text(), nl=False)


def _noted(key: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def note(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[key] = value
        return value

    return note


def json_option(function: F) -> F:
    """--json; eager, so that errors about the other arguments know of it."""
    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=_noted(_JSON), help="Answer in JSON."
    )(function)


def engine_option(short: str) -> Callable[[F], F]:
    """--engine, and what it is short for."""
    return click.option(
        "--engine",
        metavar="NAME",
        help=f"Short for {short} engine=NAME: mlx, transformers, llama.cpp, server, an installed one, or a factory as package.module:factory.",
    )


def import_option(function: F) -> F:
    """--import: a module before a run."""
    return click.option(
        "--import",
        "imports",
        metavar="MODULE",
        multiple=True,
        help="Import this module first, such as a patch of mlx-lm; traces name it with its source's hash.",
    )(function)


def _import(names: tuple[str, ...]) -> None:
    if names:
        from detdiff.engines.registry import import_before_runs

        for name in names:
            import_before_runs(name)


across_models_option = click.option(
    "--across-models",
    is_flag=True,
    help="The sides may have different weights: tokens, logits and sites of the same name are compared.",
)
partial_option = click.option("--partial", is_flag=True, help="Read what is left of damaged traces.")
replay_option = click.option(
    "--replay", is_flag=True, help="Run both again and capture values around each divergence: ULPs."
)
across_engines_option = click.option(
    "--across-engines",
    is_flag=True,
    help="The sides are different engines with the same weights: sites are aligned by role, such as q of layer 3.",
)


def sides_options(traces: str, *, keep: bool = True) -> Callable[[F], F]:
    """What says which two sides there are; ``traces`` opens what --model means beside them, ``keep`` adds --keep."""
    options = (
        click.argument("files", nargs=-1, metavar="[A] [B]", type=TracePath()),
        click.option(
            "--model",
            help=f"Without files: builtin, a directory, a hub id, or a server's address. {traces}: where their model is now.",
        ),
        click.option(
            "--prompt", "prompts", multiple=True, help="Without files: a request's text; give one for each."
        ),
        click.option(
            "--prompts",
            "prompts_file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Without files: prompts, one a line, as text or as JSON with prompt or messages.",
        ),
        click.option(
            "--a",
            "flags_a",
            metavar="FLAGS",
            default="",
            help="Side a: key=value key=value, as in a scenario.",
        ),
        click.option(
            "--b", "flags_b", metavar="FLAGS", default="", help="Side b; --a and --b win over --both."
        ),
        click.option("--both", metavar="FLAGS", default="", help="The same for both sides."),
        click.option(
            "--split-rows", metavar="N", help="Short for --both split_rows=N: at most N rows go row by row."
        ),
        click.option(
            "--kernels", metavar="NAME", help="Short for --both kernels=NAME: a dispatch profile, or native."
        ),
        engine_option("--both"),
        click.option(
            "--server-kind",
            metavar="KIND",
            help="Short for --both engine.kind=KIND: vllm, sglang, llama.cpp, tgi, mlx_lm, transformers, detdiff or openai.",
        ),
        import_option,
    )
    keep_option = click.option(
        "--keep", metavar="DIR", type=TracePath(), help="Keep the traces as DIR/a and DIR/b."
    )

    def decorate(function: F) -> F:
        # Decorators apply from the last to the first, and so click lists them.
        for option in reversed((*options, keep_option) if keep else options):
            function = option(function)
        return function

    return decorate


@contextmanager
def _progress(label: str) -> Iterator[OnToken | None]:
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def on_token(count: int, total: int) -> None:
            bar.length = total
            bar.finished = False
            bar.update(count - bar.pos)

        yield on_token
        # Requests may stop early.
        bar.update((bar.length or 1) - bar.pos)


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="detdiff")
@click.option(
    "--debug", is_flag=True, expose_value=False, callback=_noted(_DEBUG), help="Show tracebacks of errors."
)
def main() -> None:
    """Record two runs of a language model and find where, and why, they diverge."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Asked to end, a run ends as by Ctrl-C: what was recorded is written, and temporary traces are removed.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)


@main.command()
@click.argument("scenario", type=TracePath())
@click.option(
    "-o",
    "--output",
    "trace",
    type=TracePath(),
    required=True,
    help="New directory of the trace, or an address such as s3://bucket/trace.",
)
@click.option("--capture", metavar="LEVEL", help="digest, full or window; short for --set capture=LEVEL.")
@click.option("--set", "changes", metavar="KEY=VALUE", multiple=True, help="Change a key of the scenario.")
@engine_option("--set")
@click.option(
    "--launch",
    metavar="N",
    help="Short for --set engine.processes=N: the model over N processes of this machine, by mlx-lm's own shard.",
)
@import_option
@json_option
def record(
    scenario: Place,
    trace: Place,
    capture: str | None,
    changes: tuple[str, ...],
    engine: str | None,
    launch: str | None,
    imports: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run SCENARIO, a TOML file, or a trace, whose scenario is run again, and write its trace.

    Example: detdiff record scenario.toml -o traces/a --set schedule=continuous
    """
    from detdiff.commands.show import summary, summary_text
    from detdiff.commands.sides import read_scenario, record_trace
    from detdiff.scenario import parse_flags

    _import(imports)
    for key, value in (("capture", capture), ("engine", engine), ("engine.processes", launch)):
        if value is not None:
            changes = (*changes, f"{key}={value}")
    asked = read_scenario(scenario).with_changes(**parse_flags(_words(changes)))
    with _progress("recording") as on_token:
        found = summary(record_trace(asked, trace, on_token))
    _answer(as_json, lambda: found, lambda: summary_text(found, width=_width()))


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

    asked = _asked(files, options)
    check_replay(asked, options["replay"])
    found = sides(asked)
    across, engines = asked.across_models, asked.across_engines
    with recorded(found, asked.keep, _progress, across_models=across, across_engines=engines) as (a, b):
        answer = compare_traces(a, b, across_models=across, across_engines=engines)
        if options["replay"]:
            from detdiff.engines.record import replay

            with _progress("replay") as on_token:
                # Without files, --model has said already what to record.
                moved = asked.model if files else None
                answer = replay(a, b, answer, progress=on_token, model=moved, across_models=across)
    answer = named(answer, found, asked.keep)
    _answer(options["as_json"], lambda: to_json(answer), lambda: divergence_text(answer, width=_width()))
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
    found = summarised(_asked(files, options), asked, _progress)
    write_pictures(found, wanted.plot, wanted.html)
    _answer(options["as_json"], lambda: summary_json(found), lambda: summary_text(found, width=_width()))
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
        _explain_inside(_asked(files, options), inside, controls, budget, options["as_json"])
    verdict = explained(_asked(files, options), controls, budget, _progress, repeats)
    _answer(options["as_json"], lambda: verdict_json(verdict), lambda: verdict_text(verdict, width=_width()))
    codes = {"identical": IDENTICAL, "undetermined": INCONCLUSIVE}
    click.get_current_context().exit(codes.get(verdict.kind, DIFFERENT))


def _explain_inside(
    asked: ComparisonArguments, where: str, controls: tuple[str, ...], budget: int | None, as_json: bool
) -> NoReturn:
    """Say whether what a server did appears on a local engine, and exit."""
    from detdiff.commands.inside import seen_inside
    from detdiff.explain.inside import ANOTHER_MODEL, NO_DIFFERENCE
    from detdiff.report.inside import inside_json, inside_text

    found = seen_inside(asked, where, controls, budget, _progress)
    _answer(as_json, lambda: inside_json(found), lambda: inside_text(found, width=_width()))
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
        _asked(files, {"partial": False, "keep": None, **options}),
        wanted,
        _progress,
        lambda step: click.echo(f"\r{step.sentence}: {step.rows:,} rows", err=True) if shown else None,
    )
    _answer(options["as_json"], lambda: reduction_json(found), lambda: reduction_text(found, width=_width()))


def _json_file(ctx: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
    ctx.meta[_JSON] = value is not None and str(value) == "-"
    return value


def file_option(name: str, metavar: str, help: str, **more: Any) -> Callable[[F], F]:
    """An option that says where to write something."""
    return click.option(name, metavar=metavar, type=LocalPath(), help=help, **more)


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
    asked = reports.kept_pair(_asked(files, options))
    kept = () if asked.keep is None else (asked.keep / "a", asked.keep / "b")
    how_far = reports.ReportOptions(options["replay"], why, budget)
    if reports.is_folder(asked):
        from detdiff.commands.report import gathered

        for line in gathered(asked, how_far, wanted, _width()):
            click.echo(line)
        return
    read = [path for path in asked.files if not isinstance(path, Path) or path.exists()]
    check(wanted, (*read, *kept))
    with reports.reported(asked, how_far, _progress) as made:
        written = reports.write(made, wanted)
        if ctx_json():
            click.echo(report_json_text(made.report), nl=False)
        elif written:
            click.echo(made.report.headline)
            for path in written:
                click.echo(f"  {path}")
        else:
            click.echo(report_text(made.report, width=_width(), colour=_colourful()), nl=False)


def ctx_json() -> bool:
    """Whether the answer goes to the standard output as JSON."""
    return bool(click.get_current_context().meta.get(_JSON))


def _colourful() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _asked(files: tuple[Place, ...], options: Mapping[str, Any]) -> ComparisonArguments:
    from detdiff.commands.sides import ComparisonArguments

    if len(files) > 2:
        name = click.get_current_context().info_name
        raise click.UsageError(f"{name} takes two files at most, and there are {len(files)}.")
    _import(options["imports"])
    short = [
        f"{key}={options[key]}" for key in ("split_rows", "kernels", "engine") if options[key] is not None
    ]
    if options["server_kind"] is not None:
        short.append(f"engine.kind={options['server_kind']}")
    return ComparisonArguments(
        files=files,
        model=options["model"],
        prompts=options["prompts"],
        prompts_file=options["prompts_file"],
        both=f"{options['both']} {_words(short)}",
        a=options["flags_a"],
        b=options["flags_b"],
        partial=options["partial"],
        keep=options["keep"],
        replay=options.get("replay", False),
        force_tokens=options.get("force_tokens"),
        across_models=options.get("across_models", False),
        across_engines=options.get("across_engines", False),
        imports=options["imports"],
    )


def _words(pairs: tuple[str, ...] | list[str]) -> str:
    """Single pairs as flags: a space inside of a value stays inside."""
    return shlex.join(pairs)


@main.command()
@click.argument("trace", type=TracePath())
@click.option("--forwards", is_flag=True, help="Show all forwards; with --json, the line of each as well.")
@click.option(
    "--sites",
    is_flag=True,
    help="List all sites by name; rules take those of kind linear and head, window_sites all.",
)
@click.option("--partial", is_flag=True, help="Read what is left of a damaged trace.")
@json_option
def show(trace: Place, forwards: bool, sites: bool, partial: bool, as_json: bool) -> None:
    """Say what TRACE holds.

    Its scenario, model and environment, each request's prompt and generated text, the forwards with who was in them
    and on which kernel paths, whether it is complete, and the observer check.
    """
    from detdiff.commands.show import opened, summary, summary_text

    found = summary(opened(trace, partial=partial), every=forwards, sites=sites)
    _answer(as_json, lambda: found, lambda: summary_text(found, width=_width()))


@main.command()
@click.argument("model", required=False, default="builtin")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free."
)
@click.option(
    "--trace",
    metavar="DIR",
    type=TracePath(),
    help="Record all requests into this new directory, to be replayed and explained.",
)
@click.option(
    "--kernels", metavar="NAME", help="Short for --set kernels=NAME: a dispatch profile, or native."
)
@click.option("--split-rows", metavar="N", help="Short for --set split_rows=N: at most N rows go row by row.")
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="A key of a scenario, such as active=8, row_budget=512 or schedule=serial.",
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Requests that wait at most; more are refused with status 429.",
)
@click.option(
    "--body-limit",
    metavar="BYTES",
    type=click.IntRange(1),
    default=4 << 20,
    show_default=True,
    help="Bytes of one request at most.",
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    help="How long running requests may go on once the server is told to end.",
)
@click.option(
    "--invariant",
    is_flag=True,
    help="Pin kernels first, so that no answer depends on who else is served: found, checked and priced here.",
)
@import_option
def serve(
    model: str,
    kernels: str | None,
    split_rows: str | None,
    changes: tuple[str, ...],
    imports: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve MODEL (builtin, a directory or a hub id) behind the OpenAI API, recorded where --trace says so.

    Requests that are there together run together, packed, in forwards of an mlx-lm model. The trace holds what was asked and
    when, forward by forward, so that detdiff record, compare and explain can run the very same forwards again.

    Example: detdiff serve builtin --kernels candle-metal --trace traces/served
    """
    from detdiff.commands.serve import ServeArguments, served

    _import(imports)
    for key, value in (("kernels", kernels), ("split_rows", split_rows)):
        if value is not None:
            changes = (*changes, f"{key}={value}")

    def on_start(address: str, name: str) -> None:
        click.echo(f"{name} is served at {address}/v1")
        sys.stdout.flush()

    click.echo(served(ServeArguments(model=model, flags=_words(changes), **options), on_start, click.echo))


@main.command()
@click.argument("scenario", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="Instead of SCENARIO: builtin, a directory, a hub id or a server's address.")
@engine_option("--set")
@click.option(
    "--set", "changes", metavar="KEY=VALUE", multiple=True, help="A key of the scenario for all policies."
)
@click.option(
    "--policy",
    "policies",
    metavar="POLICY",
    multiple=True,
    help="Such as static:8, continuous:8 or 'continuous:8 layout=packed split_rows=4'; serial is always measured.",
)
@click.option(
    "--requests",
    metavar="N",
    type=click.IntRange(1),
    help="How many are drawn. Default: 32, and with --find-split 16, the most at once.",
)
@click.option(
    "--prompt-lengths",
    metavar="LENGTHS",
    help="fixed:N, uniform:A-B or exponential:MEAN. Default: exponential:32, and with --find-split 8.",
)
@click.option(
    "--answer-lengths",
    metavar="LENGTHS",
    help="The same for answers. Default: exponential:16, and with --find-split 16.",
)
@click.option(
    "--arrivals",
    default="at-once",
    show_default=True,
    help="at-once, poisson:RATE or gamma:RATE:BURSTINESS, in requests a forward.",
)
@file_option("--workload", "FILE", "Instead of drawn requests: a JSONL file of real ones.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of all that is drawn.")
@click.option(
    "--rounds", metavar="N", type=click.IntRange(1), default=3, show_default=True, help="Timed rounds."
)
@click.option(
    "--clock",
    type=click.Choice(["wall", "processor"]),
    default="wall",
    show_default=True,
    help="What seconds are: those that pass, or those that this process computes, which other jobs do not lengthen.",
)
@click.option(
    "--simulate", is_flag=True, help="Only count: forwards, padding and memory, from lengths alone."
)
@click.option(
    "--find-split",
    is_flag=True,
    help="Instead of policies: from how many requests at once one batch is faster than its rows split.",
)
@click.option(
    "--page",
    metavar="POSITIONS",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Of a paged cache.",
)
@click.option(
    "--budget", metavar="POSITIONS", type=click.IntRange(1), help="With --simulate: the cache's room."
)
@click.option(
    "--goodput", metavar="NAME:MS", multiple=True, help="A limit that good requests keep: ttft, tpot or e2el."
)
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    type=LocalPath(),
    help="Write bench.json, bench.html, traces and the divergences into DIR.",
)
@import_option
@json_option
def bench(imports: tuple[str, ...], as_json: bool, changes: tuple[str, ...], **options: Any) -> None:
    """Measure batching policies: what each costs, and what it does to the answers.

    Every policy runs the same requests in rounds of changing order; beside its throughput and latency stand its answers
    against serial's (identical, diverges without a flip, flips k of n, inconclusive), and the counts of forwards, padding and idle slots that
    explain the figures.

    Example: detdiff bench --model builtin --policy static:8 --policy continuous:8 -o measured
    """
    from detdiff.bench.figures import bench_json
    from detdiff.commands.bench import BenchArguments, goodput_of, measured, split_measured, written
    from detdiff.report.bench import bench_text
    from detdiff.report.split import split_json, split_text

    _import(imports)
    asked = BenchArguments(changes=_words(changes), **options)
    shown = sys.stderr.isatty()

    def progress(what: str, done: int, of: int) -> None:
        if shown:
            click.echo(f"\r{done} of {of}: {what}\033[K", nl=False, err=True)

    def done() -> None:
        if shown:
            click.echo("\r\033[K", nl=False, err=True)

    if asked.find_split:
        search = split_measured(asked, progress)
        done()
        _answer(as_json, lambda: split_json(search), lambda: split_text(search, width=_width()))
        click.get_current_context().exit(IDENTICAL if search.finished else TROUBLE)
    found = measured(asked, progress)
    done()
    written(found, asked)
    goodput = goodput_of(asked.goodput)
    _answer(as_json, lambda: bench_json(found, goodput), lambda: bench_text(found, goodput, width=_width()))
    click.get_current_context().exit(IDENTICAL if found.finished else TROUBLE)


@main.command()
@click.argument("grid", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    type=LocalPath(),
    required=True,
    help="Directory of the sweep: new, or one that was interrupted.",
)
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1),
    help="Processes, or tasks of a cluster, at a time. Default: as processors and memory allow.",
)
@click.option(
    "--memory", "memory_mb", metavar="MB", type=click.IntRange(64), help="What one process may take at most."
)
@click.option(
    "--retries",
    metavar="N",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="How often a cell is run again whose worker was lost; a wrong answer never is.",
)
@file_option("--against", "LAST", "The folder of the sweep before: say what is new since then.")
@click.option(
    "--ray",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="local",
    help="Run the cells on a Ray cluster at ADDRESS (auto: the one that is there), or on one started here.",
)
@import_option
@json_option
def sweep(grid: Path, as_json: bool, **options: Any) -> None:
    """Run the cells of GRID, a TOML file with a base scenario, axes and pairs, and compare the pairs.

    DIR gets a trace for each scenario, an answer for each pair, failures beside answers, and a summary as a page, JSON Lines and
    JUnit's XML. After Ctrl-C the same command goes on where it was. Exit code 0: all identical; 1: a pair differs; 2: a pair has no
    answer; 3: a pair is inconclusive.

    Example: detdiff sweep nightly.toml -o sweeps/today --jobs 8 --against sweeps/yesterday
    """
    from detdiff.commands.sweep import SweepArguments, sweep_text, swept
    from detdiff.sweep.run import SweepStep
    from detdiff.sweep.summary import summary_json

    _import(options["imports"])
    shown = sys.stderr.isatty()

    def on_step(step: SweepStep) -> None:
        if shown:
            left = "" if step.left is None else f", about {_duration(step.left)} left"
            failed = f", {step.failed} failed" if step.failed else ""
            click.echo(f"\r{step.done} of {step.total} steps{failed}{left}\033[K", nl=False, err=True)

    try:
        found, notes = swept(SweepArguments(grid, **options), on_step)
    finally:
        if shown:
            click.echo("\r\033[K", nl=False, err=True)
    _answer(as_json, lambda: summary_json(found), lambda: sweep_text(found, notes, _width()))
    click.get_current_context().exit(found.exit_code)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@main.command()
@click.argument("target", required=False)
@click.option("--model", help="Instead of TARGET: builtin, a directory or a hub id; each linear shape once.")
@click.option("--site", help="With --model: this site alone, such as layers.0.mlp.down_proj.")
@click.option(
    "--on",
    metavar="BACKEND",
    help="native (MLX, the default), numpy, torch, a dispatch profile, a reference kernel, rows or pad:N.",
)
@click.option(
    "--as",
    "layout",
    type=click.Choice(["packed", "batch"]),
    default="packed",
    show_default=True,
    help="How M rows lie on MLX: packed [1, M, K], batch [M, 1, K].",
)
@click.option("--rows", help="Numbers of rows M, as 1..8,16,32. Default: 1..16, and 1..8 for a whole model.")
@click.option(
    "--seeds", type=int, default=3, show_default=True, help="Draws of rows and weights; at least 2."
)
@click.option("--array", help="For a function of your own: the arrays that it takes, numpy, mlx or torch.")
@click.option(
    "--shape", "k", metavar="K", type=int, help="For a function of your own: how wide its rows are."
)
@click.option(
    "--custom-code", is_flag=True, help="With --model: let the Python file that it names as its own run."
)
@click.option("--no-time", is_flag=True, help="Take no times.")
@click.option("--plot", metavar="SVG", type=LocalPath(), help="Write a chart as well.")
@json_option
def probe(as_json: bool, plot: Path | None, no_time: bool, **options: Any) -> None:
    """Find at which numbers of rows M an operation's bits change, and what each M costs.

    TARGET is linear:K,N,dtype[,bits[,group_size]], or module:function of your own, which takes an array (rows, K) and
    returns (rows, ...). Exit code 0: a row's bits depend on nothing but the row; 1: they change with M, position,
    neighbours or a repeat.

    Example: detdiff probe linear:576,576,float32 --rows 1..8
    """
    from detdiff.commands.probe import (
        ProbeArguments,
        answer,
        answer_json,
        answer_text,
        invariant,
        write_chart,
    )

    found = answer(ProbeArguments(timed=not no_time, **options), _progress)
    if plot is not None:
        write_chart(found, plot)
    _answer(as_json, lambda: answer_json(found), lambda: answer_text(found, width=_width()))
    click.get_current_context().exit(IDENTICAL if invariant(found) else DIFFERENT)


@main.command()
@json_option
def demo(as_json: bool) -> None:
    """Serial against continuous on the built-in model, in under a minute.

    Shows a request whose text flips because another one shared a forward with it, and two cases that do not flip.
    """
    from detdiff.demo import cases_json, run_demo, text

    cases = run_demo(_progress)
    if as_json:
        _write_json(cases_json(cases))
        return
    for part in text(cases, width=_width()):
        click.echo(part, nl=False)


@main.command()
@click.argument("name", required=False)
@click.option("--op", type=click.Choice(["linear", "head", "switch", "attention"]), help="Default: linear.")
@click.option("--m", metavar="RANGE", help="Rows, as 8 or 1..32; of a switch, gathered rows.")
@click.option("--k", type=click.IntRange(1), help="Inputs of the weight.")
@click.option("--n", type=click.IntRange(1), help="Outputs of the weight.")
@click.option("--bits", metavar="BITS", help="Width of the weight, or dense. Default: 4.")
@click.option("--group-size", type=click.IntRange(1), help="Default: 64.")
@click.option("--format", help="affine, or a GGUF block such as Q4_K. Default: affine, or dense.")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of the input. Default: bfloat16."
)
@click.option(
    "--layout",
    type=click.Choice(["packed", "padded"]),
    help="Rows as [1, M, K] or as [M, 1, K]. Default: packed.",
)
@click.option("--experts", type=click.IntRange(1), help="Of a switch. Default: 8.")
@click.option("--sorted", is_flag=True, default=None, help="A switch's rows are sorted by expert.")
@click.option("--query", metavar="RANGE", help="Attention: query length. Default: 1.")
@click.option("--keys", metavar="RANGE", help="Attention: key length with padding, as 1..4096.")
@click.option("--head-dim", type=click.IntRange(1), help="Attention. Default: 64.")
@click.option("--heads", type=click.IntRange(1), help="Attention. Default: 1.")
@click.option("--kv-heads", type=click.IntRange(1), help="Attention. Default: as many as heads.")
@click.option("--batch", type=click.IntRange(1), help="Attention: sequences. Default: 1.")
@click.option("--mask", type=click.Choice(["none", "causal", "array"]), help="Attention. Default: none.")
@json_option
def profiles(name: str | None, as_json: bool, **options: Any) -> None:
    """Say which kernel a dispatch profile takes for which number of rows.

    Without NAME, lists all profiles. NAME may carry parameters, as in mlx-metal:generation=13,letter=d, or be a
    .toml file of your own. Without a size, shows the profile's rules; with a range, where the kernel changes.

    Example: detdiff profiles mlx-metal --m 1..32 --k 2048 --n 2048
    """
    from detdiff.commands import profiles as answers

    question = answers.asked(options)
    if name is None:
        if question is not None:
            raise click.UsageError("The sizes ask about a profile; give its NAME first.")
        found = answers.listed()
        text = answers.list_text(found, _width())
        answer = answers.list_json(found)
    else:
        one = answers.opened(name)
        if question is None:
            text, answer = answers.profile_text(one, _width()), answers.rules_json(one)
        else:
            bands = answers.bands(one, question)
            text = answers.answer_text(one, question, bands, _width())
            answer = answers.answer_json(one, question, bands)
    _answer(as_json, lambda: answer, lambda: text)


@main.command("import-gguf")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("directory", type=LocalPath())
@click.option("--packed", is_flag=True, help="Keep Q4_0, Q4_1 and Q8_0 blocks as they are.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f16", "f32"]),
    default="bf16",
    show_default=True,
    help="Of other arrays.",
)
@json_option
def import_gguf(file: Path, directory: Path, packed: bool, dtype: str, as_json: bool) -> None:
    """Turn the model in a GGUF FILE into a DIRECTORY that mlx-lm and detdiff can load."""
    from detdiff.engines.mlx.gguf_import import import_gguf as run

    found = run(file, directory, dtype=dtype, packed=packed)
    if as_json:
        fields = dataclasses.asdict(found) | {"directory": str(found.directory)}
        _write_json({"schema": "detdiff.import/1", **fields})
        return
    click.echo(
        f"{found.directory}: {found.architecture} ({found.model_type}), {found.layers} layers, {found.tensors} tensors "
        f"({found.packed} packed), {found.dtype}, {found.bytes:,} bytes"
        f"{'' if found.chat_template else ', no chat template'}"
    )


if __name__ == "__main__":
    main()
