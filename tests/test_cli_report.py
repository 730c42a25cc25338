"""`detdiff report` as it is used: on the terminal, into files, from saved answers, over a folder, and as a pack."""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import FLAGS, PROMPTS, flags, paragraph, recorded_pair, run

from detdiff.report.saved import read_saved
from detdiff.trace import Trace


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the traces a (serial) and b (continuous) of one scenario, and values in both."""
    return recorded_pair(tmp_path_factory.mktemp("traces"), "--capture", "full", "--set", "lens=true")


@pytest.mark.thorough
def test_without_a_format_it_goes_to_the_terminal(traces: Path) -> None:
    result = run("report", traces / "a", traces / "b")
    assert result.exit_code == 0 and result.stdout.startswith("The runs diverge: ")
    assert "\x1b" not in result.stdout
    assert f"detdiff explain {traces}/a {traces}/b" in " ".join(result.stdout.split())


def test_every_format_is_written_and_named(traces: Path, tmp_path: Path) -> None:
    files = [tmp_path / "new" / name for name in ("r.html", "r.md", "r.json")]
    formats = zip(("--html", "--markdown", "--json"), files, strict=True)
    words = [word for pair in formats for word in pair]
    result = run("report", traces / "a", traces / "b", *words, "--plots", tmp_path / "plots")
    assert result.exit_code == 0
    headline, *named = result.stdout.splitlines()
    assert headline.startswith("The runs diverge: ")
    plots = sorted((tmp_path / "plots").iterdir())
    assert sorted(line.strip() for line in named) == sorted(map(str, [*files, *plots]))
    assert {plot.name.partition("-")[0] for plot in plots} >= {"map", "margins", "timeline.svg"}
    for plot in plots:
        ElementTree.parse(plot)
    page, markdown = (file.read_text(encoding="utf-8") for file in files[:2])
    assert page.lower().startswith("<!doctype html>") and "origin at" in markdown
    saved = read_saved(files[2])
    assert saved.series is not None and saved.divergence is not None
    assert any(request.layers.ulp is not None for request in saved.series.requests)


@pytest.mark.thorough
def test_a_verdict_leads_the_report(traces: Path, tmp_path: Path) -> None:
    result = run(
        "report", traces / "a", traces / "b", "--explain", "--budget", "14", "--json", "-", "--keep", tmp_path / "k"
    )  # fmt: skip
    assert "--keep says where to record" in paragraph_of_json(result.stdout)
    result = run("report", traces / "a", traces / "b", "--explain", "--budget", "14", "--json", "-")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["schema"] == "detdiff.report/2" and answer["kind"] == "numerics"
    assert answer["headline"].startswith("Rounding: ")


def paragraph_of_json(text: str) -> str:
    answer = json.loads(text)
    assert answer["schema"] == "detdiff.error/1" and "\n" not in answer["message"]
    return str(answer["message"])


@pytest.mark.parametrize("command", ["compare", "explain", "report"])
def test_what_other_commands_save_is_reported(command: str, traces: Path, tmp_path: Path) -> None:
    more = ["--control", "repeat"] if command == "explain" else []
    given = ["--json", "-"] if command == "report" else ["--json"]
    saved = tmp_path / "answer.json"
    saved.write_text(run(command, traces / "a", traces / "b", *more, *given).stdout)
    result = run("report", saved)
    assert result.exit_code == 0, result.output
    # The traces are still there, so that there is something to draw.
    assert "map of layers: " in result.stdout
    assert run("report", saved, "--plots", tmp_path / "plots").exit_code == 0
    with_flags = run("report", saved, "--both", "max_tokens=3")
    assert "holds an answer" in paragraph(with_flags)


def test_traces_that_are_others_by_now_are_not_drawn(traces: Path, tmp_path: Path) -> None:
    saved = tmp_path / "answer.json"
    answer = json.loads(run("compare", traces / "a", traces / "b", "--json").stdout)
    answer["a"]["scenario"]["top"] = 99
    saved.write_text(json.dumps(answer))
    result = run("report", saved)
    assert result.exit_code == 0 and "map of layers" not in result.stdout
    assert "not at hand" in paragraph(run("report", saved, "--plots", tmp_path / "plots"))
    assert "are not where it says" in paragraph(run("report", saved, "--pack", tmp_path / "x.zip"))


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", '{"schema": "detdiff.trace-summary/1"}', '{"schema": "detdiff.report/2"}']
)
def test_a_file_that_is_no_answer_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    assert "x.json" in paragraph(run("report", tmp_path / "x.json"))


@pytest.mark.thorough
def test_a_folder_gives_an_index_and_a_page_each(traces: Path, tmp_path: Path) -> None:
    folder = tmp_path / "comparisons"
    folder.mkdir()
    native = FLAGS.replace("candle-metal", "native")
    for name, both in (("apart", FLAGS), ("equal", native)):
        schedules = ["--a", "schedule=serial", "--b", "schedule=continuous"]
        run(*flags(*PROMPTS), "--both", both, *schedules, "--keep", folder / name)
    (folder / "saved.json").write_text(run("compare", traces / "a", traces / "b", "--json").stdout)
    (folder / "broken.json").write_text("{")
    text = run("report", folder)
    assert text.exit_code == 0, text.output
    for word in ("apart", "equal", "saved", "identical", "different", "not read: ", "broken.json"):
        assert word in text.stdout
    result = run("report", folder, "--html", tmp_path / "site" / "index.html")
    assert result.exit_code == 0, result.output
    pages = {path.name for path in (tmp_path / "site").iterdir()}
    assert pages == {"index.html", "apart.html", "equal.html", "saved.html"}
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    for page in pages - {"index.html"}:
        assert re.search(rf'href="(?:\./)?{page}"', index)
    assert "of one comparison" in paragraph(run("report", folder, "--markdown", tmp_path / "x.md"))


def test_an_empty_folder_is_no_report(tmp_path: Path) -> None:
    assert "holds no comparison" in paragraph(run("report", tmp_path))


@pytest.mark.thorough
def test_a_pack_holds_all_but_values_and_weights_and_runs_again(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one.zip", "two.zip"):
        result = run("report", traces / "a", traces / "b", "--pack", tmp_path / name)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "pack")
    pack = tmp_path / "pack"
    assert names >= {"README.md", "a.toml", "b.toml", "environment.json", "a/trace.json", "b/trace.json"}
    assert names >= {f"report.{kind}" for kind in ("html", "md", "txt", "json")}
    for side in "ab":
        kept, whole = (Trace.open(folder / side, checked=True) for folder in (pack, traces))
        kept.verify()
        assert kept.complete and not any(shard.value_columns() for shard in kept.shards)
        assert any(shard.value_columns() for shard in whole.shards)
        assert run("compare", pack / side, traces / side).exit_code == 0
    monkeypatch.chdir(pack)
    commands = [
        shlex.split(line) for line in re.findall(r"^ {4}detdiff (.*)$", Path("README.md").read_text(), re.M)
    ]
    assert commands == [["explain", "a.toml", "b.toml"], ["compare", "a", "b", "--replay"]]
    again = run(*commands[0], "--control", "pin_kernels", "--json")
    assert again.exit_code in (1, 3)
    arising = [r["origin"]["site"] for r in json.loads(again.stdout)["divergence"]["requests"] if r["origin"]]
    first = json.loads(run("compare", traces / "a", traces / "b", "--json").stdout)
    assert arising == [r["origin"]["site"] for r in first["requests"] if r["origin"]]
    assert run(*commands[1]).exit_code == 1
