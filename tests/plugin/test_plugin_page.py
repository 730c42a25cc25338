"""The page of the plugin: its test files pass, and it has every option, setting and argument."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from inner_runs import Run

from detdiff.check.checker import BatchInvariance
from detdiff.check.settings import LEVELS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(FILES)))
def test_its_test_files_pass(run: Run, number: int) -> None:
    result = run(FILES[number])
    found = result.parseoutcomes()
    assert found["passed"] == len(re.findall("def test_", FILES[number])) + 3 * FILES[number].count(
        "@pytest.mark"
    )
    assert set(found) == {"passed"}


def test_its_first_test_file_is_that_of_readme() -> None:
    assert FILES[0] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_has_every_option_and_setting(pytester: pytest.Pytester) -> None:
    printed = pytester.runpytest_inprocess("--help").stdout.str()
    options = set(re.findall(r"--detdiff-[a-z-]+", printed))
    settings = set(re.findall(r"\bdetdiff_[a-z_]+", printed))
    assert len(options) == len(settings) == 6
    assert not [name for name in options | settings if f"`{name}" not in TEXT]


def test_it_has_every_argument_and_level() -> None:
    names = list(inspect.signature(BatchInvariance.check).parameters)[1:-1]
    assert {"model", "prompts", "seeds"} <= set(names)
    assert not [name for name in names if f"\n| `{name}` |" not in TEXT]
    assert not [level for level in LEVELS if f"\n- **{level}**" not in TEXT]
