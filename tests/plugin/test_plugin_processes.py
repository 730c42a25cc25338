"""The plugin in processes of its own: what importing it loads, several workers, other versions of pytest."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from inner_runs import STRICT, text_of

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"mlx", "mlx_lm", "numba", "numpy", "click", "transformers", "tokenizers"}


def printed(*command: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_importing_it_loads_no_library(tmp_path: Path) -> None:
    program = "import sys, detdiff.pytest_plugin; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(printed("-c", program, cwd=tmp_path).split())
    assert "detdiff" in loaded and not loaded & HEAVY


SEEN = """
import sys

def pytest_unconfigure():
    print("modules:", *sys.modules)
"""


@pytest.mark.parametrize("uses", [False, True])
def test_a_run_that_checks_nothing_loads_nothing_of_it(tmp_path: Path, uses: bool) -> None:
    (tmp_path / "conftest.py").write_text(SEEN)
    body = "batch_invariance.check_op(lambda x: x, shapes=2, rows='1..2')" if uses else "pass"
    argument = "batch_invariance" if uses else ""
    (tmp_path / "test_it.py").write_text(f"def test_it({argument}): {body}\n")
    arguments = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    names = printed(*arguments, cwd=tmp_path).partition("modules:")[2].split()
    assert "detdiff.pytest_plugin" in names
    found = {name.partition(".")[0] for name in names} & HEAVY
    assert ("numpy" in found, "detdiff.check.checker" in names) == (uses, uses)
    if not uses:
        assert not found and not [name for name in names if name.startswith("detdiff.check")]


@pytest.mark.thorough
def test_two_workers_share_the_work_and_one_summary(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    pytester.makepyfile(
        test_it="""
        import pytest
        from tiny import tiny

        @pytest.mark.batch_invariant(model=tiny("llama"), max_tokens=3, kernels="candle-metal")
        def test_it(worker_id):
            assert worker_id in ("gw0", "gw1")
        """
    )
    result = pytester.runpytest_subprocess(*STRICT, "-n", "2")
    result.assert_outcomes(passed=2, failed=2)
    assert "4 compositions checked, 2 FAILED, " in text_of(result)
    assert " sites of 1 model, " in text_of(result)
    kept = pytester.path / ".detdiff" / "test_it.py" / "test_it" / "static-2-packed"
    assert (kept / "batch-0" / "report.html").is_file()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pytest_versions", ROOT / "tools" / "pytest_versions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_the_oldest_version_of_pytest_runs_it(tool: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, "tools/pytest_versions.py", tool.OLDEST, "--", "tests/plugin/test_plugin_golden.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == tool.UNREACHABLE and not os.environ.get("CI"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
