#!/usr/bin/env python3
"""Write docs/cli.md from the commands' own help, and the tables of docs/scenario.md from the table of keys.

python tools/cli_docs.py            writes both; what is not a table of docs/scenario.md stays
python tools/cli_docs.py --check    exit status 1 when one of them is out of date, as a test asks
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import click

from detdiff.cli import main as cli
from detdiff.scenario.keys import TABLE

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEADER = "| key | value | default |\n|---|---|---|\n"
INTRODUCTION = """\
# Commands

This page is made by `python tools/cli_docs.py` from the commands' own help.

## Exit codes

As diff(1) does, so that a script can ask:

| code | meaning |
|---|---|
| 0 | `compare`, `explain`, `sweep`: identical. `probe`: a row's bits depend on the row alone. Other commands: done |
| 1 | `compare`, `sweep`: different. `explain`: numerics, bug, configuration or nondeterminism. `probe`: bits depend on something else |
| 2 | trouble: bad arguments or input, an interrupt, a full disk, a fault of detdiff |
| 3 | `compare`, `sweep`: inconclusive. Nothing could be compared, or nothing differs and not everything could be compared. `explain`: undetermined |

Every error is one paragraph on stderr. `detdiff --debug COMMAND ...` shows the traceback as well.

Ctrl-C ends `record` with code 2; the trace keeps every finished shard and what could still be written, and `show` reads it.
`compare` records into a temporary directory unless `--keep` names one. Ctrl-C ends `reduce` with code 2 as well, and the same
command goes on where it was.

## JSON

With `--json` the answer goes to stdout as one JSON object, whose `schema` names its form:

| command | schema |
|---|---|
| `compare` | `detdiff.divergence/2` |
| `compare` over many requests | [`detdiff.summary/1`](json-schema.md#the-json-form-of-a-summary) |
| `explain` | [`detdiff.verdict/2`](json-schema.md#the-json-answer-of-explain) |
| `record`, `show` | `detdiff.trace-summary/1`: what the text shows; `lacks` has a reason for each thing that the engine could not show; `groups` are consecutive forwards with equal composition and kernel paths; `each_forward` and `each_site` (name, kind and layer of every site) are there with `--forwards` and `--sites` |
| `probe` | `detdiff.probe/1`, and `detdiff.probe-sweep/1` for a model; [the page about it](probe.md) has the keys |
| `demo` | `detdiff.demo/2`: `cases`, each with `title`, `anchor` and `divergence` |
| `profiles` | `detdiff.profiles/1`: `profiles`, each with `name`, `backend`, `note`, `parameters`, `rules`, `tags` |
| `profiles NAME` | `detdiff.profile/1`: the same and `each_rule`; with a size `axis` (m, keys or query), `call`, `thresholds` (the sizes at which the kernel, or a value it works by, changes) and `bands` (`first`, `last`, and `parts` with rows, `kernel`, `rule`, `source`, `tag`) |
| `report` | [`detdiff.report/2`](json-schema.md#the-json-form-of-a-report), by `--json -` |
| `reduce` | `detdiff.reduction/2`: `a` and `b` (the files of the smallest pair), `twin` (its model of random weights, or null), `rows_before`, `rows_after`, `tried`, `finished`, `dropped` (settings), `verdict`, `rule`, `said`, `site`, `steps` (each with `said`, `rows`, `requests`, `prompt_tokens`, `max_tokens`, `layers`) and `command` |
| `sweep` | `detdiff.sweep/1`: `name`, `exit_code`, `pairs` (each a line of [`sweep.jsonl`](sweeps.md#what-is-in-dir)) and `gone` |
| `import-gguf` | `detdiff.import/1` |
| any, on an error | `detdiff.error/1`: `error` (the broken rule), `message`, `exit_code` |
"""


def render(command: click.Command, context: click.Context) -> str:
    """One command as Markdown: usage, help, arguments and options."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"`{usage}`", _prose(command.help or "")]
    options = [param for param in command.params if isinstance(param, click.Option)]
    records = [record for param in options if (record := param.get_help_record(context)) is not None]
    if records:
        rows = [f"| `{names.replace('|', '/')}` | {words.replace('|', '/')} |" for names, words in records]
        parts.append("\n".join(["| option | |", "|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def _prose(text: str) -> str:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    for place, words in enumerate(paragraphs):
        before, example, command = words.partition("Example: ")
        paragraphs[place] = f"{before}Example:\n\n    {command}" if example else textwrap.fill(words, 120)
    return "\n\n".join(paragraphs)


def page() -> str:
    """docs/cli.md as it should be."""
    root = click.Context(cli, info_name="detdiff")
    parts = [INTRODUCTION.rstrip(), "## detdiff", render(cli, root)]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        parts += [f"## {name}", render(command, click.Context(command, root, name))]
    return "\n\n".join(parts) + "\n"


def scenario_page(before: str) -> str:
    """docs/scenario.md with its tables as they should be. Raises KeyError for a table of no section."""
    tables = {
        keys[0].name: "".join(f"| `{key.name}` | {key.value} | {key.default} |\n" for key in keys)
        for keys in TABLE.values()
    }
    return re.sub(
        re.escape(HEADER) + r"\| `(\w+)` .*\n(?:\|.*\n)*",
        lambda found: HEADER + tables[found[1]],
        before,
    )


def main() -> int:
    """Run the command line; returns the exit status."""
    scenario = (DOCS / "scenario.md").read_text(encoding="utf-8")
    pages = {"cli.md": page(), "scenario.md": scenario_page(scenario)}
    for name, text in pages.items():
        path = DOCS / name
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
