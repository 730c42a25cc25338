"""Who may import whom: the rules of the package's layout, each with an injected file that breaks it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from import_rules import circles, class_twins, edges, importers, modules, only_forwards

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {
    "mlx", "mlx_lm", "msgspec", "numba", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "xllamacpp",
}  # fmt: skip


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


ENGINELESS = (
    "detdiff",
    "detdiff.trace",
    "detdiff.compare",
    "detdiff.report",
    "detdiff.scenario",
    "detdiff.explain.rules",
)
LIBRARIES = ("mlx.core", "numba", "tokenizers")


def test_comparing_and_reporting_load_no_model_library() -> None:
    assert not loaded_by(f"import {', '.join(ENGINELESS)}") & (HEAVY | {"click"})


def test_a_model_library_that_is_loaded_is_seen() -> None:
    found = loaded_by(f"import {', '.join(LIBRARIES)}") & HEAVY
    assert {name.partition(".")[0] for name in LIBRARIES} <= found


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
    assert python(program) == "Divergence Scenario Trace Verdict compare explain invariant record"


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    import detdiff

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = detdiff.nothing
    assert set(detdiff.__all__) <= set(dir(detdiff))


HOMES = {
    "click": ("cli/",),
    "fsspec": ("trace/store.py",),
    "msgspec": ("engines/server/",),
    "mlx": ("engines/mlx/",),
    "mlx_lm": ("engines/mlx/",),
    "starlette": ("serving/",),
    "tabulate": ("report/text.py",),
    "torch": ("engines/transformers/",),
    "transformers": ("engines/transformers/",),
    "uvicorn": ("serving/",),
    "xllamacpp": ("engines/llama_cpp/",),
}
"""Where in detdiff a library may be imported."""
APART = ("trace", "compare", "report")
"""What knows no engine."""


def away_from_home(folder: Path, library: str) -> set[str]:
    """The files below ``folder`` that import ``library`` and are not where that is done."""
    return {name for name in importers(folder, library) if not name.startswith(HOMES[library])}


def reaching_an_engine(root: Path) -> set[str]:
    """The modules of a detdiff below ``root`` that know no engine by design, and import one themselves."""
    return {
        name
        for name, imported in edges(modules(root, "detdiff")).items()
        if name.split(".")[1:2] and name.split(".")[1] in APART
        if any(other.split(".")[1:2] == ["engines"] for other in imported)
    }


def forwarding(root: Path) -> set[str]:
    return {name for name, path in modules(root, "detdiff").items() if only_forwards(path)}


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_its_own_folder_alone(library: str) -> None:
    assert away_from_home(ROOT / "detdiff", library) == set()


def test_traces_comparing_and_reports_import_no_engine() -> None:
    assert reaching_an_engine(ROOT) == set()


def test_explaining_knows_engines_by_their_interface_alone() -> None:
    own = {"detdiff.engines.base", "detdiff.engines.record", "detdiff.engines.registry", "detdiff.engines"}
    every = edges(modules(ROOT, "detdiff"))
    found = {
        each for name, imported in every.items() if name.startswith("detdiff.explain") for each in imported
    }
    assert {name for name in found if name.startswith("detdiff.engines")} <= own


def test_no_modules_import_one_another() -> None:
    assert circles(edges(modules(ROOT, "detdiff"))) == []


def test_no_file_only_forwards() -> None:
    assert forwarding(ROOT) == set()


def test_a_class_name_has_one_meaning() -> None:
    folders = [ROOT / "detdiff", ROOT / "kernels" / "detdiff_kernels"]
    assert class_twins(folders) == {}


def test_the_package_itself_loads_nothing_but_itself() -> None:
    assert loaded_by("import detdiff") - loaded_by("import __future__, importlib, types, typing") == {
        "detdiff"
    }
    assert "numpy" in loaded_by("import detdiff.trace")


def test_the_kernel_library_imports_nothing_of_detdiff() -> None:
    assert (ROOT / "kernels" / "detdiff_kernels" / "__init__.py").is_file()
    assert importers(ROOT / "kernels" / "detdiff_kernels", "detdiff") == set()


def package(root: Path, **files: str) -> Path:
    """A detdiff of these files, dots for slashes."""
    for name, text in files.items():
        path = root / "detdiff" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (root / "detdiff" / "__init__.py").touch()
    return root


@pytest.mark.parametrize(
    "line",
    [
        "import click",
        "import os, click.core",
        "from click import echo",
        "def f():\n    import click as c",
        "from importlib import import_module\nclick = import_module('click.core')",
    ],
)
def test_an_import_is_found_wherever_it_stands(tmp_path: Path, line: str) -> None:
    clean = "from .click import x\nimport clicker  # import click\n"
    package(tmp_path, inner__injected=line, clean=clean, cli__group="import click")
    assert away_from_home(tmp_path / "detdiff", "click") == {"inner/injected.py"}


@pytest.mark.parametrize(
    "line",
    [
        "from detdiff.engines.mlx import model",
        "import detdiff.engines.mlx.model",
        "def f():\n    from ..engines.mlx.model import load",
    ],
)
def test_an_engine_in_a_report_is_found(tmp_path: Path, line: str) -> None:
    package(tmp_path, engines__mlx__model="", report__text=line, explain__run=line)
    (tmp_path / "detdiff" / "engines" / "__init__.py").touch()
    assert reaching_an_engine(tmp_path) == {"detdiff.report.text"}


def test_a_circle_is_found(tmp_path: Path) -> None:
    package(
        tmp_path,
        one="from .inner import two",
        inner__two="def f():\n    from detdiff.inner.three import x",
        inner__three="import detdiff.one",
        outside="from . import one",
        typed="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .other import x",
        other="from .typed import y",
    )
    assert circles(edges(modules(tmp_path, "detdiff"))) == [
        {"detdiff.one", "detdiff.inner.two", "detdiff.inner.three"}
    ]


@pytest.mark.parametrize(
    "text", ['"""Names."""\nfrom .real import x\n__all__ = ["x"]', "from .real import x\ny = x"]
)
def test_a_file_that_only_forwards_is_found(tmp_path: Path, text: str) -> None:
    package(
        tmp_path, injected=text, real="x = 1", empty='"""Nothing."""', user="from .real import x\nprint(x)"
    )
    assert forwarding(tmp_path) == {"detdiff.injected"}


def test_a_class_name_with_two_meanings_is_found(tmp_path: Path) -> None:
    package(tmp_path, compare__run="class Run: ...", report="class Rows: ...\nclass Browse: ...")
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    injected = kernels / "injected.py"
    injected.write_text("class Walk: ...\nRun = 'class Run: ...'")
    folders = [tmp_path / "detdiff", kernels]
    assert class_twins(folders) == {}
    injected.write_text("def f():\n    class _Run: ...\nclass Rows(list): ...")
    assert class_twins(folders) == {
        "Run": ["compare/run.py", "injected.py"],
        "Rows": ["report.py", "injected.py"],
    }
    injected.write_text("class A:\n    class A: ...")
    assert class_twins(folders) == {"A": ["injected.py", "injected.py"]}


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
    injected = tmp_path / "injected"
    for folder in FOLDERS:
        injected.write_text(f'model = "/{folder}/me/model"')
        assert machine_paths(injected)
    injected.write_text("https://example.org/home/x ./tmp/x benchmarks/work/x a*/tmp/x")
    assert not machine_paths(injected)
