"""What README and docs say about the command line is what the command line does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from detdiff.cli import DIFFERENT, IDENTICAL, INCONCLUSIVE, TROUBLE, main

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")


def anchors(text: str) -> set[str]:
    """What links into a page may name: its headings as a forge spells them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def documented(text: str) -> list[list[str]]:
    """Every command line of a page's code: an indented line that starts with ``detdiff``, continuations joined."""
    lines = re.findall(r"^ {4}detdiff (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def parse(words: list[str]) -> None:
    """Parses a command line without running it; raises click.UsageError."""
    if words[0] not in main.commands:
        raise click.UsageError(f"no command {words[0]}")
    main.commands[words[0]].make_context(words[0], words[1:], parent=click.Context(main))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_command_line_is_one(page: Path) -> None:
    for words in documented(page.read_text(encoding="utf-8")):
        parse(words)


def test_command_lines_are_found_and_wrong_ones_refused() -> None:
    text = 'Text\n\n    detdiff compare a b --kep DIR\n    detdiff shwo \\\n      TRACE\n\ndetdiff is a tool "of\n'
    assert documented(text) == [["compare", "a", "b", "--kep", "DIR"], ["shwo", "TRACE"]]
    for words in documented(text):
        with pytest.raises(click.UsageError):
            parse(words)
    assert len(documented((ROOT / "README.md").read_text(encoding="utf-8"))) >= 8


def test_every_command_is_in_the_readme() -> None:
    used = {words[0] for words in documented((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert used | {"demo"} == set(main.commands)
    assert "make demo" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_the_exit_codes_are_those_of_the_command_line(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d) \| (.*) \|$", text, re.MULTILINE))
    assert set(map(int, rows)) == {IDENTICAL, DIFFERENT, TROUBLE, INCONCLUSIVE}
    for code, word in (
        (IDENTICAL, "identical"),
        (DIFFERENT, "different"),
        (TROUBLE, "trouble"),
        (INCONCLUSIVE, "inconclusive"),
    ):
        assert word in rows[str(code)]


def test_the_page_of_commands_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "tools/cli_docs.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run `python tools/cli_docs.py`"


def test_the_page_of_commands_has_every_command_and_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name, command in main.commands.items():
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        options = [
            option for param in command.params if isinstance(param, click.Option) for option in param.opts
        ]
        assert options and [option for option in options if option not in section] == []


def test_every_page_is_linked_and_every_link_leads_somewhere() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target, anchor in ANCHOR.findall(page.read_text(encoding="utf-8")):
            other = page.parent / target if target else page
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"{page.name}: {target}#{anchor}"


def test_a_link_to_no_heading_is_noticed() -> None:
    text = "# One, two & `three`\n\nsee [there](#one-two--three) and [here](x.md#nowhere)\n"
    assert anchors(text) == {"one-two--three"}
    assert ANCHOR.findall(text) == [("", "one-two--three"), ("x.md", "nowhere")]
