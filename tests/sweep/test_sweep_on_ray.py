"""The same cells as tasks of a Ray cluster that the tests start once: the same bytes, and a killed worker costs one cell's work."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import run as command
from grids import OFF, built_in, differing, grid, run
from tiers import only_in_full

from detdiff.commands.sweep import SweepArguments, swept
from detdiff.errors import RayMissing
from detdiff.sweep import on_ray as on_ray_module
from detdiff.sweep.cells import RecordTask
from detdiff.sweep.on_ray import packed, run_on_worker, unpacked

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A cluster of one machine with two processors, started once."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed; the extra ray has it")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    try:
        started = Cluster(initialize_head=True, head_node_args=head)
    except Exception as error:
        pytest.skip(f"Ray cannot start a cluster here: {type(error).__name__}: {error}")
    yield started
    started.shutdown()


@pytest.fixture(scope="module")
def cluster(machines: Any) -> str:
    """Its address."""
    return str(machines.address)


def on_ray(path: Path, folder: Path, address: str, **more: Any) -> Any:
    return swept(SweepArguments(path, folder, ray=address, imports=("sweep_engine",), **more))


def test_a_cluster_gives_the_same_bytes_and_a_killed_worker_costs_one_cells_work(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    axes = 'how = {sound = "", off = "engine.off=flips", missing = "model=missing"}\nschedule = ["serial", "static"]'
    path = grid(tmp_path, axes, engine=f"killed_once = {json.dumps(str(marker))}")
    found, notes = on_ray(path, tmp_path / "ray", cluster)
    assert [each.kind for each in found.entries] == ["identical", "different", "failed"]
    assert len(notes) == 1 and notes[0].startswith("run again, since its worker was lost: record how=")
    run(path, tmp_path / "processes", imports=("sweep_engine",))
    assert differing(tmp_path / "ray", tmp_path / "processes") == []
    # The cluster's folder goes on with processes, and the other way round.
    (tmp_path / "ray/answers/how=off,schedule=static.sha256").unlink()
    run(path, tmp_path / "ray", imports=("sweep_engine",))
    (tmp_path / "ray/answers/how=off,schedule=static.sha256").unlink()
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    as_on_the_page = f"sweep {path} -o {tmp_path / 'ray'} --ray auto --import sweep_engine"
    ended = command(*as_on_the_page.split())
    assert ended.exit_code == 2, ended.output
    assert differing(tmp_path / "ray", tmp_path / "processes") == []


@only_in_full("a second machine of a cluster, which ends")
def test_an_object_that_is_lost_with_its_machine_costs_the_step_that_made_it(
    tmp_path: Path, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace that was recorded, and whose machine ends before it was fetched. One of a few kilobytes would come with the answer."""
    import ray

    second = machines.add_node(num_cpus=1, resources={"second": 1}, object_store_memory=80 << 20)
    lost: list[str] = []

    class Losing(on_ray_module.RayWorkers):
        def __init__(self, *told: Any) -> None:
            super().__init__(*told)
            self._anywhere = self._remote
            there = {"second": 0.1}
            self._remote = ray.remote(max_retries=0, num_returns=2, resources=there)(run_on_worker)

        def finished(self) -> list[tuple[Any, Any]]:
            ((ended, task),) = self._running.items()
            if isinstance(task, RecordTask) and not lost:
                packed = self._packed[f"{task.name}/record"]
                ray.wait([ended, packed], num_returns=2, fetch_local=False)
                machines.remove_node(second, allow_graceful=False)
                lost.append(f"record {task.name}")
                self._remote = self._anywhere
            return super().finished()

    monkeypatch.setattr(on_ray_module, "RayWorkers", Losing)
    path = grid(tmp_path, OFF)
    path.write_text(path.read_text().replace("[1, 2]", f"[{','.join(['1'] * 20_000)}]"))
    found, notes = on_ray(path, tmp_path / "ray", machines.address, jobs=1)
    assert [each.kind for each in found.entries] == ["identical", "different"]
    assert len(lost) == 1 and notes == [f"run again, since its worker was lost: {lost[0]}"]
    run(path, tmp_path / "processes", imports=("sweep_engine",))
    assert differing(tmp_path / "ray", tmp_path / "processes") == []


def test_a_cell_that_no_machine_has_room_for_is_told_and_one_that_always_dies_too(
    tmp_path: Path, cluster: str
) -> None:
    path = grid(
        tmp_path, 'how = {sound = "", killed = "engine.killed=true"}\nschedule = ["serial", "static"]'
    )
    found, _ = on_ray(path, tmp_path / "out", cluster)
    assert [each.kind for each in found.entries] == ["identical", "failed"]
    assert "ended before it answered, twice" in found.entries[1].headline
    path.write_text(path.read_text() + "[needs]\ngpus = 3\n")
    asked, _ = on_ray(path, tmp_path / "other", cluster)
    assert {each.kind for each in asked.entries} == {"failed"}
    assert "no machine of the cluster has them" in asked.entries[0].headline


def test_a_trace_that_is_gone_and_a_full_machine_are_told_in_their_cells(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "out/traces/engine.off=true,schedule=serial"

    class Full(on_ray_module.RayWorkers):
        def __init__(self, *told: Any) -> None:
            super().__init__(*told)

            def full(task: Any, *more: Any) -> Any:
                if task.name == "engine.off=1,schedule=serial":
                    raise OSError(errno.ENOSPC, "No space left on device")
                return run_on_worker(task, *more)

            import ray

            self._remote = ray.remote(max_retries=0, num_returns=2)(full)

        def finished(self) -> list[tuple[Any, Any]]:
            found = super().finished()
            shutil.rmtree(gone, ignore_errors=True)
            return found

    monkeypatch.setattr(on_ray_module, "RayWorkers", Full)
    path = grid(tmp_path, OFF.replace("[false, true]", "[false, true, 1]"))
    found, notes = on_ray(path, tmp_path / "out", cluster)
    assert [each.kind for each in found.entries] == ["identical", "failed", "failed"] and notes == []
    said = [each.headline for each in found.entries[1:]]
    assert "traces/engine.off=true,schedule=serial" in said[0] and str(tmp_path) not in said[0]
    assert "No space left on device" in said[1]
    again = run(path, tmp_path / "out", imports=("sweep_engine",))
    assert [each.kind for each in again.entries] == ["identical", "different", "different"]


def test_source_and_modules_of_the_users_are_shipped_to_another_machine(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sweep_engine

    assert sweep_engine.__file__ is not None
    monkeypatch.delenv("PYTHONPATH")
    where = tmp_path / "where"
    path = grid(tmp_path, OFF, engine=f"where = {json.dumps(str(where))}")
    found, _ = on_ray(path, tmp_path / "out", cluster)
    assert [each.kind for each in found.entries] == ["identical", "different"]
    answer = json.loads((tmp_path / "out/answers/engine.off=true,schedule=static.json").read_text())
    assert "sweep_engine" in answer["a"]["environment"]["imports"]
    engine, *places = where.read_text().splitlines()
    # On this machine the folder of the source comes first; on another one it is not there.
    assert "py_modules_files" in engine and any("py_modules_files" in place for place in places), places


def test_without_ray_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(RayMissing, match=r"the package ray is not installed here.*detdiff\[ray\]"):
        on_ray(grid(tmp_path), tmp_path / "out", "auto")


def test_a_worker_removes_what_killed_ones_have_left_and_nothing_of_the_living(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    held = []
    for _ in range(2):
        monkeypatch.setattr(on_ray_module, "_OWN", [])
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert on_ray_module.own_folder() == on_ray_module.own_folder() == Path(tempfile.gettempdir())
        held += on_ray_module._OWN
    assert sorted(tmp_path.iterdir()) == sorted(folder for folder, _ in held)
    # The system does this when a process ends, whatever ends it.
    os.close(held[0][1])
    (held[0][0] / "a trace").touch()
    monkeypatch.setattr(on_ray_module, "_OWN", [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    last = on_ray_module.own_folder()
    assert sorted(tmp_path.iterdir()) == sorted([held[1][0], last])
    os.close(held[1][1])
    os.close(on_ray_module._OWN[0][1])


def test_a_trace_there_and_back_is_the_same(tmp_path: Path) -> None:
    path = grid(tmp_path)
    run(path, tmp_path / "out")
    first, *_ = sorted((tmp_path / "out/traces").iterdir())
    data = packed(first)
    unpacked(data, tmp_path / "back")
    unpacked(data, tmp_path / "back")
    assert packed(tmp_path / "back") == data
    assert {f.name: f.read_bytes() for f in first.iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "back").iterdir()
    }


@only_in_full("64 cells of the built-in model, by processes and on a cluster")
def test_64_cells_give_the_same_bytes_on_a_cluster(tmp_path: Path, cluster: str) -> None:
    path = built_in(tmp_path, max_tokens=6)
    run(path, tmp_path / "processes", jobs=2, imports=("sweep_engine",))
    on_ray(path, tmp_path / "ray", cluster)
    assert differing(tmp_path / "ray", tmp_path / "processes") == []
