"""compare --force-tokens: side b is fed side a's tokens, or both those of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import SCENARIO, paragraph, run

SIDES = ("--a", "temperature=0.9 seed=4", "--b", "schedule=continuous")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO.replace("max_tokens = 6", "max_tokens = 16"))
    return path


def test_b_is_fed_what_a_generated(file: Path) -> None:
    result = run("compare", file, *SIDES, "--force-tokens", "a", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["b"]["scenario"]["force_tokens"] == str(file)
    assert found["compared"]["after_flip_a"] == 0 and found["compared"]["differing"] > 0
    for request in found["requests"]:
        assert request["flip"] is not None and request["forced"]["tokens"] == 16
        assert 0 < request["forced"]["differing"] <= 16
    text = run("compare", file, *SIDES, "--force-tokens", "a").stdout
    assert "fed the same tokens: of 16 choices" in text
    assert f"force_tokens {file}" in " ".join(text.split())


@pytest.mark.thorough
def test_both_are_fed_the_tokens_of_a_trace(file: Path, tmp_path: Path) -> None:
    kept = run("compare", file, *SIDES, "--keep", tmp_path / "kept")
    assert kept.exit_code == 1, kept.output
    trace = tmp_path / "kept" / "a"
    result = run(
        "compare",
        file,
        "--a",
        "schedule=serial",
        "--b",
        "schedule=continuous",
        "--force-tokens",
        trace,
        "--json",
    )
    found = json.loads(result.stdout)
    assert [found[run]["scenario"]["force_tokens"] for run in "ab"] == [str(trace)] * 2
    assert all(request["forced"]["tokens"] == 16 for request in found["requests"])
    # A trace and a scenario: the scenario is fed the trace's tokens.
    mixed = json.loads(run("compare", trace, file, "--force-tokens", "a", "--json").stdout)
    assert mixed["b"]["scenario"]["force_tokens"] == str(trace)
    assert mixed["compared"]["after_flip_a"] == 0


def test_what_cannot_be_fed_is_refused(file: Path, tmp_path: Path) -> None:
    assert run("record", file, "-o", tmp_path / "t", "--set", "max_tokens=2").exit_code == 0
    text = paragraph(run("compare", tmp_path / "t", tmp_path / "t", "--force-tokens", "a"))
    assert f"{tmp_path / 't'} was recorded already" in text
    text = paragraph(run("compare", file, *SIDES, "--force-tokens", tmp_path / "none"))
    assert str(tmp_path / "none") in text
