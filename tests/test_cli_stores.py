"""The commands and Python's functions on traces at addresses: what a path can do, an address can."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from command_line import SCENARIO, run
from stores import memory_store

import detdiff
from detdiff.cli import main
from detdiff.cli.options import LocalPath, TracePath
from detdiff.scenario import Scenario
from detdiff.trace import Address, Trace, place


def shorter(folder: Path) -> Path:
    file = folder / "s.toml"
    file.write_text(SCENARIO.replace("max_tokens = 6", "max_tokens = 3"), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An address below which there are the traces a, serial, and b, continuous, recorded by the command."""
    address, scenario = memory_store(), shorter(tmp_path_factory.mktemp("stores"))
    for name, schedule in (("a", "serial"), ("b", "continuous")):
        made = run("record", scenario, "-o", f"{address}/{name}", "--set", f"schedule={schedule}")
        assert made.exit_code == 0 and made.output.startswith(f"{address}/{name}: complete"), made.output
    return address


def test_record_compare_and_report_at_an_address(store: str, tmp_path: Path) -> None:
    """Through the functions, with the same answers as of traces on the disk."""
    scenario = Scenario.from_toml(shorter(tmp_path))
    for name, schedule in (("a", "serial"), ("b", "continuous")):
        given = scenario.with_changes(schedule=schedule)
        assert str(detdiff.record(given, f"{store}/{name}").path) == f"{store}/{name}"
        detdiff.record(given, tmp_path / name)
    found, local = (detdiff.compare(f"{where}/a", f"{where}/b") for where in (store, tmp_path))
    assert not found.identical and found.compared == local.compared
    assert [(r.id, r.flip, r.origin) for r in found.requests] == [
        (r.id, r.flip, r.origin) for r in local.requests
    ]
    told = json.loads(run("compare", f"{store}/a", f"{store}/b", "--json").output)["compared"]
    assert told["rows"] == found.compared.rows > 0
    made = run(
        "report", f"{store}/a", f"{store}/b", "--html", tmp_path / "r.html", "--pack", tmp_path / "p.zip"
    )
    assert made.exit_code == 0 and f"{store}/a" in (tmp_path / "r.html").read_text(encoding="utf-8")
    # The pack holds both traces, and is read where it is.
    packed = run("compare", f"zip://a::{tmp_path / 'p.zip'}", f"zip://b::{tmp_path / 'p.zip'}", "--json")
    assert packed.exit_code == 1 and json.loads(packed.output)["compared"] == told
    both = run("report", tmp_path / "p.zip", "--json", "-")
    assert both.exit_code == 0, both.output
    assert json.loads(both.output)["divergence"]["compared"] == told


def test_show_and_compare_of_an_address(pair: str) -> None:
    shown = run("show", f"{pair}/a", "--json")
    said = json.loads(shown.output)
    assert said["trace"] == f"{pair}/a" and said["complete"] and said["bytes"] > 1000
    compared = run("compare", f"{pair}/a", f"{pair}/b")
    assert compared.exit_code == 1 and f"{pair}/a" in compared.output
    same = run("compare", f"{pair}/a", f"{pair}/a")
    assert same.exit_code == 0


def test_a_changed_object_ends_every_command_with_its_name(pair: str) -> None:
    """Its healthy twin is the test before."""
    address = memory_store()
    for name in (found := place(f"{pair}/b")).sizes():  # type: ignore[union-attr]
        (place(f"{address}/b") / name).put([(found / name).read_bytes()])  # type: ignore[union-attr]
    shard = place(f"{address}/b") / "shard-00000.safetensors"
    assert isinstance(shard, Address)
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.put([raw])
    for command in (
        ("show", f"{address}/b"),
        ("compare", f"{pair}/a", f"{address}/b"),
        ("explain", f"{pair}/a", f"{address}/b"),
        ("report", f"{pair}/a", f"{address}/b"),
    ):
        refused = run(*command)
        assert refused.exit_code == 2, command
        words = " ".join(refused.output.split())
        assert f"{shard} has the checksum" in words and "damaged" in words, command


def test_explain_and_force_tokens_from_an_address(pair: str, tmp_path: Path) -> None:
    explained = run("explain", f"{pair}/a", f"{pair}/b", "--control", "repeat", "--json")
    controls = {each["name"]: each["result"] for each in json.loads(explained.output)["controls"]}
    assert controls["repeat"] == "equal", explained.output
    fed = run(
        "compare",
        shorter(tmp_path),
        shorter(tmp_path),
        *("--a", "schedule=serial", "--b", "schedule=continuous", "--force-tokens", f"{pair}/a"),
        *("--keep", f"{pair}/kept"),
    )
    assert fed.exit_code in (0, 1), fed.output
    kept = Trace.open(f"{pair}/kept/b", checked=True)
    assert kept.complete and kept.scenario["force_tokens"] == f"{pair}/a"
    again = run("record", f"{pair}/kept/b", "-o", f"{pair}/again")
    assert again.exit_code == 0 and detdiff.compare(f"{pair}/kept/b", f"{pair}/again").identical
    refused = run("record", f"{pair}/a", "-o", f"{pair}/again")
    assert refused.exit_code == 2 and "exists" in refused.output


@pytest.mark.thorough
def test_reduce_from_an_address(pair: str, tmp_path: Path) -> None:
    """One pair that is tried shows that both traces were read; that they are smaller in the end, tests/reduce shows."""
    made = run(
        "reduce", f"{pair}/a", f"{pair}/b", "-o", tmp_path / "smaller", "--budget", 1, "--no-twin", "--json"
    )
    assert made.exit_code == 0, made.output
    kinds = [Scenario.from_toml(tmp_path / "smaller" / f"{name}.toml").schedule.kind for name in ("a", "b")]
    assert kinds == ["serial", "continuous"]


def test_what_is_not_at_an_address_is_told(pair: str) -> None:
    for command in (("show", f"{pair}/c"), ("compare", f"{pair}/a", f"{pair}/c")):
        refused = run(*command)
        assert refused.exit_code == 2 and "is not a trace" in " ".join(refused.output.split()), refused.output


def test_what_is_no_trace_is_refused_at_an_address_and_no_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of that name would be a folder s3:."""
    monkeypatch.chdir(tmp_path)
    for command in (
        ("bench", "--model", "builtin", "-o"),
        ("sweep", "grid.toml", "-o"),
        ("reduce", "a", "b", "-o"),
        ("report", "a", "b", "--html"),
        ("compare", "a", "b", "--plot"),
    ):
        refused = run(*command, "s3://bucket/there")
        words = " ".join(refused.output.split())
        assert refused.exit_code == 2 and "s3://bucket/there is an address" in words, (command, words)
    assert list(tmp_path.iterdir()) == []
    local = run("report", "a", "b", "--html", "file:///there/r.html")
    assert "is an address" not in local.output


def test_every_option_with_a_path_says_whether_it_takes_an_address() -> None:
    options = {
        (name, param.name, type(param.type))
        for name, command in main.commands.items()
        for param in command.params
        if isinstance(param, click.Option) and isinstance(param.type, click.Path)
    }
    read = {(name, param) for name, param, kind in options if kind not in (LocalPath, TracePath)}
    assert {param for _, param in read} == {"prompts_file"} and len(options) > 10
