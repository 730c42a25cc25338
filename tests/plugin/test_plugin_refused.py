"""What checks nothing, or not what was asked for, is never a pass and never skipped in silence."""

from __future__ import annotations

import pytest
from inner_runs import Run, text_of

CALL = "from tiny import tiny\ndef test_it(batch_invariance):\n    batch_invariance.check({})\n"
MARK = "import pytest\n@pytest.mark.batch_invariant({})\ndef test_it(): pass\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", "There is no model; expected one in the call, in the marker, with --detdiff-model"),
        ("'builtin', schedules=()", "There are no schedules, so that nothing would be checked"),
        ("'builtin', layouts=[]", "There are no layouts, so that nothing would be checked"),
        ("'builtin', prompts=[]", "There are no prompts, so that nothing would be checked"),
        ("'builtin', seeds=()", "There are no seeds, so that nothing would be checked"),
        ("'builtin', seeds=(1, 1)", "seeds are [1, 1]; expected whole numbers from 0 on, each once"),
        ("'builtin', ['In'], schedules='static'", "static-padded needs 2 requests and there is 1"),
        ("'builtin', ['In'], schedules='static:3'", "static:3-padded needs 3 requests and there is 1"),
        ("'builtin', schedules='static:0'", "'static:0' is no schedule; expected one of serial, static"),
        ("'builtin', schedules='stat:2'", "'stat:2' is no schedule"),
        ("'builtin', schedules='static:2 layout=packed'", "sets layout, which its first word"),
        ("'builtin', schedules='static:2 padding=1'", "there is no key 'padding' here"),
        ("'builtin', schedules=['static', 'static']", "static-padded is asked for twice"),
        ("'builtin', layouts='flat'", "'flat' is no layout; expected padded or packed"),
        ("'builtin', level='exat'", "level is 'exat'; did you mean 'exact'?"),
        ("'builtin', arrivals=[0, 1]", "arrivals is no setting of a check"),
        ("'builtin', max_token=3", "there is no key 'max_token' here; did you mean 'max_tokens'?"),
        ("'builtin', max_tokens=0", "max_tokens is 0; it must be 1 or more"),
        ("'builtin', prompts=[3.5]", "Prompt 0 is '3.5', a float; expected text, or a list of token ids"),
        ("'builtin', prompts=[[]]", "tokens is empty"),
        ("'builtin', kernels='candel-metal'", "candel-metal"),
        ("'nowhere/to be found'", "nowhere/to be found"),
        ("tiny('llama').model", "An mlx module without its tokenizer cannot be checked"),
        ("42", "A int cannot be checked; expected a model's path or hub id"),
        ("'builtin', schedules=3", "schedules are 3; expected text, or a list of texts"),
        ("'builtin', layouts=3", "layouts are 3; expected text, or a list of texts"),
        ("'builtin', prompts=3", "prompts are 3; expected a list of texts"),
        ("'builtin', seeds=1.5", "seeds are [1.5]; expected whole numbers"),
        ("'builtin', schedules='static:2 model=other'", "sets model, which the check decides"),
        ("'builtin', settings={'chat': True}", "there is no key 'settings' here"),
        (
            "'builtin', [[1], [2]], schedules='continuous:2', max_tokens=1",
            "No two requests were served at a time",
        ),
        (
            "'builtin', [[1], [2]], schedules='continuous arrivals=0,9', max_tokens=2",
            "No two requests were served at a time",
        ),
    ],
)
def test_a_call_that_would_check_nothing_or_something_else_fails(
    run: Run, arguments: str, words: str
) -> None:
    result = run(CALL.format(arguments))
    result.assert_outcomes(failed=1)
    said = text_of(result)
    assert words in said
    assert "NotChecked: " in said or "NOT CHECKED: " in said
    assert "Traceback" not in said and "checker.py" not in said


@pytest.mark.thorough
def test_a_layout_that_a_model_cannot_run_in_fails_and_hides_nothing(run: Run) -> None:
    result = run(CALL.format("tiny('qwen3_next'), schedules='static:2', max_tokens=2"))
    result.assert_outcomes(failed=1)
    said = text_of(result)
    assert "static:2-packed: a: each request alone (serial) b: static:2, layout packed NOT CHECKED: " in said
    assert "passed: static:2-padded" in said


def test_a_test_that_asks_for_the_fixture_and_checks_nothing_fails(run: Run) -> None:
    result = run("def test_it(batch_invariance): pass\n")
    result.assert_outcomes(failed=1)
    assert "asks for batch_invariance and calls neither check nor check_op" in text_of(result)


def test_a_marker_that_names_nothing_fails(run: Run) -> None:
    result = run(MARK.format("schedules='static:2', layouts='padded'"))
    result.assert_outcomes(failed=1)
    assert "There is no model" in text_of(result)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("model='builtin', schedules=()", "There are no schedules"),
        ("model='builtin', layouts=()", "There are no layouts"),
        ("model='builtin', schedules='statc:2'", "'statc:2' is no schedule"),
        ("'builtin', 'static:2'", "takes the model and settings by name"),
    ],
)
def test_a_marker_without_a_composition_ends_the_collection(run: Run, arguments: str, words: str) -> None:
    result = run(MARK.format(arguments))
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED and words in text_of(result)


def test_a_marked_test_leaves_its_compositions_to_the_marker(run: Run) -> None:
    text = (
        "import pytest\n@pytest.mark.batch_invariant(schedules='static:2', layouts='padded')\n"
        "def test_it(batch_invariance):\n    batch_invariance.check('builtin', schedules='serial')\n"
    )
    result = run(text)
    result.assert_outcomes(failed=1)
    assert "schedules are given in the call, and the test's marker has already made one test" in text_of(
        result
    )


@pytest.mark.parametrize(
    "option, words",
    [
        ("--detdiff-level=exat", "level is 'exat'; did you mean 'exact'?"),
        ("--detdiff-schedules=sttaic", "'sttaic' is no schedule"),
        (
            "--detdiff-report-dir=s3://bucket/failed",
            "s3://bucket/failed is an address, and what is kept there is files",
        ),
    ],
)
def test_a_wrong_option_is_said_before_any_test(run: Run, option: str, words: str) -> None:
    result = run("def test_it(): pass\n", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in " ".join(result.stderr.str().split())


def test_an_address_in_an_ini_file_is_said_before_any_test(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeini("[pytest]\ndetdiff_report_dir = s3://bucket/failed\n")
    result = run("def test_it(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "s3://bucket/failed is an address" in " ".join(result.stderr.str().split())
    assert not [path for path in pytester.path.iterdir() if path.name.startswith("s3")]


def test_a_test_whose_body_fails_is_not_checked_and_not_passed(run: Run) -> None:
    result = run("import pytest\n@pytest.mark.batch_invariant(model='builtin')\ndef test_it(): assert 0\n")
    result.assert_outcomes(failed=4)
    assert "batch invariance ==" not in result.stdout.str()


def test_a_failed_check_can_be_expected(run: Run) -> None:
    text = (
        "import pytest\nfrom tiny import tiny\n@pytest.mark.xfail(raises=AssertionError, strict=True)\n"
        "@pytest.mark.parametrize('schedules', ['static:2', ()], ids=['checked', 'nothing'])\n"
        "def test_it(batch_invariance, schedules):\n"
        "    batch_invariance.check(tiny('llama'), schedules=schedules, kernels='candle-metal', max_tokens=3)\n"
    )
    run(text).assert_outcomes(xfailed=1, failed=1)


def test_what_was_not_checked_is_counted_apart(run: Run) -> None:
    text = (
        "def test_it(batch_invariance):\n"
        "    batch_invariance.check('builtin', [[1, 2], [3]], schedules='static:2,static:3', layouts='packed', max_tokens=2)\n"
        "def test_op(batch_invariance):\n    batch_invariance.check_op(lambda x: x[:1], shapes=4)\n"
    )
    result = run(text)
    result.assert_outcomes(failed=2)
    assert "1 composition checked, none failed, 2 NOT CHECKED, " in text_of(result)


@pytest.mark.thorough
def test_a_size_of_one_is_served_one_after_the_other(run: Run) -> None:
    result = run(CALL.format("'builtin', [[1], [2]], schedules='static:1,continuous:1', max_tokens=1"))
    result.assert_outcomes(passed=1)
