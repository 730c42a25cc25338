"""Runs the plugin's tests with other versions of pytest: ``python tools/pytest_versions.py [VERSION ...] [-- ARGUMENT ...]``.

Without versions these are the oldest supported one and the newest one that pip finds. Each is put beside this environment, not
into it. Arguments after ``--`` go to pytest instead of the plugin's test files. Exit status: that of the first run that
fails, 0 where all pass, 3 where a version cannot be fetched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = "7.4.0"
NEWEST = "newest"
FILES = ("life", "golden", "refused", "faults", "engines")
UNREACHABLE = 3


def fetch(version: str, folder: Path) -> bool:
    """Put pytest, and what it is made of, into ``folder``; pluggy and what else it needs are those of this environment."""
    wanted = "pytest" if version == NEWEST else f"pytest=={version}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--target", str(folder), wanted),
        ],
        check=False,
    )
    return done.returncode == 0


def run(folder: Path, arguments: list[str]) -> int:
    """Run pytest from ``folder`` in the repository; its settings there are for one version, so it is given none."""
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(ROOT)]
    return subprocess.run(
        [*command, "-n", "0", *arguments], cwd=ROOT, env=environment, check=False
    ).returncode


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    arguments = words[cut + 1 :] or [f"tests/plugin/test_plugin_{name}.py" for name in FILES]
    for version in words[:cut] or (OLDEST, NEWEST):
        with tempfile.TemporaryDirectory(prefix="detdiff-pytest-") as name:
            print(f"pytest {version}:", flush=True)
            if not fetch(version, Path(name)):
                print(
                    f"pip does not give pytest {version}; check the version and the network.", file=sys.stderr
                )
                return UNREACHABLE
            status = run(Path(name), arguments)
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
