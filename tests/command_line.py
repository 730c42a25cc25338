"""Running detdiff's command line in this process, and reading the errors it ends with."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from click.testing import CliRunner, Result

from detdiff.cli import main

PROMPTS = ("In the beginning God created", "And the king said unto the people, Hear ye")
FLAGS = "layout=packed kernels=candle-metal prefill_chunk=4 max_tokens=6 ignore_stop"
SCENARIO = """
model = "builtin"
layout = "packed"
kernels = "candle-metal"
prefill_chunk = 4
max_tokens = 6
ignore_stop = true

[[request]]
id = "anchor"
prompt = "In the beginning God created"

[[request]]
id = "follower"
prompt = "And the king said unto the people, Hear ye"
"""


def run(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Result:
    """The command in this process; ``output`` is stdout and stderr together."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=environment)


def heard_again() -> None:
    """Ctrl-C as a terminal gives it: a suite that a script starts in its background ignores SIGINT, and so would the
    processes that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def recorded_pair(folder: Path, *changes: str) -> Path:
    """``folder`` with SCENARIO and its traces a (serial) and b (continuous); ``changes`` are arguments of both recordings."""
    (folder / "scenario.toml").write_text(SCENARIO)
    for name, schedule in (("a", "serial"), ("b", "continuous")):
        own = ("--set", f"schedule={schedule}", *changes)
        result = run("record", folder / "scenario.toml", "-o", folder / name, *own)
        assert result.exit_code == 0, result.output
    return folder


def paragraph(result: Result, code: int = 2) -> str:
    """The error that a command ended with: one paragraph, its line breaks undone."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    text = result.stderr.strip()
    assert text.startswith("detdiff: ") and "\n\n" not in text
    return " ".join(text.split())


def flags(*prompts: str, model: str | Path = "builtin") -> list[str]:
    return ["compare", "--model", str(model), *(word for text in prompts for word in ("--prompt", text))]
