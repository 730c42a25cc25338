"""What a command's process does before a model is opened: what is imported and not used waits for its first use."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run

from detdiff.commands.start import wait_for_use

NAME = "detdiff_late_package"
SOURCE = "import {name}\nfrom {name}.inner import THREE\nseen = {name}\nVALUE = THREE + 4\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that imports itself, as torch does, and a file that its import writes."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n{SOURCE.format(name=NAME)}"
    )
    (folder / "inner.py").write_text("THREE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "ran"  # type: ignore[misc]
    for name in (NAME, f"{NAME}.inner"):
        sys.modules.pop(name, None)


def test_an_import_without_use_runs_nothing(package: Path) -> None:
    wait_for_use(NAME)
    code = f"import {NAME}\nimport {NAME} as again\nfrom importlib.util import find_spec\nfind_spec('{NAME}')"
    exec(code, {})
    assert not package.exists()


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (f"import {NAME}; found = {NAME}.VALUE", 7),
        (f"from {NAME} import VALUE as found", 7),
        (f"import {NAME}.inner; found = {NAME}.VALUE", 7),
        (f"from {NAME}.inner import THREE as found", 3),
        (f"import {NAME}; {NAME}.VALUE = 1; found = {NAME}.VALUE", 1),
        (f"import {NAME}; found = {NAME}.seen is {NAME}", True),
        (f"import {NAME}; found = hasattr({NAME}, 'nothing')", False),
    ],
)
def test_the_first_use_runs_it_whole(package: Path, code: str, value: object) -> None:
    wait_for_use(NAME)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["found"] == value and package.exists()


def test_what_fails_at_its_first_use_is_tried_again(package: Path) -> None:
    inner = package.parent / NAME / "inner.py"
    inner.write_text("raise ImportError('not today')\n")
    wait_for_use(NAME)
    for _ in range(2):
        with pytest.raises(ImportError, match="not today"):
            exec(f"from {NAME} import VALUE", {})
    assert NAME not in sys.modules


def test_what_is_imported_already_or_not_there_is_left_alone() -> None:
    before = sys.modules["json"]
    wait_for_use("json")
    assert sys.modules["json"] is before
    wait_for_use("detdiff_not_there")
    assert "detdiff_not_there" not in sys.modules


@pytest.mark.thorough
def test_the_demonstration_s_model_runs_nothing_of_torch() -> None:
    pytest.importorskip("torch")
    program = """
import sys
from detdiff.commands.sides import Engines
from detdiff.scenario import Scenario
engine = Engines().of(Scenario.from_flags("builtin", ("In the beginning",), "max_tokens=1"))
assert engine.decode(engine.encode("In the beginning", False)).endswith("In the beginning")
assert "torch._C" not in sys.modules and "torch" in sys.modules
import torch
assert float(torch.ones(3).sum()) == 3 and "torch._C" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_was_loaded_is_not_looked_through_again() -> None:
    gc.unfreeze()
    assert run("compare", "--model", "builtin", "--prompt", "In", "--a", "max_tokens=1").exit_code == 3
    assert gc.get_freeze_count() > 10_000
