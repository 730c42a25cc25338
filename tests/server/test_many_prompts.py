"""Many prompts against a server, summed up: intervals, drift by level, exit codes, and the prompts' file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import run
from local_servers import SmallModel

from detdiff.commands.prompts import read_prompts
from detdiff.compare.summary import wilson
from detdiff.errors import CommandError

TEXTS = ["the first prompt", "another one", "a third, which is longer", "and the last"]
SIZE = 'engine.body={"size":4}'


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [*TEXTS[:3], "", json.dumps({"id": "chat", "messages": [{"role": "user", "content": TEXTS[3]}]})]
    (tmp_path / "prompts.txt").write_text("\n".join(lines) + "\n")
    return tmp_path / "prompts.txt"


def summary(prompts: Path, fault: str, *more: str, **how: Any) -> tuple[int, dict[str, Any]]:
    with SmallModel(fault, **how).at() as address:
        found = run(
            "compare", "--model", f"{address}/v1", "--prompts", str(prompts), "--a", "serial", "--b", f"static:4 '{SIZE}'",
            "--both", "max_tokens=6", "--json", *more,
        )  # fmt: skip
    return found.exit_code, json.loads(found.stdout)


def test_equal_sides_are_identical_and_the_share_has_an_interval(prompts: Path) -> None:
    code, found = summary(prompts, "", "--repeats", "2", "--expect-invariant")
    assert code == 0 and found["schema"] == "detdiff.summary/1"
    (arm,) = found["arms"]
    assert (arm["requests"], arm["flipped"], arm["differing"], arm["moved"]) == (8, 0, 0, 0)
    assert arm["asked"] == arm["most"] == 4 and arm["met"] is True
    assert arm["interval"] == pytest.approx([0, wilson(0, 8)[1]])
    assert [each["name"] for each in found["repeats"]] == ["side a", "side b, static:4"]
    assert all(each["differing"] == 0 for each in found["repeats"])


def test_drift_is_measured_and_run_to_run_is_zero(prompts: Path) -> None:
    code, found = summary(prompts, "rounding", "--repeats", "2")
    (arm,) = found["arms"]
    assert code == 1 and arm["flipped"] == 0 and arm["differing"] == 8
    assert 0 < arm["mean"] < arm["largest"] < 2e-4 and arm["moved"] > 100
    assert all(each["differing"] == 0 for each in found["repeats"])
    assert arm["margins_at_flips"] is None and arm["margins_elsewhere"][0] > 0


def test_the_picture_shows_drift_by_level(prompts: Path, tmp_path: Path) -> None:
    files = ("--plot", str(tmp_path / "drift.svg"), "--html", str(tmp_path / "page.html"))
    code, found = summary(prompts, "rounding", "--repeats", "2", *files)
    picture = (tmp_path / "drift.svg").read_text()
    ElementTree.fromstring(picture)
    (arm,) = found["arms"]
    assert code == 1 and "0 of 8 flip" in picture and "requests sent at once" in picture
    assert f"<desc>4 at once: {arm['largest']:.3g} at most, {arm['mean']:.3g} on average</desc>" in picture
    page = (tmp_path / "page.html").read_text()
    assert (
        "The sides differ (static:4)" in page and 'class="dd-plot dd-drift"' in page and "run to run" in page
    )
    assert "<style>" in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    # A point and a cross for the level, a square for each side's repetitions.
    assert picture.count('class="dd-delta"') == 2 and picture.count("h8v8h-8z") == 3


def test_flips_have_their_places_and_margins(prompts: Path) -> None:
    code, found = summary(prompts, "swapped")
    (arm,) = found["arms"]
    assert code == 1 and arm["flipped"] == 4 and arm["interval"][0] > 0.5
    assert arm["first"] == sorted(arm["first"]) and len(arm["first"]) == 4
    assert arm["margins_at_flips"][0] > 0


def test_what_never_met_is_inconclusive(prompts: Path) -> None:
    code, found = summary(prompts, "", alone=True)
    assert code == 3 and found["arms"][0]["met"] is False


def test_one_prompt_never_met_another(tmp_path: Path) -> None:
    with SmallModel("").at() as address:
        words = (
            "compare",
            "--model",
            f"{address}/v1",
            "--prompt",
            "alone",
            "--a",
            "serial",
            "--b",
            "static:4 'engine.body={\"size\":1}'",
        )
        found = run(*words, "--both", "max_tokens=3")
    assert found.exit_code == 3 and "nothing ran together" in found.output


def test_repetitions_that_differ_count_where_invariance_is_expected(prompts: Path) -> None:
    with SmallModel("random").at() as address:
        words = (
            "compare", "--model", f"{address}/v1", "--prompts", str(prompts), "--a", f"static '{SIZE}'", "--b", f"static '{SIZE}'",
            "--both", "max_tokens=6", "--repeats", "2",
        )  # fmt: skip
        found = run(*words, "--expect-invariant")
    assert found.exit_code == 1
    assert found.stdout.startswith("Run-to-run change: ")


def test_levels_are_arms_of_their_own(prompts: Path) -> None:
    with SmallModel("rounding").at() as address:
        found = run(
            "compare", "--model", f"{address}/v1", "--prompts", str(prompts), "--a", "serial", "--b", "static", "--levels", "2,4",
            "--both", "max_tokens=6", "--server-kind", "llama.cpp",
        )  # fmt: skip
    # The small model waits for nobody here, so that requests that were sent at once need not meet.
    assert "static:2" in found.stdout and "static:4" in found.stdout and "at once" in found.stdout


def test_text_says_run_to_run_first(prompts: Path) -> None:
    with SmallModel("rounding").at() as address:
        found = run(
            "compare", "--model", f"{address}/v1", "--prompts", str(prompts), "--a", "serial", "--b", f"static:4 '{SIZE}'",
            "--both", "max_tokens=6", "--repeats", "2",
        )  # fmt: skip
    text = found.stdout
    assert text.startswith(
        "The sides differ (static:4): no answer of 8 flips, 8 differ in numbers or tokens;"
    )
    assert text.index("run to run, side a: 0 of 4 flipped (95 % interval 0.0 to 49.0 %)") < text.index(
        "a against b"
    )


@pytest.mark.parametrize(
    ("count", "of", "low", "high"), [(0, 16, 0.0, 0.19361), (1, 16, 0.01112, 0.28329), (8, 8, 0.67559, 1.0)]
)
def test_wilsons_interval(count: int, of: int, low: float, high: float) -> None:
    """Values of statsmodels' proportion_confint(method="wilson"), by its formula."""
    assert wilson(count, of) == pytest.approx((low, high), abs=2e-5)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompt"),
        ("{broken", "line 1 begins like a JSON object and is none"),
        ('{"text": "a"}', "has the keys text; expected prompt or messages"),
        ('{"prompt": "a", "messages": []}', "expected prompt or messages"),
        ('a\n{"messages": [1]}', "line 2 has no list of messages"),
        ('{"prompt": 3}', "has the prompt 3; expected text"),
        ('{"prompt": "a", "max_tokens": "b"}', "has the max_tokens 'b'; expected a number"),
    ],
)
def test_files_of_prompts_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(CommandError, match=words):
        read_prompts(tmp_path / "p")


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "p").write_text(
        'one\n\n{"prompt": "two", "id": "x", "max_tokens": 3}\n{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
    )
    found = read_prompts(tmp_path / "p")
    assert [each["id"] for each in found] == ["r0", "x", "r2"]
    assert found[1] == {"id": "x", "prompt": "two", "max_tokens": 3}
    assert found[2]["chat"] and json.loads(found[2]["prompt"])[1] == {"role": "user", "content": "u"}
    with pytest.raises(CommandError, match="cannot be read as prompts"):
        read_prompts(tmp_path)


def test_what_does_not_go_together(prompts: Path) -> None:
    both = run(
        "compare",
        "--model",
        "http://127.0.0.1:9",
        "--prompts",
        str(prompts),
        "--prompt",
        "a",
        "--b",
        "static",
    )
    assert both.exit_code == 2 and "both --prompts and --prompt" in both.output
    levels = run(
        "compare",
        "--model",
        "http://127.0.0.1:9",
        "--prompts",
        str(prompts),
        "--b",
        "static",
        "--levels",
        "1",
    )
    assert levels.exit_code == 2 and "--levels is '1'" in levels.output
