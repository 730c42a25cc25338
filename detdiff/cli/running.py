"""The commands that run one model: record, serve and demo."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .group import main, print_answer, print_json, progress, text_width
from .options import TracePath, as_flags, engine_option, import_first, import_option, json_option

if TYPE_CHECKING:
    from detdiff.trace import Place


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

    import_first(imports)
    for key, value in (("capture", capture), ("engine", engine), ("engine.processes", launch)):
        if value is not None:
            changes = (*changes, f"{key}={value}")
    asked = read_scenario(scenario).with_changes(**parse_flags(as_flags(changes)))
    with progress("recording") as on_token:
        found = summary(record_trace(asked, trace, on_token))
    print_answer(as_json, lambda: found, lambda: summary_text(found, width=text_width()))


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

    import_first(imports)
    for key, value in (("kernels", kernels), ("split_rows", split_rows)):
        if value is not None:
            changes = (*changes, f"{key}={value}")

    def on_start(address: str, name: str) -> None:
        click.echo(f"{name} is served at {address}/v1")
        sys.stdout.flush()

    click.echo(served(ServeArguments(model=model, flags=as_flags(changes), **options), on_start, click.echo))


@main.command()
@json_option
def demo(as_json: bool) -> None:
    """Serial against continuous on the built-in model, in under a minute.

    Shows a request whose text flips because another one shared a forward with it, and two cases that do not flip.
    """
    from detdiff.demo import cases_json, run_demo, text

    cases = run_demo(progress)
    if as_json:
        print_json(cases_json(cases))
        return
    for part in text(cases, width=text_width()):
        click.echo(part, nl=False)
