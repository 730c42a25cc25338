"""The wheel holds all that a user needs, and only the two packages."""

from __future__ import annotations

import ast
import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"detdiff": ROOT / "detdiff", "detdiff_kernels": ROOT / "kernels" / "detdiff_kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_every_file_of_both_packages_is_in_the_wheel(wheel: set[str]) -> None:
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected - wheel == set()
    assert any(
        name.startswith("detdiff/engines/mlx/builtin/") and name.endswith("/model.safetensors")
        for name in expected
    )
    assert "detdiff_kernels/profiles/candle-metal.toml" in expected
    assert {"detdiff/py.typed", "detdiff_kernels/py.typed"} <= expected


def test_nothing_else_becomes_importable(wheel: set[str]) -> None:
    assert {name.partition("/")[0] for name in wheel if ".dist-info/" not in name} == set(PACKAGES)


def test_pytest_is_told_to_leave_an_editable_installation_s_finder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest cannot rewrite what is imported before it, and would warn of it in every run."""
    from hatchling.build import build_editable

    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_editable(str(tmp_path))) as archive:
        finder = archive.read("_editable_impl_detdiff.py")
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        listed = archive.read(record).decode().splitlines()
    assert "PYTEST_DONT_REWRITE" in (ast.get_docstring(ast.parse(finder)) or "")
    digest = base64.urlsafe_b64encode(hashlib.sha256(finder).digest()).rstrip(b"=").decode()
    assert f"_editable_impl_detdiff.py,sha256={digest},{len(finder)}" in listed
