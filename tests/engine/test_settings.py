"""Runs that were asked otherwise say so, and a trace that was damaged is no difference between two runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import model

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.record import replay
from detdiff.errors import ChecksumError, ReplayError, ScenarioError
from detdiff.scenario import Scenario
from detdiff.trace import Trace


def run(folder: Path, name: str, flags: str, **changes: Any) -> Trace:
    asked = Scenario.from_flags("tiny", ["abcdefgh", "xyz"], f"max_tokens=6 {flags}").with_changes(**changes)
    return record(asked, folder / name, loaded=model("llama"))


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ("temperature=0.9 seed=1", "temperature=0.9 seed=2", "sampling"),
        ("temperature=0", "temperature=2.5", "sampling"),
        ("ignore_stop=false", "ignore_stop=true", "ignore_stop"),
    ],
)
def test_other_settings_are_the_workload(tmp_path: Path, a: str, b: str, word: str) -> None:
    found = compare(run(tmp_path, "a", a), run(tmp_path, "b", b))
    assert not found.identical
    assert any(word in finding.detail for finding in found.workload)
    diverged = any(not request.identical for request in found.requests)
    assert found.stage == ("workload" if diverged else None)
    assert found.inconclusive == (not diverged)


def test_a_run_that_recording_changed_is_never_identical(tmp_path: Path) -> None:
    base = run(tmp_path, "a", "")
    assert base.header["observer"] == {"forwards": 4, "equal": True}
    assert any("recording was checked" in note for note in compare(base, base).notes)
    base.header["observer"]["equal"] = False
    found = compare(base, base)
    assert not found.identical and found.inconclusive
    assert any("RECORDING CHANGED" in note for note in found.notes)


def test_one_flipped_bit_on_the_disk_is_damage_and_no_origin(tmp_path: Path) -> None:
    run(tmp_path, "a", "")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shard = tmp_path / "b" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 16
    shard.write_bytes(data)
    with pytest.raises(ChecksumError, match="damaged"):
        Trace.open(tmp_path / "b", checked=True)
    left = Trace.open(tmp_path / "b", checked=True, partial=True)
    assert not left.complete and not left.shards and "checksum" in left.problems[0]


@pytest.mark.parametrize("window", ["window_sites=layer.0.*", "window_positions=900,950"])
def test_a_window_on_nothing_is_refused(tmp_path: Path, window: str) -> None:
    with pytest.raises(ScenarioError, match="matches none|nothing would be captured"):
        run(tmp_path, "a", f"capture=window {window}")


def test_an_unfinished_trace_is_not_replayed(tmp_path: Path) -> None:
    asked = Scenario.from_flags("builtin", ["In the beginning"], "max_tokens=6 layout=packed")

    class Stop(Exception):
        pass

    def stop(count: int, total: int) -> None:
        if count == 4:
            raise Stop

    with pytest.raises(Stop):
        record(asked, tmp_path / "a", options=RecordOptions(progress=stop))
    half, whole = Trace.open(tmp_path / "a"), record(asked, tmp_path / "b")
    with pytest.raises(ReplayError, match="incomplete"):
        replay(half, whole)


def test_changes_drop_what_they_leave_without_a_use() -> None:
    base = Scenario.from_flags(
        "tiny", ["a", "b"], "schedule=continuous layout=packed active=2 row_budget=9 arrivals=0,3"
    )
    serial = base.with_changes(schedule="serial")
    assert serial.schedule.active is None and serial.schedule.row_budget == 9
    assert [request.arrival for request in serial.requests] == [0, 3]
    static = base.with_changes(schedule="static")
    assert [request.arrival for request in static.requests] == [0, 0]
    assert base.with_changes(layout="padded").schedule.row_budget is None
