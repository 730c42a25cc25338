"""`detdiff explain` as it is used: from flags, files and traces, for people and for programs, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import FLAGS, PROMPTS, SCENARIO, flags, paragraph, recorded_pair, run

from detdiff.explain import ORDER
from detdiff.report import from_json

BOTH = f"{FLAGS} schedule=serial"


def explain(*arguments: str | Path) -> Any:
    return run("explain", *arguments)


def sides(*more: str) -> list[str]:
    return ["explain", *flags(*PROMPTS)[1:], "--both", BOTH, "--b", "schedule=continuous", *more]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the traces a (serial) and b (continuous) of one scenario."""
    return recorded_pair(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def answer(traces: Path) -> dict[str, Any]:
    """What explain says of the two traces, with the controls that its verdict rests on."""
    names = ("repeat", "oracle", "pin_kernels")
    result = explain(traces / "a", traces / "b", "--json", *(w for n in names for w in ("--control", n)))
    assert result.exit_code == 1, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_path_change_is_numerics(answer: dict[str, Any]) -> None:
    assert (answer["schema"], answer["verdict"], answer["rule"]) == ("detdiff.verdict/2", "numerics", "path")
    assert [control["name"] for control in answer["controls"]] == ["repeat", "oracle", "pin_kernels"]
    results = [control["result"] for control in answer["controls"]]
    assert results == ["equal", "inside", "removed"]
    assert all(control["forwards"] > 0 and control["seconds"] > 0 for control in answer["controls"])
    oracle = answer["controls"][1]["detail"]
    assert oracle["outside_a"] == oracle["outside_b"] == 0 and oracle["inside_a"] == oracle["inside_b"] > 0
    assert not from_json(answer["divergence"]).identical
    assert {each["fact"] for each in answer["evidence"] if each["decided"]} == {
        "origin",
        "repeat",
        "oracle",
        "pin_kernels",
    }


def test_the_text_has_its_sections_in_order_and_the_verdict_at_both_ends(traces: Path) -> None:
    result = explain(traces / "a", traces / "b", "--control", "pin_kernels")
    # One control is not enough for a verdict.
    assert result.exit_code == 3
    assert result.output.startswith("Cause undetermined: bits differ and no token flips; origin at")
    titles = re.findall(r"^(.+)\n-+$", result.output, re.MULTILINE)
    order = ["No token flips", "Where it arose", "What carried it", "The controls", "The verdict", "Margins"]
    assert titles == [*order, "What was compared"]
    assert "no flip within its 6 generated tokens" in result.output
    assert "missing: the control repeat (it was not asked for)" in result.output
    assert re.search(r"^pin_kernels  removed +With ", result.output, re.MULTILINE)


@pytest.mark.thorough
def test_flags_and_files_give_the_same_verdict(traces: Path, answer: dict[str, Any]) -> None:
    file = traces / "scenario.toml"
    names = [word for name in ("repeat", "oracle", "pin_kernels") for word in ("--control", name)]
    for arguments in (sides(*names), ["explain", file, "--b", "schedule=continuous", *names]):
        result = run(*arguments, "--json")
        found = json.loads(result.stdout)
        assert result.exit_code == 1 and found["verdict"] == answer["verdict"]
        assert found["divergence"]["compared"] == answer["divergence"]["compared"]
        assert "/" not in found["divergence"]["a"]["trace"]


def test_identical_traces_need_no_model(traces: Path) -> None:
    result = explain(traces / "a", traces / "a", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["verdict"] == "identical" and found["controls"] == []
    text = explain(traces / "a", traces / "a")
    assert text.exit_code == 0 and text.output.startswith("The runs are identical: 2 requests")
    assert "\nkind: identical\n" in text.output


def test_nothing_comparable_is_undetermined_with_exit_code_3(traces: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(SCENARIO.replace('"anchor"', '"one"').replace('"follower"', '"two"'))
    result = explain(traces / "a", other, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 3 and found["verdict"] == "undetermined" and found["rule"] == "nothing"
    assert found["divergence"] is None and "detdiff-" not in found["said"]


def test_a_budget_of_none_says_what_is_missing(traces: Path) -> None:
    result = explain(traces / "a", traces / "b", "--budget", "0", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 3 and found["verdict"] == "undetermined"
    assert {control["result"] for control in found["controls"]} == {"not_run"}
    assert all(control["said"] for control in found["controls"]) and found["missing"]


def test_arguments_that_do_not_go_together(traces: Path) -> None:
    found = paragraph(explain(traces / "a", traces / "b", "--control", "holdpath"))
    assert "no control 'holdpath'" in found and all(name in found for name in ORDER)
    assert "There is nothing to compare" in paragraph(explain())
    three = explain(traces / "a", traces / "b", traces / "a")
    assert three.exit_code == 2 and "two files at most" in three.output


def test_a_trace_of_another_model_is_refused(traces: Path, tmp_path: Path) -> None:
    from plugins.small_models import write_directory

    write_directory(tmp_path / "model")
    found = paragraph(explain(traces / "a", traces / "b", "--model", tmp_path / "model"))
    assert "hash" in found and "Name the model it was recorded with" in found


@pytest.mark.thorough
def test_there_is_a_bar_for_each_control_on_a_terminal(traces: Path) -> None:
    ours, theirs = pty.openpty()
    names = [word for name in ("repeat", "oracle") for word in ("--control", name)]
    command = [sys.executable, "-m", "detdiff.cli", "explain", str(traces / "a"), str(traces / "b"), *names]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait() == 3
    assert b"repeat" in shown and b"oracle" in shown and shown.count(b"100%") >= 2
    assert explain(traces / "a", traces / "b", "--control", "repeat").stderr == ""
