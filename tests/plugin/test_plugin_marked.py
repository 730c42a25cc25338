"""What a marker names is checked, whatever else the test, its fixtures and other plugins do."""

from __future__ import annotations

import pytest
from inner_runs import Run, text_of

OPS = """
import numpy as np
import pytest

MARK = pytest.mark.batch_invariant

def sound(x):
    return x * np.float32(2)

def mixing(x):
    return x * np.float32(1 + (len(x) > 2))
"""
AGAIN = """
import pytest
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for attempt in range(2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if attempt or not any(each.failed for each in reports):
            break
    for each in reports:
        item.ihook.pytest_runtest_logreport(report=each)
    return True
"""
CALLED_AGAIN = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and report.failed:
        again = pytest.CallInfo.from_call(lambda: item.ihook.pytest_runtest_call(item=item), "call")
        report = pytest.TestReport.from_item_and_call(item, again)
    return report
"""


@pytest.mark.parametrize("plugin", [AGAIN, CALLED_AGAIN], ids=["protocol", "call"])
def test_a_test_that_is_run_once_more_is_checked_once_more(
    pytester: pytest.Pytester, run: Run, plugin: str
) -> None:
    pytester.makeconftest(plugin)
    text = OPS + (
        "@MARK(op=mixing, shapes=4, rows='1..3')\ndef test_marked(): pass\n"
        "seen = []\ndef test_called(batch_invariance):\n    if not seen:\n        seen.append(1)\n"
        "        batch_invariance.check_op(mixing, shapes=4, rows='1..3')\n"
        "@MARK(model='builtin', prompts=[[1], [2]], schedules='static:2', layouts='packed', max_tokens=2, level='golden')\n"
        "def test_golden(): pass\n"
    )
    result = run(text)
    result.assert_outcomes(failed=3)
    said = text_of(result)
    assert "mixing depends on the batch" in said and "calls neither check nor check_op" in said
    assert "test_it/test_golden/static-2-packed was written by this very session" in said


def test_what_else_is_checked_does_not_stand_for_the_marker(run: Run) -> None:
    text = OPS + (
        "@pytest.fixture\ndef other(batch_invariance):\n    batch_invariance.check_op(sound, shapes=4)\n"
        "@MARK(op=mixing, shapes=4)\ndef test_setup(other): pass\n"
        "@MARK(op=mixing, shapes=4)\ndef test_body(batch_invariance):\n    batch_invariance.check_op(sound, shapes=4)\n"
        "@MARK(model='nowhere/at all', schedules='static:2', layouts='packed')\ndef test_model(other): pass\n"
    )
    result = run(text)
    result.assert_outcomes(failed=3)
    assert text_of(result).count("_ mixing depends on the batch") == 2
    assert "nowhere/at all" in text_of(result)


@pytest.mark.thorough
def test_what_the_test_checks_itself_is_checked_once(run: Run) -> None:
    text = OPS + (
        "@pytest.fixture\ndef checked(batch_invariance):\n    batch_invariance.check(max_tokens=2)\n"
        "@MARK('builtin', schedules='static:2', layouts='packed')\ndef test_by_fixture(checked): pass\n"
        "@MARK('builtin', schedules='static:2', layouts='packed')\ndef test_by_body(batch_invariance):\n"
        "    batch_invariance.check('builtin', max_tokens=2)\n"
        "@MARK(op=mixing, shapes=4)\ndef test_op(batch_invariance):\n"
        "    with pytest.raises(AssertionError):\n        batch_invariance.check_op(mixing, shapes=4)\n"
    )
    result = run(text)
    result.assert_outcomes(passed=3)
    assert "2 compositions and 1 operation checked, 1 FAILED, " in text_of(result)


def test_a_marker_that_comes_late_is_a_marker(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeconftest(
        "import pytest\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
        "        item.add_marker(pytest.mark.batch_invariant(op=item.module.mixing, shapes=4))\n"
    )
    run(OPS + "def test_it(): pass\n").assert_outcomes(failed=1)


def test_two_markers_of_one_test_are_refused(run: Run) -> None:
    result = run(OPS + "@MARK(op=mixing)\n@MARK(model='builtin')\ndef test_it(): pass\n")
    result.assert_outcomes(errors=1)
    assert "two batch_invariant markers of test_it say model" in text_of(result)


def test_a_class_may_override_what_its_base_class_is_marked_with(run: Run) -> None:
    text = OPS + (
        "class Base:\n    pytestmark = MARK(op=mixing, shapes=4)\n"
        "class TestIt(Base):\n    pytestmark = MARK(op=sound, shapes=4)\n    def test_it(self): pass\n"
    )
    run(text).assert_outcomes(passed=1)


def test_a_doctest_may_have_the_fixture_around_it(pytester: pytest.Pytester, again: Run) -> None:
    pytester.makeconftest(
        "import pytest\n@pytest.fixture(autouse=True)\ndef around(batch_invariance): pass\n"
    )
    (pytester.path / "test_it.txt").write_text(">>> 1 + 1\n2\n")
    again().assert_outcomes(passed=1)


def test_a_wrong_marker_is_said_with_its_test_and_nothing_else(run: Run) -> None:
    result = run(OPS + "@MARK(model='builtin', schedules='static:x')\ndef test_it(): pass\n")
    said = text_of(result)
    assert "detdiff: test_it.py::test_it: 'static:x' is no schedule" in said
    assert "During handling" not in said


def test_what_was_not_checked_is_no_expected_failure(run: Run) -> None:
    text = OPS + (
        "def test_raises(batch_invariance):\n    with pytest.raises(AssertionError):\n"
        "        batch_invariance.check('builtin', schedules=())\n"
        "def test_differs(batch_invariance):\n    with pytest.raises(AssertionError):\n"
        "        batch_invariance.check_op(mixing, shapes=4)\n"
    )
    run(text).assert_outcomes(passed=1, failed=1)
