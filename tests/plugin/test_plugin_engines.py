"""Engines of the user's own and functions of rows, through the fixture and the marker."""

from __future__ import annotations

import pytest
from inner_runs import Run, text_of

ENGINE = """
import pytest

class Counting:
    \"\"\"Continues a prompt by its sum; with ``fault``, what a batch holds beside it counts too.\"\"\"

    name = "counting"
    vocab_size = 50

    def __init__(self, fault=False):
        self.fault = fault

    def generate(self, requests, schedule):
        others = len(requests) - 1 if self.fault else 0
        return [
            [(sum(request.tokens) + n + (others if n == 2 else 0)) % 50 for n in range(request.max_tokens)]
            for request in requests
        ]
"""


def test_a_sound_engine_passes_and_is_counted(run: Run) -> None:
    text = ENGINE + (
        "def test_it(batch_invariance):\n"
        "    found = batch_invariance.check(Counting(), max_tokens=5, seeds=(0, 1))\n"
        "    assert found.compositions == ('static:2', 'continuous:4')\n"
        "    assert found.rows > 0 and found.sites == 1 and found.tokens > 0\n"
    )
    result = run(text)
    result.assert_outcomes(passed=1)
    assert "2 compositions checked, none failed, " in text_of(result)


def test_an_engine_whose_batch_shows_is_told_where_and_keeps_its_traces_and_a_page(
    run: Run, pytester: pytest.Pytester
) -> None:
    text = ENGINE + (
        "@pytest.mark.batch_invariant(model=Counting(fault=True), max_tokens=5)\ndef test_it(): pass\n"
    )
    result = run(text, "-v")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*::test_it[[]static:2[]] FAILED*", "*::test_it[[]continuous:4[]] FAILED*"])
    said = text_of(result)
    assert "static:2 of counting not invariant at level exact" in said
    assert "request r0: diverges in tokens and flips" in said and "flip: generated token 2 is " in said
    pages = sorted((pytester.path / ".detdiff" / "test_it.py").rglob("report.html"))
    assert len(pages) == 2 and all(
        (page.parent / side / "trace.json").is_file() for page in pages for side in "ab"
    )
    assert "2 compositions checked, 2 FAILED, " in said


def test_what_an_engine_cannot_be_told_is_refused(run: Run) -> None:
    for arguments, words in (
        ("kernels='candle-metal'", "kernels cannot be told to the engine counting"),
        ("layouts='packed'", "layouts cannot be told to the engine counting"),
        ("chat=True", "chat cannot be told to the engine counting"),
        ("prompts=['text']", "has no encode(text)"),
        ("level='bounded'", "level is 'bounded'"),
        ("prompts=[]", "There are no prompts"),
    ):
        result = run(
            ENGINE + f"def test_it(batch_invariance):\n    batch_invariance.check(Counting(), {arguments})\n"
        )
        result.assert_outcomes(failed=1)
        assert words in text_of(result) and "NotChecked: " in text_of(result)


def test_prompts_that_an_engine_cannot_encode_are_refused(run: Run) -> None:
    text = ENGINE + (
        "class Failing(Counting):\n    def encode(self, text):\n        return {}[text]\n"
        "def test_it(batch_invariance):\n    batch_invariance.check(Failing(), ['a', 'b'], schedules='static:2')\n"
    )
    result = run(text)
    result.assert_outcomes(failed=1)
    assert "encode of the engine counting raised KeyError ('a')" in text_of(result)


OPS = """
import numpy as np
import pytest

def sound(x):
    return x * np.float32(2)

def mixing(x):
    y = x * np.float32(2)
    if len(x) >= 3:
        y[0, 0] = np.nextafter(y[0, 0], np.float32(np.inf))
    return y
"""


def test_a_function_of_rows_is_checked(run: Run) -> None:
    text = OPS + (
        "def test_sound(batch_invariance):\n    assert batch_invariance.check_op(sound, shapes=8, rows='1..4').invariant\n"
        "def test_mixing(batch_invariance):\n    batch_invariance.check_op(mixing, shapes=8, rows='1..4')\n"
        "@pytest.mark.batch_invariant(op=sound, shapes=(2, 4), rows='1..4')\ndef test_marked(): pass\n"
        "@pytest.mark.batch_invariant(op=mixing, shapes=8, rows='1..4')\ndef test_marked_mixing(): pass\n"
    )
    result = run(text)
    result.assert_outcomes(passed=2, failed=2)
    said = text_of(result)
    assert "mixing depends on the batch" in said and "4 operations checked, 2 FAILED, " in said
    assert "Traceback" not in said and "op.py" not in said


def test_a_function_that_would_not_be_checked_fails(run: Run) -> None:
    text = OPS + (
        "def test_shapes(batch_invariance):\n    batch_invariance.check_op(sound, shapes=[])\n"
        "def test_rows(batch_invariance):\n    batch_invariance.check_op(sound, rows=())\n"
        "@pytest.mark.batch_invariant(op=sound, row='1..4')\ndef test_setting(): pass\n"
        "@pytest.mark.batch_invariant(op=42)\ndef test_op(): pass\n"
    )
    result = run(text)
    result.assert_outcomes(failed=4)
    said = text_of(result)
    for words in (
        "There are no shapes",
        "There are no rows",
        "row is none of its settings; did you mean 'rows'?",
    ):
        assert words in said


def test_a_property_shrinks_to_the_smallest_batch(run: Run) -> None:
    text = (
        """
from hypothesis import given, settings
from hypothesis import strategies as st
"""
        + ENGINE
        + """
@settings(deadline=None, database=None, derandomize=True)
@given(st.integers(1, 4))
def test_it(batch_invariance, size):
    batch_invariance.check(Counting(fault=True), schedules=f"static:{size}", max_tokens=4)
"""
    )
    result = run(text)
    result.assert_outcomes(failed=1)
    assert "size=2" in text_of(result)
