"""A sample of mlx-lm's model classes, run in many ways: no sound one is called a bug. The page has all of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from every_model import NOT_BUILT, names
from tiers import some_now

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from model_matrix import PAIRS, TARGET, WRONG, Answer, answers, listed, main, page

SOUND = {
    "llama4": ("chunk 2", "reuse 6"),
    "gemma3n": ("chunk 3", "packed"),
    "iquestloopcoder": ("chunk 2", "static"),
    "glm_moe_dsa": ("chunk 7",),
    "mellum": ("continuous",),
    "youtu_llm": ("packed, continuous",),
    "lfm2": ("static",),
}

ROUNDED = {
    "bailing_hybrid": ("static",),  # its decay over several rows and over one
    "deepseek_v32": ("chunk 7",),  # latents, of which it chooses some
    "gemma4": ("static",),  # layers that read another layer's ring
    "mamba2": ("continuous",),  # prompts that end before the longest of their batch
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROUNDED)
def test_what_a_sound_class_rounds_otherwise_is_called_rounding(name: str) -> None:
    assert {answer.verdict for answer in answers(name, ROUNDED[name]).values()} == {"numerics"}


@pytest.mark.parametrize("name", some_now(SOUND, 0, 1, ci=(2, 5, 6)))
def test_a_sound_class_is_not_called_a_bug(name: str) -> None:
    found = answers(name, SOUND[name])
    assert set(found) == set(SOUND[name])
    assert not {answer.verdict for answer in found.values()} & {"bug", "nondeterminism"}, found
    if name == "llama4":
        assert {answer.verdict for answer in found.values()} == {"identical"}


@pytest.mark.thorough
def test_a_class_that_is_wrong_in_a_batch_is_called_one() -> None:
    for name in ("baichuan_m1", "afm7"):
        found = answers(name, ("static", "chunk 2"))
        assert found["static"].verdict == "bug" and found["chunk 2"].verdict == "identical"


def test_the_page_has_every_class_as_the_tool_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out
    assert set(NOT_BUILT) | set(WRONG) <= set(names())
    text = TARGET.read_text(encoding="utf-8")
    found = listed(text)
    assert {name: each for name, each in found.items() if isinstance(each, str)} == NOT_BUILT
    ran = {name: each for name, each in found.items() if not isinstance(each, str)}
    assert all(set(each) == set(PAIRS) for each in ran.values())
    verdicts = Counter(verdict for each in ran.values() for verdict in each.values())
    assert set(verdicts) <= {"identical", "numerics", "bug", "undetermined", "refused"}
    assert {name for name, each in ran.items() if {"bug", "undetermined"} & set(each.values())} <= set(WRONG)
    made = {
        name: {pair: Answer(verdict) for pair, verdict in each.items()} if isinstance(each, dict) else each
        for name, each in found.items()
    }
    versions = text.partition("With ")[2].partition(".\n")[0]
    assert page(made, versions).splitlines()[:8] == text.splitlines()[:8]


def test_what_the_tool_writes_is_read_back() -> None:
    made = {
        "llama": dict.fromkeys(PAIRS, Answer("identical")),
        "mamba": {
            pair: Answer("bug", origin="layers.0 (recurrent, composite)")
            if pair == "static"
            else Answer("refused", why=f"E: {pair}")
            for pair in PAIRS
        },
        "olmo": "a package is missing",
    }
    found = listed(page(made, "MLX 1"))
    assert found["llama"] == dict.fromkeys(PAIRS, "identical") and found["olmo"] == made["olmo"]
    assert found["mamba"] == {pair: "bug" if pair == "static" else "refused" for pair in PAIRS}
