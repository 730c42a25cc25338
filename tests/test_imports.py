"""Who may import whom: comparing works without mlx, only the CLI knows click, the kernels stand alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"mlx", "mlx_lm", "numba", "tokenizers", "torch", "transformers"}


def python(program: str) -> str:
    """What a fresh interpreter prints, run outside of the repository: only installed names are found."""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT.anchor, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def loaded_by(statement: str) -> set[str]:
    return set(
        python(f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})").split()
    )


@pytest.mark.parametrize(
    "module",
    [
        "detdiff",
        "detdiff.trace",
        "detdiff.compare",
        "detdiff.report",
        "detdiff.scenario",
        "detdiff.explain.rules",
    ],
)
def test_comparing_and_reporting_load_no_model_library(module: str) -> None:
    assert not loaded_by(f"import {module}") & (HEAVY | {"click"})


@pytest.mark.parametrize("module", ["mlx.core", "numba", "tokenizers"])
def test_a_model_library_that_is_loaded_is_seen(module: str) -> None:
    assert module.partition(".")[0] in loaded_by(f"import {module}") & HEAVY


def test_the_public_names_are_what_they_say_whatever_was_imported_before() -> None:
    program = """
import detdiff, detdiff.compare, detdiff.explain
from detdiff.compare import Divergence
assert detdiff.Divergence is Divergence
assert detdiff.compare.__name__ == "compare" and callable(detdiff.compare)
from detdiff import compare, record
from detdiff.compare import compare as function
assert compare is function is detdiff.compare
from detdiff import explain
from detdiff.explain import explain as function
assert explain is function is detdiff.explain and callable(explain)
print(*sorted(name for name in detdiff.__all__ if callable(getattr(detdiff, name))))
"""
    assert python(program) == "Divergence Scenario Trace Verdict compare explain record"


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    import detdiff

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = detdiff.nothing
    assert set(detdiff.__all__) <= set(dir(detdiff))


def imports(source: str) -> Iterator[str]:
    """Every module that ``source`` imports anywhere, by its full name, but for relative ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def importers(folder: Path, package: str) -> set[str]:
    """The files below ``folder`` that import ``package``, as paths relative to ``folder``."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if package in {name.partition(".")[0] for name in imports(path.read_text(encoding="utf-8"))}
    }


def test_only_the_cli_imports_click() -> None:
    found = importers(ROOT / "detdiff", "click")
    assert found and all(name == "cli.py" or name.startswith("cli/") for name in found)


def test_the_kernel_library_imports_nothing_of_detdiff() -> None:
    assert (ROOT / "kernels" / "detdiff_kernels" / "__init__.py").is_file()
    assert importers(ROOT / "kernels" / "detdiff_kernels", "detdiff") == set()


@pytest.mark.parametrize(
    "line",
    ["import click", "import os, click.core", "from click import echo", "def f():\n    import click as c"],
)
def test_an_import_is_found_wherever_it_stands(tmp_path: Path, line: str) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "planted.py").write_text(line)
    (tmp_path / "clean.py").write_text("from .click import x\nimport clicker  # import click\n")
    assert importers(tmp_path, "click") == {"inner/planted.py"}


# Written so that this file does not hold what it looks for.
FOLDERS = ("root", "home", "Users", "work", "tmp", "private", "opt")
MACHINE_PATH = re.compile(rb"(?<![\w.~*)}>])/(?:%s)/[\w.]" % "|".join(FOLDERS).encode())


def machine_paths(path: Path) -> list[bytes]:
    return [match[0] for match in MACHINE_PATH.finditer(path.read_bytes())]


def test_no_file_names_a_place_on_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert "pyproject.toml" in names
    assert {name: found for name in names if (found := machine_paths(ROOT / name))} == {}


def test_a_place_on_one_machine_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    for folder in FOLDERS:
        planted.write_text(f'model = "/{folder}/me/model"')
        assert machine_paths(planted)
    planted.write_text("https://example.org/home/x ./tmp/x benchmarks/work/x a*/tmp/x")
    assert not machine_paths(planted)
