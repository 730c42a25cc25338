"""Where `detdiff report` writes: never over what it reads, never two formats into one file, and all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
from command_line import PROMPTS, flags, paragraph, run

import detdiff.commands.report as reports
from detdiff.commands.report import ReportOutputs, opened_answer, put, write
from detdiff.errors import Interrupted
from detdiff.report.saved import read_saved


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as --keep makes it, and an answer about it beside it."""
    folder = tmp_path_factory.mktemp("kept")
    both = "layout=packed kernels=candle-metal prefill_chunk=4 max_tokens=4 ignore_stop capture=full"
    sides = ["--a", "schedule=serial", "--b", "schedule=continuous"]
    result = run(*flags(*PROMPTS), "--both", both, *sides, "--keep", folder / "pair", "--json")
    assert result.exit_code in (0, 1), result.output
    (folder / "answer.json").write_text(result.stdout, encoding="utf-8")
    return folder


@pytest.fixture
def pair(kept: Path, tmp_path: Path) -> Path:
    """A copy of the two traces, which a test may lose."""
    return Path(shutil.copytree(kept / "pair", tmp_path / "pair"))


def _bytes(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("option", ["--html", "--markdown", "--json", "--pack"])
@pytest.mark.parametrize("place", ["a/trace.json", "b/new"])
def test_nothing_is_written_into_a_trace_that_is_read(option: str, place: str, pair: Path) -> None:
    before = _bytes(pair)
    result = run("report", pair / "a", pair / "b", option, pair / place)
    assert "which the report is made from" in paragraph(result)
    assert _bytes(pair) == before


def test_nothing_is_written_over_an_answer_or_a_trace_that_it_is_drawn_from(kept: Path, pair: Path) -> None:
    answer = json.loads((kept / "answer.json").read_text(encoding="utf-8"))
    for side in "ab":
        answer[side]["trace"] = str(pair / side)
    saved = pair / "answer.json"
    saved.write_text(json.dumps(answer), encoding="utf-8")
    before = _bytes(pair)
    for target in (saved, pair / "b" / "texts.jsonl"):
        assert "which the report is made from" in paragraph(run("report", saved, "--html", target))
    assert _bytes(pair) == before


def test_an_index_is_not_written_over_an_answer_of_its_folder(kept: Path, tmp_path: Path) -> None:
    shutil.copy(kept / "answer.json", tmp_path / "one.json")
    before = _bytes(tmp_path)
    assert "which the report is made from" in paragraph(
        run("report", tmp_path, "--html", tmp_path / "one.json")
    )
    assert _bytes(tmp_path) == before


def test_an_index_and_a_page_are_two_files(kept: Path, tmp_path: Path) -> None:
    folder = tmp_path / "comparisons"
    folder.mkdir()
    shutil.copy(kept / "answer.json", folder / "one.json")
    result = run("report", folder, "--html", tmp_path / "site" / "one.html")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"one.html", "one-2.html"}
    assert "one-2.html" in (tmp_path / "site" / "one.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--html", "x", "--markdown", "./x"], "both name"),
        (["--html", "x", "--plots", "x/plots"], "both name"),
        (["--html", "-"], "only --json takes -"),
        (["--markdown", ""], "is a directory"),
        (["--html", "folder"], "is a directory"),
        (["--html", "file/x.html"], "which is a file"),
        (["--plots", "file"], "is a file"),
        (["--plots", "file/plots"], "which is a file"),
    ],
)
def test_places_that_cannot_be_are_refused_before_anything_is_written(
    words: list[str], said: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert said in paragraph(run("report", kept / "answer.json", *words))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_pictures_may_lie_beside_the_page(kept: Path, tmp_path: Path) -> None:
    words = ("--plots", tmp_path / "out", "--html", tmp_path / "out" / "report.html")
    assert run("report", kept / "pair", *words).exit_code == 0
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".svg", ".html"}


def test_a_format_that_cannot_be_made_leaves_none_behind(kept: Path, tmp_path: Path) -> None:
    answer = json.loads((kept / "answer.json").read_text(encoding="utf-8"))
    answer["a"]["trace"] = "gone"
    (tmp_path / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    for option in ("--plots", "--pack"):
        result = run(
            "report", tmp_path / "answer.json", "--html", tmp_path / "x.html", option, tmp_path / "x"
        )
        assert "Name the" in paragraph(result)
    assert [path.name for path in tmp_path.iterdir()] == ["answer.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    put(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text(encoding="utf-8") == "text"
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        put(tmp_path / "pipe", "text")
        assert os.read(end, 100) == b"text"
    finally:
        os.close(end)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_an_error_names_the_file_and_leaves_no_half_of_one(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        put(tmp_path / "taken", "text")
    put(tmp_path / f"{'x' * 250}.txt", "a name as long as there may be")
    with pytest.raises(OSError, match="yyy"):
        put(tmp_path / ("y" * 300), "text")
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == ["taken", "xxxxx"]


@pytest.mark.usefixtures("hears_ctrl_c")
def test_an_interrupt_says_what_is_there_by_then(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened_answer(read_saved(kept / "answer.json"), "")

    def interrupted(path: Path, text: str) -> Path:
        if path.suffix == ".md":
            signal.raise_signal(signal.SIGINT)
        return put(path, text)

    monkeypatch.setattr(reports, "put", interrupted)
    with pytest.raises(Interrupted, match=r"x\.html and no more was written"):
        write(made, ReportOutputs(html=tmp_path / "x.html", markdown=tmp_path / "x.md"))


def test_a_directory_with_the_two_traces_is_those_two(kept: Path) -> None:
    given, named = run("report", kept / "pair"), run("report", kept / "pair" / "a", kept / "pair" / "b")
    assert given.exit_code == 0 and given.stdout == named.stdout


def test_an_answer_is_known_by_how_it_begins(kept: Path, tmp_path: Path) -> None:
    text = (kept / "answer.json").read_text(encoding="utf-8")
    (tmp_path / "saved").write_text(f"\ufeff\n{text}", encoding="utf-8")
    result = run("report", tmp_path / "saved")
    assert result.exit_code == 0, result.output
    assert "of two sides already" in paragraph(run("report", kept / "pair" / "a", tmp_path / "saved"))


@pytest.mark.parametrize(
    "words",
    [["--explain"], ["--replay"], ["--keep", "k"], ["--explain", "--budget", "3"], ["--both", "top=3"]],
    ids=["explain", "replay", "keep", "budget", "both"],
)
def test_what_says_how_to_run_goes_with_something_to_run(words: list[str], kept: Path) -> None:
    assert "say what to run" in paragraph(run("report", kept / "answer.json", *words))
    assert "say what to run" in paragraph(run("report", kept, *words))


def test_a_budget_is_of_the_controls(kept: Path) -> None:
    assert "only --explain runs any" in paragraph(run("report", kept / "pair", "--budget", "3"))


@pytest.mark.thorough
def test_explain_and_replay_together_do_both(kept: Path, tmp_path: Path) -> None:
    words = ("--explain", "--budget", "1", "--both", "capture=digest", "--json", tmp_path / "r.json")
    sides = ("--a", "schedule=serial", "--b", "schedule=continuous")
    both = "layout=packed kernels=candle-metal prefill_chunk=4 max_tokens=4 ignore_stop"
    given = [word for text in PROMPTS for word in ("--prompt", text)]
    result = run(
        "report", "--model", "builtin", *given, "--both", both, *sides, *words[:3], "--replay", *words[5:]
    )
    assert result.exit_code == 0, result.output
    saved = read_saved(tmp_path / "r.json")
    assert saved.verdict is not None and saved.divergence is not None
    arising = [request.origin for request in saved.divergence.requests if request.origin is not None]
    assert arising and any(origin.magnitude is not None for origin in arising)


def test_a_folder_of_odd_names_has_its_index(kept: Path, tmp_path: Path) -> None:
    folder = tmp_path / "comparisons"
    folder.mkdir()
    odd = Path(os.fsdecode(b"\xff<b>.json"))
    try:
        shutil.copy(kept / "answer.json", folder / odd)
    except OSError:
        pytest.skip("this file system takes no names that are not UTF-8")
    (folder / "\x1b[31mred.json").write_text("{", encoding="utf-8")
    result = run("report", folder, "--html", tmp_path / "site" / "index.html")
    assert result.exit_code == 0, result.output
    assert "./%FF%3Cb%3E.html" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / odd.with_suffix(".html")).is_file()
    (refused,) = (line for line in result.stdout.splitlines() if line.startswith("not read: "))
    assert "\x1b" not in refused and refused.count("red.json") == 1


def test_a_side_that_is_not_there_is_said_before_where_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "nowhere is not there" in paragraph(run("report", "nowhere", "--html", "nowhere/index.html"))
