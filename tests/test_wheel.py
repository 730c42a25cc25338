"""The wheel holds all that a user needs, and only the two packages."""

from __future__ import annotations

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
