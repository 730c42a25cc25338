"""Whatever happens to a run or to its files: a clear error, or what was finished can be read."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_samples as samples
from tiers import FULL, THOROUGH

from detdiff.errors import ShardMissing, TraceDiskFull, TraceError, TraceWriteError, WriterClosed
from detdiff.trace import Rows, Trace, TraceWriter
from detdiff.trace.files import replace_file

LOGS = ("forwards.jsonl", "texts.jsonl")


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("complete") / "t"
    with TraceWriter(path, samples.HEADER, shard_forwards=1) as writer:
        samples.fill(writer, 3, values=False, lens=False)
        writer.finish()
    return path


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("incomplete") / "t"
    with TraceWriter(path, samples.HEADER, shard_forwards=1) as writer:
        samples.fill(writer, 3, values=False, lens=False)
    return path


def positions(path: Path, partial: bool = True) -> list[int]:
    return Trace.open(path, partial=partial).row_index().position.tolist()


def every_cut(path: Path, work: Path) -> Iterator[tuple[str, int, int]]:
    """Cuts each file of a copy at its ends and at every thirteenth byte, with CI=1 at every third, in full at every one;
    (name, length left, whole length) while it is cut."""
    step = 1 if FULL else 3 if THOROUGH else 13
    shutil.copytree(path, work)
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        for length in range(len(raw)):
            if length % step and 4 < length < len(raw) - 2:
                continue
            (work / file.name).write_bytes(raw[:length])
            yield file.name, length, len(raw)
        (work / file.name).write_bytes(raw)


def looked_at(length: int, whole: int) -> bool:
    """Cuts at which both ways of opening are tried; trying both at every byte would take a minute."""
    return length % 16 == 0 or length < 16 or length == whole - 1


def test_a_complete_trace_cut_at_any_byte(complete: Path, tmp_path: Path) -> None:
    for name, length, whole in every_cut(complete, tmp_path / "t"):
        if name == "trace.json" and length == whole - 1:
            continue  # only the line end after the last brace is gone
        with pytest.raises(TraceError) as caught:
            Trace.open(tmp_path / "t")
        assert name in str(caught.value) and "\n" not in str(caught.value)
        if name.startswith("shard-") and looked_at(length, whole):
            trace = Trace.open(tmp_path / "t", partial=True)
            cut = int(name[6:11])
            assert not trace.complete and len(trace.problems) == 1 and name in trace.problems[0]
            assert trace.row_index().position.tolist() == [p for p in (0, 0, 1, 1, 2, 2) if p != cut]


def test_an_incomplete_trace_cut_at_any_byte(incomplete: Path, tmp_path: Path) -> None:
    """A cut log costs nothing but its half line; shards that name a lost forward are not whole any more."""
    lines = (incomplete / "forwards.jsonl").read_bytes().splitlines(keepends=True)
    ends = np.cumsum([len(line) for line in lines])
    for name, length, whole in every_cut(incomplete, tmp_path / "t"):
        if name == "trace.json":
            if length < whole - 1:
                with pytest.raises(TraceError, match=r"trace\.json"):
                    Trace.open(tmp_path / "t")
            continue
        trace = Trace.open(tmp_path / "t", partial=True)
        assert not trace.complete and "was not finished" in trace.problems[0]
        kept = range(3)
        if name == "forwards.jsonl":
            kept = range(max(0, int((ends <= length).sum()) - 1))
            assert len(trace.forwards()) == len(kept)
        elif name == "texts.jsonl":
            assert len(trace.texts()) <= 4
        else:
            kept = [number for number in range(3) if number != int(name[6:11])]
        assert trace.row_index().position.tolist() == [number for number in kept for _ in range(2)]
        if not looked_at(length, whole):
            continue
        if len(kept) == 3:
            assert Trace.open(tmp_path / "t").problems == trace.problems
        else:
            with pytest.raises(TraceError, match=r"(shard-|forward )"):
                Trace.open(tmp_path / "t")


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_deleted_shard(gone: int, complete: Path, incomplete: Path, tmp_path: Path) -> None:
    name = f"shard-{gone:05d}.safetensors"
    for source in (complete, incomplete):
        path = tmp_path / source.parent.name
        shutil.copytree(source, path)
        (path / name).unlink()
        left = [number for number in range(3) if number != gone for _ in range(2)]
        if source is incomplete and gone == 2:
            assert positions(path, partial=False) == left  # it may never have been written
            continue
        with pytest.raises(ShardMissing, match=name):
            Trace.open(path)
        assert positions(path) == left
        assert any(name in problem for problem in Trace.open(path, partial=True).problems)


def dev_full(path: Path, name: str) -> None:
    """The next file of that name is written to a device that is always full."""
    (path / f".{name}.tmp").symlink_to("/dev/full")


needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@needs_dev_full
@pytest.mark.parametrize("full", [0, 1, 2])
def test_a_full_disk_leaves_the_finished_shards(full: int, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with (
        pytest.raises(TraceDiskFull) as caught,
        TraceWriter(path, samples.HEADER, shard_forwards=1) as writer,
    ):
        dev_full(path, f"shard-{full:05d}.safetensors")
        samples.fill(writer, 5)
    text = str(caught.value)
    assert f"shard-{full:05d}" in text and f"{full} shards finished" in text and "\n" not in text
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    trace = Trace.open(path)
    assert not trace.complete
    assert samples.read_all(trace) == 2 * full
    assert not list(path.glob(".*"))
    with pytest.raises(WriterClosed):
        writer.finish()


@needs_dev_full
def test_a_full_disk_at_the_very_end(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(TraceDiskFull, match=r"trace\.json"), TraceWriter(path, samples.HEADER) as writer:
        samples.fill(writer, 3)
        dev_full(path, "trace.json")
        writer.finish()
    trace = Trace.open(path)
    assert not trace.complete and samples.read_all(trace) == 6


def test_a_log_that_may_not_grow(tmp_path: Path) -> None:
    """The system's own limit on file sizes, set above the shards so that it strikes a log in mid-line."""
    path = tmp_path / "t"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 6000
    writer = TraceWriter(path, samples.HEADER, shard_forwards=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(TraceDiskFull, match=r"forwards\.jsonl"), writer:
            samples.fill(writer, 100, values=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (path / "forwards.jsonl").stat().st_size == limit
    trace = Trace.open(path)
    assert not trace.complete
    assert samples.read_all(trace) == 2 * len(trace.shards) > 10


def test_a_directory_that_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(TraceWriteError), TraceWriter(path, samples.HEADER, shard_forwards=1) as writer:
        samples.fill(writer, 2)
        shutil.rmtree(path)
        samples_forward(writer, 2)
        writer.finish()


def samples_forward(writer: TraceWriter, number: int) -> None:
    writer.forward(samples.forward_line(number, 0))
    writer.rows(samples.batch(number))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_exception_saves_what_is_buffered_and_goes_on(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "t"

    def stop(number: int) -> None:
        if number == 3:
            raise error("the run")

    with pytest.raises(error, match="the run"), TraceWriter(path, samples.HEADER, shard_forwards=2) as writer:
        samples.fill(writer, 9, after=stop)
    trace = Trace.open(path)
    assert not trace.complete
    assert trace.row_index().position.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert samples.read_all(trace) == 8


@needs_dev_full
def test_a_failing_abort_does_not_hide_the_exception(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(RuntimeError, match="the run"), TraceWriter(path, samples.HEADER) as writer:
        samples.fill(writer, 2)
        dev_full(path, "shard-00000.safetensors")
        raise RuntimeError("the run")
    assert samples.read_all(Trace.open(path)) == 0


def test_a_block_left_without_finish_is_incomplete(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", samples.HEADER) as writer:
        samples.fill(writer, 2)
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete and samples.read_all(trace) == 4


class Interrupt:
    """Raises KeyboardInterrupt in the n-th system call of a kind, before or after it took effect."""

    def __init__(self, call: Callable[..., Any], at: int, before: bool) -> None:
        self.call, self.left, self.before = call, at, before

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.left -= 1
        if self.left == 0 and self.before:
            raise KeyboardInterrupt
        result = self.call(*args, **keywords)
        if self.left == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_while_a_shard_is_written(
    name: str, before: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """At no point does an interrupt lose rows, store them twice or tear a line."""
    seen = 0
    for at in range(1, 40):
        path = tmp_path / f"{at}"
        writer = TraceWriter(path, samples.HEADER, shard_forwards=2)
        written: list[int] = []
        with monkeypatch.context() as patch:
            interrupt = Interrupt(getattr(os, name), at, before)
            patch.setattr(os, name, interrupt)
            try:
                with writer:
                    samples.fill(writer, 6, after=written.append)
                    writer.finish()
            except KeyboardInterrupt:
                seen += 1
        trace = Trace.open(path)
        expected = [number for number in written for _ in range(2)]
        assert trace.row_index().position.tolist() == expected
        assert samples.read_all(trace) == len(expected)
        assert trace.complete == (interrupt.left > 0) or len(written) == 6
        if interrupt.left > 0:
            break
    else:
        pytest.fail("the run never got to its end")
    assert seen == at - 1 >= 4


def test_a_half_written_file_never_has_the_real_name(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "f", chunks())
    assert (tmp_path / "f").read_bytes() == b"old"


CHILD = """
import sys, itertools
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import trace_samples as samples
from detdiff.trace import TraceWriter
with TraceWriter(Path(sys.argv[1]), samples.HEADER, shard_forwards=1) as writer:
    samples.fill(writer, 10**9, after=lambda number: print(number, flush=True))
"""


def test_a_killed_run_leaves_its_finished_shards(tmp_path: Path) -> None:
    path = tmp_path / "t"
    command = [sys.executable, "-c", CHILD, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == 20:
                break
        child.send_signal(signal.SIGKILL)
    trace = Trace.open(path)
    assert not trace.complete and len(trace.shards) >= 20
    assert trace.row_index().position.tolist() == [n for n in range(len(trace.shards)) for _ in range(2)]
    assert samples.read_all(trace) == 2 * len(trace.shards)


def test_a_rogue_file_name_does_not_cost_memory(incomplete: Path, tmp_path: Path) -> None:
    shutil.copytree(incomplete, tmp_path / "t")
    shutil.copy(incomplete / "shard-00002.safetensors", tmp_path / "t" / "shard-999999999.safetensors")
    with pytest.raises(ShardMissing, match="shard-00003"):
        Trace.open(tmp_path / "t")
    assert len(Trace.open(tmp_path / "t", partial=True).problems) == 3


def test_a_batch_too_large_for_a_shard_is_one_shard(tmp_path: Path) -> None:
    count = np.zeros(1000, np.int32)
    with TraceWriter(tmp_path / "t", samples.HEADER, shard_bytes=1000) as writer:
        writer.forward(samples.forward_line(0, writer.plan(samples.CALLS)))
        digests = np.arange(7000, dtype=np.uint64).reshape(1000, 7)
        writer.rows(Rows(count, count, count, count, count, count, samples.FULL, digests))
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert len(trace.shards) == 1 and np.array_equal(trace.fetch(0, 0), digests)
