"""A random-weight case goes whole into a pack: unpacked elsewhere, its one command gives the same verdict and origin."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest
from command_line import run
from tiny import CONFIGS

CASE = """
model = "./twin"
draft = "./other"
drafts = 2
layout = "packed"
kernels = "candle-metal"
split_rows = 2
max_tokens = 4
ignore_stop = true
schedule = "{schedule}"

[[request]]
id = "one"
tokens = [3, 1, 4, 1, 5]

[[request]]
id = "two"
tokens = [9, 2, 6]
"""


def random_model(folder: Path, seed: int) -> None:
    folder.mkdir()
    config = {**CONFIGS["llama"], "detdiff_random": {"seed": seed, "dtype": "float32"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.thorough
def test_a_pack_of_random_models_needs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    made.mkdir()
    random_model(made / "twin", 0)
    random_model(made / "other", 1)
    for name, schedule in (("a", "serial"), ("b", "continuous")):
        (made / f"{name}.toml").write_text(CASE.format(schedule=schedule))
    sides = (made / "a.toml", made / "b.toml")
    first = json.loads(run("explain", *sides, "--json").stdout)
    assert first["verdict"] == "numerics"
    assert run("report", *sides, "--pack", tmp_path / "case.zip").exit_code == 0
    shutil.rmtree(made)
    with zipfile.ZipFile(tmp_path / "case.zip") as packed:
        assert not [name for name in packed.namelist() if "twin" in name or "other" in name]
        packed.extractall(tmp_path / "pack")
    monkeypatch.chdir(tmp_path / "pack")
    commands = re.findall(r"^ {4}detdiff (.*)$", Path("README.md").read_text(), re.MULTILINE)
    assert commands == ["explain a.toml b.toml", "compare a b --replay --model model"]
    again = json.loads(run(*shlex.split(commands[0]), "--json").stdout)
    assert again["verdict"] == "numerics"
    for one, two in zip(first["divergence"]["requests"], again["divergence"]["requests"], strict=True):
        assert (one["origin"], one["flip"]) == (two["origin"], two["flip"])
