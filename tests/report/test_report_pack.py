"""A pack holds what its scenarios name, but for weights, and its README's command runs in the folder it is unpacked to."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest
from command_line import run

from detdiff.engines.mlx.model import builtin_path, load
from detdiff.engines.mlx.model_directory import twin_of
from detdiff.scenario import Scenario
from detdiff.trace import Trace

_SCENARIO = """
model = "{model}"
{more}
layout = "packed"
kernels = "{kernels}"
prefill_chunk = 4
max_tokens = 4
ignore_stop = true
capture = "full"

[[request]]
id = "anchor"
tokens = [20, 30, 40, 50, 60]

[[request]]
id = "follower"
tokens = [120, 130, 140, 150, 160, 170]
"""


def _packed(
    folder: Path, *more: str, model: str = "builtin", kernels: str = "candle-metal", keys: str = ""
) -> Path:
    """What a pack of one scenario under two schedules unpacks to, far from all that the scenario names."""
    scenario = folder / "scenario.toml"
    scenario.write_text(_SCENARIO.format(model=model, kernels=kernels, more=keys), encoding="utf-8")
    words = ("--a", "schedule=serial", "--b", "schedule=continuous", "--pack", folder / "x.zip", *more)
    result = run("report", scenario, *words)
    assert result.exit_code == 0, result.output
    return _unpacked(folder / "x.zip", folder / "unpacked")


def _unpacked(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as made:
        made.extractall(folder)
    return folder


def _commands(pack: Path) -> list[list[str]]:
    text = (pack / "README.md").read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"^ {4}detdiff (.*)$", text, re.M)]


def _names(pack: Path) -> set[str]:
    return {path.relative_to(pack).as_posix() for path in pack.rglob("*") if path.is_file()}


def _runs(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's commands give what was recorded."""
    monkeypatch.chdir(pack)
    explain, *compare = _commands(pack)
    again = run(*explain, "--control", "pin_kernels", "--json")
    assert again.exit_code in (1, 3), again.output
    first = json.loads(run("compare", "a", "b", "--json").stdout)["requests"]
    found = json.loads(again.stdout)["divergence"]["requests"]
    assert any(request["origin"] for request in first)
    for one, other in zip(first, found, strict=True):
        assert (one["origin"] or {}).get("site") == (other["origin"] or {}).get("site")
    for words in compare:
        assert run(*words).exit_code == 1


@pytest.mark.thorough
def test_random_models_and_a_profile_go_along_and_no_weights_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiles_folder: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name, source, seed in (("target", "builtin", 0), ("draft", "builtin-draft", 1)):
        twin = twin_of(load(source), outside / name, seed, 2)
        # What lies beside a random model's configuration is not part of it.
        shutil.copy(builtin_path(source) / "model.safetensors", twin / "model.safetensors.bak")
    shutil.copy(profiles_folder / "candle-metal.toml", outside / "mine.toml")
    pack = _packed(
        tmp_path,
        model="./outside/target",
        kernels="./outside/mine.toml",
        keys='draft = "./outside/draft"',
    )
    names = _names(pack)
    assert {name for name in names if name.startswith(("model", "draft", "profile"))} == {
        "model/config.json",
        "draft/config.json",
        "profile.toml",
    }
    assert {name for name in names if "safetensors" in name} == {
        "a/shard-00000.safetensors",
        "b/shard-00000.safetensors",
    }
    shutil.rmtree(outside)
    _runs(pack, monkeypatch)


@pytest.mark.thorough
def test_what_is_not_in_a_pack_is_asked_for_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("builtin", "builtin-draft"):
        shutil.copytree(builtin_path(name), tmp_path / name)
    pack = _packed(tmp_path, model="./builtin", keys='draft = "./builtin-draft"')
    assert not any(name.startswith(("model", "draft")) for name in _names(pack))
    # A draft cannot be told to a replay, so that the README does not promise one.
    assert _commands(pack) == [["explain", "a.toml", "b.toml", "--both", "model=DIR draft=DRAFT"]]
    text = (pack / "README.md").read_text(encoding="utf-8")
    assert f"`{tmp_path / 'builtin'}`" in text and f"`{tmp_path / 'builtin-draft'}`" in text
    monkeypatch.chdir(pack)
    places = _commands(pack)[0][-1].replace("DIR", "builtin").replace("DRAFT", "builtin-draft")
    again = run("explain", "a.toml", "b.toml", "--both", places, "--budget", "0", "--json")
    assert again.exit_code in (1, 3), again.output


@pytest.mark.thorough
def test_tokens_that_were_forced_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _packed(tmp_path, "--keep", tmp_path / "kept")
    assert not (first / "tokens").exists()
    (tmp_path / "again").mkdir()
    pack = _packed(tmp_path / "again", keys=f'force_tokens = "{tmp_path / "kept" / "a"}"')
    assert Scenario.from_toml(pack / "a.toml").force_tokens == str(pack / "tokens")
    assert not any(shard.value_columns() for shard in Trace.open(pack / "tokens").shards)
    words = ("--b", "schedule=continuous", "--pack", tmp_path / "y.zip")
    assert run("report", tmp_path / "kept" / "a", tmp_path / "again" / "scenario.toml", *words).exit_code == 0
    other = _unpacked(tmp_path / "y.zip", tmp_path / "other")
    assert Scenario.from_toml(other / "b.toml").force_tokens == str(other / "a")
    shutil.rmtree(tmp_path / "kept")
    _runs(pack, monkeypatch)
    _runs(other, monkeypatch)


def test_only_a_trace_s_own_files_are_packed_and_an_unfinished_one_stays_unfinished(tmp_path: Path) -> None:
    _packed(tmp_path, "--keep", tmp_path / "kept")
    a = tmp_path / "kept" / "a"
    shutil.copy(builtin_path() / "model.safetensors", a / "weights.safetensors")
    header = json.loads((a / "trace.json").read_text(encoding="utf-8"))
    (a / "trace.json").write_text(json.dumps({**header, "complete": False}), encoding="utf-8")
    result = run("report", tmp_path / "kept", "--pack", tmp_path / "y.zip")
    assert result.exit_code == 0, result.output
    pack = _unpacked(tmp_path / "y.zip", tmp_path / "other")
    files = {"trace.json", "forwards.jsonl", "texts.jsonl", "shard-00000.safetensors"}
    assert {path.name for path in (pack / "a").iterdir()} == files
    assert not Trace.open(pack / "a").complete and Trace.open(pack / "b").complete
    assert run("compare", pack / "a", a).exit_code == 3
    # Nothing can be run again and checked against half a trace.
    assert _commands(pack) == [["explain", "a.toml", "b.toml"]]


def test_a_damaged_trace_is_not_made_a_whole_one(tmp_path: Path) -> None:
    _packed(tmp_path, "--keep", tmp_path / "kept", "--both", "memory_mb=1")
    a = tmp_path / "kept" / "a"
    header = json.loads((a / "trace.json").read_text(encoding="utf-8"))
    text = (a / "texts.jsonl").read_bytes()
    (a / "texts.jsonl").write_bytes(text[: text.rindex(b"\n", 0, -1) + 1])
    assert header["complete"]
    words = (tmp_path / "kept", "--partial", "--pack", tmp_path / "y.zip")
    result = run("report", *words)
    assert result.exit_code == 0, result.output
    assert not Trace.open(_unpacked(tmp_path / "y.zip", tmp_path / "other") / "a").complete


def test_a_request_s_name_is_text_in_the_readme(tmp_path: Path) -> None:
    text = _SCENARIO.format(model="builtin", kernels="candle-metal", more="").replace("follower", "<b>`|@x")
    (tmp_path / "s.toml").write_text(text.replace("anchor", "<i>*"), encoding="utf-8")
    words = ("--a", "schedule=serial", "--b", "schedule=continuous", "--pack", tmp_path / "x.zip")
    assert run("report", tmp_path / "s.toml", *words).exit_code == 0
    readme = (_unpacked(tmp_path / "x.zip", tmp_path / "y") / "README.md").read_text(encoding="utf-8")
    assert "origin at" in readme and "<b>" not in readme and "<i>" not in readme


@pytest.fixture
def profiles_folder() -> Path:
    """Where the profiles that detdiff brings along are."""
    import detdiff_kernels

    return Path(detdiff_kernels.__file__).parent / "profiles"
