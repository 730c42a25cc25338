"""A sample of mlx-lm's model classes, run in many ways: no sound one is called a bug. The page has all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from every_model import NOT_BUILT, names
from tiers import some_now

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from model_matrix import WRONG, answers, main

SOUND = {
    "llama4": ("chunk 2", "reuse 6"),
    "gemma3n": ("chunk 3", "packed"),
    "iquestloopcoder": ("chunk 2", "static"),
    "glm_moe_dsa": ("chunk 7",),
    "mellum": ("continuous",),
    "youtu_llm": ("packed, continuous",),
    "lfm2": ("static",),
}


@pytest.mark.parametrize("name", some_now(SOUND, 0, 1))
def test_a_sound_class_is_not_called_a_bug(name: str) -> None:
    found = answers(name, SOUND[name])
    assert set(found) == set(SOUND[name])
    assert not {answer.verdict for answer in found.values()} & {"bug", "nondeterminism"}, found
    if name == "llama4":
        assert {answer.verdict for answer in found.values()} == {"identical"}


@pytest.mark.thorough
def test_a_class_that_is_wrong_in_a_batch_is_called_one() -> None:
    found = answers("baichuan_m1", ("static", "chunk 2"))
    assert found["static"].verdict == "bug" and found["chunk 2"].verdict == "identical"


def test_the_page_has_every_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out
    assert set(NOT_BUILT) | set(WRONG) <= set(names())
