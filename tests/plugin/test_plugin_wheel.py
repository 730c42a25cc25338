"""The test file of README, in a virtual environment of its own with the wheel in it: sound, and with each fault injected."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from injected_faults import INJECTED_FAULTS, NAMED
from inner_runs import STRICT
from tiers import FULL

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
FAULTS = tuple(INJECTED_FAULTS) if FULL else ("kernel_switch", "leak")
"""`test_plugin_faults.py` has all of them without a wheel."""
INJECTED = """
import pytest
from injected_faults import INJECTED_FAULTS

@pytest.fixture(autouse=True)
def injected(request):
    name = request.path.parent.name
    if name not in INJECTED_FAULTS:
        yield
        return
    with INJECTED_FAULTS[name]():
        yield
"""


def ten_lines() -> str:
    """The test file that README shows."""
    found = re.search(r"```python\n(import pytest\n.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    text = found[1]
    assert len(text.strip().splitlines()) <= 10
    return text


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and the libraries of this one by a path file."""
    folder = tmp_path_factory.mktemp("fresh")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    home = folder / "environment"
    venv.create(home, with_pip=False)
    scripts = "Scripts" if sys.platform == "win32" else "bin"
    interpreter = home / scripts / "python"
    install = ["--python", str(interpreter), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    (there,) = home.glob("[Ll]ib/**/site-packages")
    # Behind its own, so that the detdiff of this environment is never found.
    (there / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


@pytest.fixture(scope="module")
def report(python: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one run of the file prints: as it is, and in a folder for each fault."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(INJECTED)
    shutil.copy(Path(__file__).with_name("injected_faults.py"), folder)
    for name in ("sound", *FAULTS):
        (folder / name).mkdir()
        (folder / name / "test_batch.py").write_text(ten_lines())
    done = subprocess.run(
        [str(python), "-P", "-m", "pytest", *STRICT, "--import-mode=importlib", "-p", "no:xdist", "-v", "."],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_it_is_the_wheel_that_is_imported(python: Path) -> None:
    program = "import detdiff, detdiff_kernels; print(detdiff.__file__); print(detdiff_kernels.__file__)"
    done = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, check=True, cwd=python.parent
    )
    assert all(str(python.parents[1]) in line for line in done.stdout.splitlines())


def results(report: str, folder: str) -> dict[str, str]:
    return dict(re.findall(rf"^{folder}/test_batch.py::(\S+) (PASSED|FAILED|ERROR)", report, re.MULTILINE))


def test_a_sound_model_passes(report: str) -> None:
    found = results(report, "sound")
    assert len(found) >= 5 and set(found.values()) == {"PASSED"}


@pytest.mark.parametrize("name", FAULTS)
def test_each_injected_fault_fails_and_is_named(report: str, name: str) -> None:
    found = results(report, name)
    assert found.keys() == results(report, "sound").keys()
    assert found["test_answers_do_not_depend_on_the_batch[static:2-padded]"] == "FAILED"
    assert found["test_my_prompts"] == "FAILED"
    kept = " ".join(report.split()).split(" kept: ")
    failures = [
        failure.rpartition(" why: ")[2]
        for failure, where in zip(kept, kept[1:], strict=False)
        if f" in .detdiff/{name}/" in where.partition(" run: ")[0]
    ]
    assert len(failures) >= 2 and all(NAMED[name] in failure for failure in failures)
