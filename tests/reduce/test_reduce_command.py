"""`detdiff reduce` as it is used: for people and for programs, after Ctrl-C, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import heard_again, paragraph, run

from detdiff.errors import ReductionError
from detdiff.reduce import reduce
from detdiff.scenario import Scenario

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "tie_word_embeddings": True,
    "detdiff_random": {"seed": 0, "dtype": "float32"},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario file on a model of random weights beside it."""
    folder = tmp_path_factory.mktemp("scenario")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    words = ['model = "./model"', 'layout = "packed"', 'kernels = "candle-metal"', "max_tokens = 3"]
    for name, first, length in (("anchor", 1, 9), ("follower", 30, 12), ("third", 50, 20)):
        words += ["[[request]]", f'id = "{name}"', f"tokens = {list(range(first, first + length))}"]
    (folder / "scenario.toml").write_text("\n".join(words))
    return folder / "scenario.toml"


def arguments(scenario: Path, folder: Path, *more: str) -> list[str]:
    sides = ["--a", "schedule=serial", "--b", "schedule=continuous"]
    return ["reduce", str(scenario), *sides, "-o", str(folder), *more]


@pytest.fixture(scope="module")
def text(scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What is printed, and the folder that it is about."""
    folder = tmp_path_factory.mktemp("text") / "smaller"
    result = run(*arguments(scenario, folder))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout, folder


def test_the_text_says_what_became_of_it_and_how_to_see_it(text: tuple[str, Path]) -> None:
    printed, folder = text
    head = " ".join(printed.split())
    found = re.match(
        r"(\d+) rows became (\d+) \((\d+)% of what it was\), in (\d+) pairs that were run; the", head
    )
    assert found is not None
    before, after = int(found[1]), int(found[2])
    assert after * 4 <= before
    assert re.search(r"the verdict is still numerics, origin at (layers\.\d\.|embed_tokens\.as_linear)", head)
    assert re.search(r"^ +0  the pair as it was given +\d+ +3 +41 +9$", printed, re.MULTILINE)
    assert "requests: 3 before, 2 after" in printed and "a.toml, b.toml" in printed
    command = next(line for line in printed.splitlines() if line.startswith("    detdiff "))
    again = run(*command.split()[1:])
    assert again.exit_code == 1 and again.output.startswith("Rounding: ")
    assert len((folder / "a.toml").read_text().splitlines()) < 16


def test_the_same_command_again_says_the_same_at_once(text: tuple[str, Path], scenario: Path) -> None:
    printed, folder = text
    tried = (folder / "tried.jsonl").read_bytes()
    assert run(*arguments(scenario, folder)).stdout == printed
    assert (folder / "tried.jsonl").read_bytes() == tried


def test_as_json(text: tuple[str, Path], scenario: Path) -> None:
    folder = text[1]
    result = run(*arguments(scenario, folder, "--json"))
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == 0 and found["schema"] == "detdiff.reduction/2"
    assert (found["verdict"], found["finished"]) == ("numerics", True) and found["said"]
    keys = ["number", "said", "rows", "requests", "prompt_tokens", "max_tokens", "layers", "key"]
    assert list(found["steps"][0]) == keys and all(step["said"] for step in found["steps"])
    assert found["steps"][0]["rows"] == found["rows_before"] >= 4 * found["rows_after"]
    assert found["steps"][-1]["rows"] == found["rows_after"]
    assert found["site"] in found["said"] and found["twin"] is None
    assert found["tried"] == sum(
        b'"answer"' in line for line in (folder / "tried.jsonl").read_bytes().splitlines()
    )
    assert Path(found["a"]).is_file() and Path(found["b"]).is_file() and found["a"] in found["command"]


@pytest.mark.thorough
def test_a_budget_is_told_of(scenario: Path, tmp_path: Path) -> None:
    result = run(*arguments(scenario, tmp_path / "smaller", "--budget", "2"))
    assert result.exit_code == 0
    assert "the budget ended the search; a larger one goes on from here" in result.stdout


@pytest.mark.thorough
def test_traces_are_reduced_as_well(scenario: Path, text: tuple[str, Path], tmp_path: Path) -> None:
    for name, schedule in (("a", "serial"), ("b", "continuous")):
        result = run("record", scenario, "-o", tmp_path / name, "--set", f"schedule={schedule}")
        assert result.exit_code == 0, result.output
    moved = tmp_path / "moved"
    (scenario.parent / "model").rename(moved)
    try:
        found = run(
            "reduce", tmp_path / "a", tmp_path / "b", "--model", moved, "-o", tmp_path / "smaller", "--json"
        )
    finally:
        moved.rename(scenario.parent / "model")
    assert found.exit_code == 0, found.output
    assert (
        json.loads(found.stdout)["rows_after"]
        == json.loads(run(*arguments(scenario, text[1], "--json")).stdout)["rows_after"]
    )
    assert f'model = "{moved}"' in (tmp_path / "smaller" / "a.toml").read_text()


def test_what_does_not_part_is_an_error(scenario: Path, tmp_path: Path) -> None:
    same = ["--a", "schedule=serial", "--b", "schedule=serial"]
    found = paragraph(run("reduce", scenario, *same, "-o", tmp_path / "smaller"))
    assert found.startswith("detdiff: There is nothing to reduce: the two runs do not diverge")


def test_another_engine_is_an_error(scenario: Path, tmp_path: Path) -> None:
    """Smaller pairs would be run on MLX, whatever the two runs had been."""
    asked = Scenario.from_toml(scenario).with_changes(
        engine="transformers", layout="padded", kernels="native"
    )
    with pytest.raises(ReductionError, match="engine transformers; expected mlx"):
        reduce(asked, asked.with_changes(schedule="static"), folder=tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_the_folder_of_another_case_is_an_error(scenario: Path, text: tuple[str, Path]) -> None:
    found = paragraph(run(*arguments(scenario, text[1], "--keep-flip")))
    assert "holds the reduction of another case: options in its case.json" in found


def test_three_files_and_no_folder_are_errors(scenario: Path, tmp_path: Path) -> None:
    three = run("reduce", scenario, scenario, scenario, "-o", tmp_path / "smaller")
    assert three.exit_code == 2 and "two files at most" in three.output
    assert run("reduce", scenario, scenario).exit_code == 2


@pytest.mark.thorough
def test_a_reduction_that_was_interrupted_says_how_to_go_on(
    scenario: Path, text: tuple[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "smaller"
    command = [sys.executable, "-m", "detdiff.cli", *arguments(scenario, folder)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=heard_again,
    )
    # As soon as there is a pair.
    while process.poll() is None and not (folder / "steps.jsonl").exists():
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    output, error = process.communicate()
    assert process.returncode == 2 and output == "", error
    said = " ".join(error.split())
    assert said.startswith("detdiff: Interrupted; ") and "Traceback" not in error
    assert "keeps the smallest pair so far" in said and "The same command goes on from there." in said
    before = (folder / "tried.jsonl").read_bytes()
    assert run(*arguments(scenario, folder)).exit_code == 0
    assert (folder / "tried.jsonl").read_bytes().startswith(before)
    for name in ("a.toml", "b.toml", "steps.jsonl", "tried.jsonl"):
        assert (folder / name).read_bytes() == (text[1] / name).read_bytes()
