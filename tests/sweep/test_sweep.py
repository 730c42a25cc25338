"""Sweeps by processes: the same bytes however they are run, nothing lost, and each failure told in its cell."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import heard_again
from command_line import run as command
from grids import OFF, HereAndNow, built_in, differing, grid, kept, run, run_here
from tiers import only_in_full

from detdiff.commands import sides
from detdiff.commands import sweep as sweep_command
from detdiff.commands.sweep import SweepArguments, sweep_text, swept
from detdiff.engines.base import Engine
from detdiff.engines.registry import open_engine
from detdiff.errors import CommandError, Interrupted, NotLocal, SweepFolderUnusable
from detdiff.scenario import Scenario
from detdiff.sweep import cells
from detdiff.sweep.cells import RecordTask, SweepFolder, Task, TaskResult, put, run_task
from detdiff.sweep.grid import read_grid
from detdiff.sweep.run import Agenda, only_one

SCHEDULES = 'schedule = ["serial", "static", "static:1"]'


def test_a_cell_that_differs_is_found_and_the_others_are_identical(tmp_path: Path) -> None:
    axes = '"engine.off" = [false, true, "flips"]\nschedule = ["serial", "static"]'
    # That two engines may be compared says nothing of two cells of one.
    found = run(grid(tmp_path, axes, "across_engines = true"), tmp_path / "out")
    assert [(each.name, each.kind, each.origin, each.flips) for each in found.entries] == [
        ("engine.off=false,schedule=static", "identical", "", 0),
        ("engine.off=true,schedule=static", "different", "shift", 0),
        ("engine.off=flips,schedule=static", "different", "shift", 2),
    ]
    assert found.exit_code == 1
    lines = [json.loads(line) for line in (tmp_path / "out/sweep.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["identical", "different", "different"]
    assert (
        lines[2]["axes"] == {"engine.off": "flips", "schedule": "static"}
        and lines[2]["places"][0]["site"] == "shift"
    )
    suite = ElementTree.parse(tmp_path / "out/sweep.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "2", "0")
    assert [len(case) for case in suite] == [0, 1, 1]
    text = sweep_text(found, [], 100)
    assert text.startswith("3 comparisons: 2 different, 1 identical.\n") and "off=false" not in text
    # The command does what is left, which is nothing here, and ends as the summary says.
    again = command("sweep", tmp_path / "grid.toml", "-o", tmp_path / "out", "--json")
    assert again.exit_code == 1, again.output
    told = json.loads(again.stdout)
    assert told["schema"] == "detdiff.sweep/1" and told["pairs"] == lines and told["exit_code"] == 1
    # Answers are what compare writes, and traces are what it takes.
    (tmp_path / "out").joinpath("sweep.html").read_text().index("First origins")
    assert json.loads((tmp_path / "out" / lines[2]["answer"]).read_text())["a"]["trace"].startswith("traces/")


def test_processes_give_the_same_bytes_however_many_and_an_interrupt_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = grid(tmp_path, f'"engine.off" = [false, true]\n{SCHEDULES}')
    run(path, tmp_path / "one", jobs=1)
    steps = 0

    def interrupt(step: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt

    asked = SweepArguments(path, tmp_path / "two", jobs=2)
    with pytest.raises(Interrupted, match=r"of 4 pairs have their answers\. The same command goes on"):
        swept(asked, interrupt)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "two").glob("*/**/*") if file.is_file()}
    assert before and not list((tmp_path / "two").rglob("*.tmp"))
    swept(asked)
    assert differing(tmp_path / "two", tmp_path / "one") == []
    # What was there was not made again.
    assert all(file.stat().st_mtime_ns == when for file, when in before.items() if file.name != "times.jsonl")
    again = (tmp_path / "two/times.jsonl").read_text()
    run(path, tmp_path / "two", jobs=2)
    assert (tmp_path / "two/times.jsonl").read_text() == again


def test_an_answer_that_is_not_whole_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)
    path = grid(tmp_path, '"engine.off" = [true, 1, 2, 3, 4, 5]\nschedule = ["serial", "static"]')
    run(path, tmp_path / "out")
    before = kept(tmp_path / "out")
    answers = {value: tmp_path / f"out/answers/engine.off={value},schedule=static.json" for value in "12345"}
    answers["1"].write_bytes(
        answers["1"].read_bytes().replace(b'"identical": false', b'"identical": true', 1)
    )
    answers["2"].write_bytes(answers["2"].read_bytes()[:-10])
    answers["3"].with_suffix(".sha256").unlink()
    answers["4"].unlink()
    shutil.rmtree(tmp_path / "out/traces/engine.off=4,schedule=static")
    sums = answers["5"].with_suffix(".sha256")
    other = answers["5"].read_bytes().replace(b'"engine.off"', b'"engine.on"')
    answers["5"].write_bytes(other.replace(b'"off": 5', b'"off": 6'))
    sums.write_text(f"{hashlib.sha256(answers['5'].read_bytes()).hexdigest()}  {answers['5'].name}\n")
    times = tmp_path / "out/times.jsonl"
    times.unlink()
    run(path, tmp_path / "out")
    assert kept(tmp_path / "out") == before
    assert [json.loads(line)["task"].partition(" ")[0] for line in times.read_text().splitlines()] == (
        ["compare"] * 4 + ["record", "compare"]
    )


@pytest.mark.thorough
def test_a_worker_that_is_killed_costs_one_cells_work(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = grid(tmp_path, OFF, engine=f"killed_once = {json.dumps(str(marker))}")
    found, notes = swept(SweepArguments(path, tmp_path / "killed", jobs=2))
    assert [each.kind for each in found.entries] == ["identical", "different"] and found.exit_code == 1
    assert len(notes) == 1 and notes[0].startswith("run again, since its worker was lost: record engine.off=")
    run(path, tmp_path / "whole", jobs=2)
    assert differing(tmp_path / "killed", tmp_path / "whole") == []


def test_each_failure_is_told_in_its_cell_and_all_others_finish(tmp_path: Path) -> None:
    axes = (
        'how = {sound = "", killed = "engine.killed=true", missing = "model=missing", same = "engine.off=false"}\n'
        'schedule = ["serial", "static"]'
    )
    path = grid(tmp_path, axes, "along = 'how'\nacross_models = true")
    found = run(path, tmp_path / "out", jobs=2, retries=0)
    kinds = {each.name: each.kind for each in found.entries}
    assert kinds == {
        "how=sound,schedule=static": "identical",
        "how=killed,schedule=static": "failed",
        "how=missing,schedule=static": "failed",
        "how=same,schedule=static": "identical",
        "how=killed,schedule=serial~how": "identical",
        "how=missing,schedule=serial~how": "failed",
        "how=same,schedule=serial~how": "failed",
        "how=killed,schedule=static~how": "failed",
        "how=missing,schedule=static~how": "failed",
        "how=same,schedule=static~how": "failed",
    }
    told = {each.name: each.headline for each in found.entries if each.kind == "failed"}
    assert "ended before it answered: it was killed" in told["how=killed,schedule=static"]
    assert "FileNotFoundError (there is no such model)" in told["how=missing,schedule=static"]
    assert found.exit_code == 2
    failure = json.loads((tmp_path / "out/failures/how=missing,schedule=static.json").read_text())
    assert failure["schema"] == "detdiff.error/1" and failure["error"] == "EngineUnusable"
    suite = ElementTree.parse(tmp_path / "out/sweep.xml").getroot()[0]
    assert (suite.get("errors"), suite.get("failures")) == ("7", "0")
    # Tried again once the cause is gone, they are answers like the others.
    fixed = run(
        grid(
            tmp_path,
            axes.replace("model=missing", "model=found").replace("killed=true", "killed=false"),
            "along = 'how'\nacross_models = true",
        ),
        tmp_path / "out",
        jobs=2,
    )
    assert {each.kind for each in fixed.entries} == {"identical"} and fixed.exit_code == 0
    assert not list((tmp_path / "out/failures").iterdir())


@pytest.mark.thorough
def test_too_little_memory_and_an_engine_that_ends_its_program_are_told_in_their_cells(
    tmp_path: Path,
) -> None:
    hows = (
        '{sound = "", large = "engine.megabytes=3000", leaves = "engine.exits=true", off = "engine.off=true"}'
    )
    path = grid(tmp_path, f'how = {hows}\nschedule = ["serial", "static"]')
    found = run(path, tmp_path / "out", memory_mb=1500)
    assert [each.kind for each in found.entries] == ["identical", "failed", "failed", "different"]
    assert "MemoryError" in found.entries[1].headline
    assert "raised SystemExit (weights.\\udcff), which ends a Python program" in found.entries[2].headline
    assert found.exit_code == 2


def test_a_summary_that_cannot_be_written_is_trouble_and_leaves_none_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    path, out = grid(tmp_path, 'schedule = ["serial", "static"]'), tmp_path / "out"
    assert run(path, out).exit_code == 0
    before = kept(out)

    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".xml":
            raise OSError(errno.ENOSPC, "No space left on device")
        put(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(sweep_command, "put", full)
        found, notes = swept(SweepArguments(path, out))
    assert found.exit_code == 2 and [each.kind for each in found.entries] == ["identical"]
    assert notes == ["sweep.xml could not be written: No space left on device"]
    assert not (out / "sweep.xml").exists() and (out / "sweep.jsonl").exists()
    assert run(path, out).exit_code == 0 and kept(out) == before


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from detdiff.commands import sides
from detdiff.commands.sweep import SweepArguments, swept
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
if __name__ == "__main__":
    found, notes = swept(SweepArguments(Path(sys.argv[1]), Path(sys.argv[2]), jobs=1))
    print([each.kind for each in found.entries], found.entries[-1].headline, notes)
"""


@pytest.mark.thorough
def test_a_disk_that_is_full_is_told_and_room_makes_the_sweep_whole(tmp_path: Path) -> None:
    path = grid(tmp_path, 'schedule = ["serial", "static"]')
    path.write_text(path.read_text().replace("[1, 2]", f"[{','.join(['1'] * 3000)}]"))
    script = tmp_path / "full.py"
    script.write_text(FULL_DISK)
    words = [sys.executable, str(script), str(path), str(tmp_path / "out"), "20000"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("['failed']") and "disk" in ended.stdout
    assert not list((tmp_path / "out/traces").iterdir())
    assert run(path, tmp_path / "out").entries[0].kind == "identical"


@pytest.mark.parametrize("damage", ("lost", "truncated", "changed"))
def test_a_trace_that_is_damaged_is_told_in_its_cell_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Between its recording and its comparison."""
    run_here(monkeypatch)
    shard = tmp_path / "out/traces/engine.off=true,schedule=serial/shard-00000.safetensors"
    done: list[str] = []

    def damaged(step: object) -> None:
        if done or not shard.exists():
            return
        done.append(damage)
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        if damage == "lost":
            shard.unlink()
        else:
            shard.write_bytes(raw if damage == "changed" else raw[:-8])

    asked = SweepArguments(grid(tmp_path, OFF), tmp_path / "out")
    found, _ = swept(asked, damaged)
    assert [each.kind for each in found.entries] == ["identical", "failed"] and done
    said = found.entries[1].headline
    assert "traces/engine.off=true,schedule=serial" in said and "shard-00000" in said, said
    assert str(tmp_path) not in said
    # Its recording is made again, and nothing else.
    times = tmp_path / "out/times.jsonl"
    times.unlink()
    assert [each.kind for each in swept(asked)[0].entries] == ["identical", "different"]
    assert [json.loads(line)["task"] for line in times.read_text().splitlines()] == [
        "record engine.off=true,schedule=serial",
        "compare engine.off=true,schedule=static",
    ]


@pytest.mark.parametrize("when", ("before", "after"))
def test_an_interrupt_while_a_worker_is_told_what_to_do_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """What a worker was to do, or had done, is not counted then, and not waited for."""
    asked: list[str] = []

    class Interrupting(HereAndNow):
        def start(self, task: Task) -> None:
            asked.append(task.name)
            assert len(asked) < 9
            if len(asked) == 3 and when == "before":
                raise KeyboardInterrupt
            super().start(task)

        def finished(self) -> list[tuple[Task, TaskResult | None]]:
            ended = super().finished()
            if len(asked) == 3 and when == "after" and ended:
                raise KeyboardInterrupt
            return ended

    run_here(monkeypatch, Interrupting)
    path = grid(tmp_path, OFF)
    with pytest.raises(Interrupted, match="0 of 2 pairs have their answers"):
        swept(SweepArguments(path, tmp_path / "out"))
    run_here(monkeypatch)
    assert [each.kind for each in swept(SweepArguments(path, tmp_path / "out"))[0].entries] == [
        "identical",
        "different",
    ]


def test_what_is_new_since_the_sweep_before_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)
    first = grid(tmp_path, '"engine.off" = [false, "flips"]\nschedule = ["serial", "static"]')
    run(first, tmp_path / "first", jobs=1)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    path = grid(tmp_path, '"engine.off" = [false, true]\nschedule = ["serial", "static"]')
    found = run(path, tmp_path / "second", against=tmp_path / "first")
    assert [each.since for each in found.entries] == ["same", "new"]
    assert found.gone == ("engine.off=flips,schedule=static",)
    assert found.news == "Since the sweep before: 0 pairs are otherwise, 1 new, 1 gone, 1 the same."
    lines = tmp_path / "first/sweep.jsonl"
    lines.write_text(lines.read_text().replace('"verdict": "identical"', '"verdict": "numerics"'))
    again = run(path, tmp_path / "second", against=tmp_path / "first")
    assert [each.since for each in again.entries] == ["was numerics", "new"]
    with pytest.raises(CommandError, match="holds no sweep.jsonl"):
        run(path, tmp_path / "second", against=tmp_path)
    with pytest.raises(CommandError, match="is the folder of this sweep"):
        run(path, tmp_path / "second", against=tmp_path / "second")


@pytest.mark.thorough
def test_cells_that_share_a_model_load_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def counted(scenario: Scenario) -> Engine:
        loaded.append(scenario.model)
        return open_engine(scenario)

    monkeypatch.setattr(sides, "open_engine", counted)
    monkeypatch.setattr(cells, "_ENGINES", [])
    schedules = ["serial", "static"]
    path = built_in(
        tmp_path, max_tokens=1, schedule=schedules, layout=["packed"], kernels=["native"], prefill_chunk=[8]
    )
    sweep = read_grid(path)
    for name, scenario in sweep.recordings.items():
        assert run_task(RecordTask(name, scenario), tmp_path / "out").failure is None
    assert loaded == ["builtin"]
    # Another model takes its place, and is another load.
    other = sweep.cells[0].scenario.with_changes(model="builtin-draft")
    assert run_task(RecordTask("other", other), tmp_path / "out").failure is None
    assert loaded == ["builtin", "builtin-draft"]


def test_a_worker_takes_cells_of_the_model_that_it_has_open(tmp_path: Path) -> None:
    path = grid(tmp_path, 'model = ["one", "two"]\nschedule = ["serial", "static", "static:1"]')
    sweep = read_grid(path)
    agenda = Agenda.of(sweep, SweepFolder(tmp_path / "out"))
    engines = {task.scenario.model: task.engine for task in agenda.recordings}
    taken = [agenda.next(sweep, engines["two"]) for _ in range(4)]
    assert [task.scenario.model for task in taken if isinstance(task, RecordTask)] == ["two"] * 3 + ["one"]


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    path = grid(tmp_path)
    with (
        only_one(SweepFolder(tmp_path / "out")),
        pytest.raises(SweepFolderUnusable, match="Another sweep runs in"),
    ):
        run(path, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(SweepFolderUnusable, match="cannot be a sweep's folder"):
        run(path, tmp_path / "file")
    with pytest.raises(NotLocal, match="is an address"):
        run(path, Path("s3://bucket/sweep"))


def test_cells_that_are_one_run_are_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)
    axes = 'how = {none = "", same = "max_tokens=1"}\nschedule = ["serial", "static"]'
    found = run(grid(tmp_path, axes, "along = 'how'"), tmp_path / "out")
    assert [each.kind for each in found.entries] == ["identical", "identical", "inconclusive", "inconclusive"]
    assert found.exit_code == 3 and "are the same run" in found.entries[2].headline
    # No origin, no picture, and no heading over none.
    assert "First origins" not in (tmp_path / "out/sweep.html").read_text()


def by_two(path: Path, folder: Path) -> list[str]:
    """The command by two processes."""
    return [sys.executable, *f"-m detdiff.cli sweep {path} -o {folder} --jobs 2".split()]


@pytest.mark.thorough
def test_ctrl_c_twice_ends_the_command_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    path = grid(
        tmp_path,
        f'"engine.off" = [false, true]\n{SCHEDULES}',
        engine=f"sleeps = {json.dumps(str(tmp_path / 'asleep'))}",
    )
    started = subprocess.Popen(
        by_two(path, tmp_path / "out"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heard_again,
    )
    deadline = time.monotonic() + 600
    asleep = tmp_path / "asleep"
    while not (asleep.exists() and asleep.read_text()) and started.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    left = Path(asleep.read_text())
    assert left.is_dir() and left.is_relative_to(tmp_path / "out")
    for _ in range(2):
        os.kill(started.pid, signal.SIGINT)
        time.sleep(0.5)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 2 and "0 of 4 pairs have their answers" in " ".join(said.split()), said
    deadline = time.monotonic() + 60
    while _group_is_there(started.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _group_is_there(started.pid)
    assert not left.exists() and not list((tmp_path / "out").rglob(".*.tmp"))


def test_what_a_killed_sweep_has_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    path, out = grid(tmp_path), tmp_path / "out"
    run(path, out)
    before = kept(out)
    left = [
        out / ".scratch/0/detdiff-explain-1/trace.json",
        out / "traces/.engine.off=true,schedule=static.4321/trace.json",
        out / "answers/.engine.off=true,schedule=static.json.tmp",
        out / "failures/.other.json.tmp",
        out / ".sweep.html.tmp",
    ]
    for each in left:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.touch()
    run(path, out)
    assert not any(each.exists() for each in left) and kept(out) == before
    hidden = [each.name for each in out.rglob(".*")]
    assert hidden == [".lock"]


def _group_is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.thorough
def test_a_model_gives_the_same_bytes_by_two_processes_and_verdicts_are_among_them(tmp_path: Path) -> None:
    pairs = 'verdict = "different"\nbudget = 3'
    path = built_in(tmp_path, pairs, max_tokens=2, schedule=["serial", "static"], prefill_chunk=[4])
    one = run(path, tmp_path / "one", jobs=1)
    assert {each.kind for each in one.entries} - {"identical"} <= {
        "numerics",
        "undetermined",
        "configuration",
    }
    assert any(each.kind != "identical" for each in one.entries)
    run(path, tmp_path / "two", jobs=2)
    assert differing(tmp_path / "two", tmp_path / "one") == []


@only_in_full("64 cells of the built-in model, three times")
def test_64_cells_give_the_same_bytes_by_one_two_and_interrupted_processes(tmp_path: Path) -> None:
    path = built_in(tmp_path, max_tokens=6)
    assert len(read_grid(path).cells) == 64
    run(path, tmp_path / "one", jobs=1)
    run(path, tmp_path / "two", jobs=2)
    assert differing(tmp_path / "two", tmp_path / "one") == []
    started = subprocess.Popen(by_two(path, tmp_path / "cut"), stderr=subprocess.PIPE, start_new_session=True)
    while len(list((tmp_path / "cut/traces").glob("[!.]*"))) < 23 and started.poll() is None:
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    assert 23 <= len(list((tmp_path / "cut/traces").glob("[!.]*"))) < 64
    run(path, tmp_path / "cut", jobs=2)
    assert differing(tmp_path / "cut", tmp_path / "one") == []
