"""The commands that measure: bench, sweep and probe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .group import DIFFERENT, IDENTICAL, TROUBLE, main, print_answer, progress, text_width
from .options import LocalPath, as_flags, engine_option, file_option, import_first, import_option, json_option


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

    import_first(imports)
    asked = BenchArguments(changes=as_flags(changes), **options)
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
        print_answer(as_json, lambda: split_json(search), lambda: split_text(search, width=text_width()))
        click.get_current_context().exit(IDENTICAL if search.finished else TROUBLE)
    found = measured(asked, progress)
    done()
    written(found, asked)
    goodput = goodput_of(asked.goodput)
    print_answer(
        as_json, lambda: bench_json(found, goodput), lambda: bench_text(found, goodput, width=text_width())
    )
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

    import_first(options["imports"])
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
    print_answer(as_json, lambda: summary_json(found), lambda: sweep_text(found, notes, text_width()))
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

    found = answer(ProbeArguments(timed=not no_time, **options), progress)
    if plot is not None:
        write_chart(found, plot)
    print_answer(as_json, lambda: answer_json(found), lambda: answer_text(found, width=text_width()))
    click.get_current_context().exit(IDENTICAL if invariant(found) else DIFFERENT)
