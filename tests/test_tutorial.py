"""The tutorial does what it says: its commands run in order, end as it says, and show what it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
TURNS = ROOT / "docs" / "turns.md"
DISTRIBUTED = ROOT / "docs" / "distributed.md"


def steps(text: str) -> Iterator[tuple[str, int, str]]:
    """Each command with the exit code that the page names after it, and the output that it shows."""
    parts = re.split(r"^ {4}detdiff ", text, flags=re.MULTILINE)[1:]
    for part in parts:
        command, _, rest = part.partition("\n")
        code = re.search(r"exit code (\d)", rest)
        shown = "\n".join(re.findall(r"^```text\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL))
        yield command, 0 if code is None else int(code[1]), shown


def words(text: str) -> str:
    """Text without what another processor may round to something else: numbers, quoted tokens, names of sites."""
    plain = re.sub(r'"[^"]*"|\d[\d,.-]*|\b[a-z_]+(?:\.[a-z_\d]+)+', "#", text)
    return " ".join(plain.split())


def test_every_command_does_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    # What comes after runs a real model in llama.cpp: tests/llama.
    found = list(steps(PAGE.read_text(encoding="utf-8").partition("\n## 6.")[0]))
    assert len(found) == 6
    for command, code, shown in found:
        result = run(*shlex.split(command))
        assert result.exit_code == code, (command, result.output)
        output = words(result.output)
        for line in shown.splitlines():
            if line.strip() and line != "[...]":
                assert words(line) in output, (command, line, result.output)
    assert {path.name for path in (tmp_path / "case").iterdir()} == {
        "a", "b", "report.html", "report.md", "report.json", "case.zip",
    }  # fmt: skip


def test_the_commands_of_turns_do_what_their_page_says() -> None:
    found = list(steps(TURNS.read_text(encoding="utf-8")))
    assert len(found) == 2
    for command, code, shown in found:
        result = run(*shlex.split(command))
        assert result.exit_code == code, (command, result.output)
        assert shown
        for line in shown.splitlines():
            assert words(line) in words(result.output), (command, line, result.output)


def test_the_commands_of_several_processes_do_what_their_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.toml").write_text(
        'model = "builtin"\nmax_tokens = 2\n[[request]]\nprompt = "In the beginning"\n'
    )
    page = DISTRIBUTED.read_text(encoding="utf-8")
    found = list(steps(page))
    assert [command.partition(" ")[0] for command, *_ in found] == ["record", "compare"]
    assert not re.findall(r"`detdiff \w+ [^`]*`", page), "a command line in the text is run by nobody"
    for command, code, shown in found:
        result = run(*shlex.split(command))
        assert result.exit_code == code, (command, result.output)
        for line in shown.splitlines():
            assert words(line) in words(result.output), (command, line, result.output)


def test_a_page_that_shows_something_else_is_noticed() -> None:
    text = (
        "    detdiff show a\n\nends with exit code 2:\n\n```text\nrows: 12 of x\n```\n\n    detdiff show b\n"
    )
    assert list(steps(text)) == [("show a", 2, "rows: 12 of x\n"), ("show b", 0, "")]
    assert words("rows: 13 of x") == words("rows: 12 of x") != words("rows: 12 of y")
