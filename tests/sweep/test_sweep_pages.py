"""Every command line of docs/sweeps.md is run here, or named with what it needs and who runs it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import run
from grids import grid, run_here

PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"
ELSEWHERE = {
    "sweep nightly.toml -o sweeps/today --ray auto": "a cluster: tests/sweep/test_sweep_on_ray.py runs it on one of its own",
}
ENDS = {"sweep": 1, "report": 0}


def command_lines(text: str) -> list[str]:
    """Those that stand alone and those in sentences, but for a command's bare name."""
    return re.findall(r"^ {4}detdiff (.*)$|`detdiff (\w+ [^`]+)`", text, re.MULTILINE)


def test_every_command_line_of_the_page_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)
    monkeypatch.chdir(tmp_path)
    small = grid(tmp_path, '"engine.off" = [true, false]\nschedule = ["serial", "static"]')
    for name in ("nightly.toml", "GRID.toml"):
        (tmp_path / name).write_text(small.read_text())
    (tmp_path / "sweeps").mkdir()
    assert run("sweep", "nightly.toml", "-o", "sweeps/yesterday").exit_code == 1
    found = ["".join(each) for each in command_lines(PAGE.read_text(encoding="utf-8"))]
    assert ELSEWHERE.keys() < set(found)
    for line in [each for each in found if each not in ELSEWHERE]:
        ended = run(*shlex.split(line))
        assert ended.exit_code == ENDS[line.partition(" ")[0]], (line, ended.output)
    assert (tmp_path / "pages/index.html").is_file()
    assert "2 the same" in run(*shlex.split(found[1])).output


def test_command_lines_are_found_in_sentences_too() -> None:
    text = "    detdiff sweep a -o b\n\nas `detdiff report b` has it, and `detdiff show`.\n"
    assert ["".join(each) for each in command_lines(text)] == ["sweep a -o b", "report b"]
