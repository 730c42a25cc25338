"""The group of all commands: errors as one paragraph and an exit code, answers as text or JSON, a bar on a terminal."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from detdiff import __version__
from detdiff.errors import Failure

if TYPE_CHECKING:
    # What a command needs is imported by it: --help of all of them loads nothing.
    from detdiff.commands.sides import OnToken

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
JSON, DEBUG = "detdiff.json", "detdiff.debug"


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
            if ctx.meta.get(JSON):
                print_json(Failure("UsageError", error.format_message(), error.exit_code).to_json())
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                # Whoever read the answer has stopped, as `head` does. Nothing may be written at exit either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            elif ctx.meta.get(DEBUG):
                traceback.print_exc()
            else:
                _fail(Failure.of(error), bool(ctx.meta.get(JSON)))
            ctx.exit(Failure.of(error).exit_code)


def _fail(failure: Failure, as_json: bool) -> None:
    if as_json:
        print_json(failure.to_json())
    # As an indent, because a path that fills the line would push the next word from it.
    text = textwrap.fill(
        failure.message,
        text_width(),
        initial_indent="detdiff: ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo(text, err=True)


def text_width() -> int:
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def print_json(answer: Mapping[str, Any]) -> None:
    click.echo(json.dumps(answer, indent=1, allow_nan=False))


def print_answer(as_json: bool, answer: Callable[[], Mapping[str, Any]], text: Callable[[], str]) -> None:
    """Print one of the two; the other is not made."""
    if as_json:
        print_json(answer())
    else:
        click.echo(text(), nl=False)


def noted(key: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def note(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[key] = value
        return value

    return note


def answers_in_json() -> bool:
    """Whether the answer goes to the standard output as JSON."""
    return bool(click.get_current_context().meta.get(JSON))


@contextmanager
def progress(label: str) -> Iterator[OnToken | None]:
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
    "--debug", is_flag=True, expose_value=False, callback=noted(DEBUG), help="Show tracebacks of errors."
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
