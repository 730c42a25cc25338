"""Traces at addresses of fsspec: the same bytes as on a disk, and nothing damaged that is not refused by name."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_samples as samples
from stores import memory_store

from detdiff.compare import compare
from detdiff.errors import (
    ChecksumError,
    LogMissing,
    LogSizeError,
    NotATrace,
    ShardMissing,
    ShardSizeError,
    StoreUnusable,
    TraceError,
    TraceExists,
    TraceReadError,
    TraceWriteError,
)
from detdiff.trace import Address, Trace, TraceWriter, place

SHARD, LOG = "shard-00001.safetensors", "forwards.jsonl"


def at(address: str, name: str = "") -> Address:
    found = place(address)
    assert isinstance(found, Address)
    return found / name if name else found


def objects(address: str) -> dict[str, bytes]:
    folder = at(address).fresh()
    return {name: (folder / name).read_bytes() for name in folder.sizes()}


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_trace_at_an_address_has_the_bytes_of_one_on_a_disk(store: str, tmp_path: Path) -> None:
    samples.write_sample(tmp_path / "t")
    samples.write_sample(f"{store}/t")
    assert objects(f"{store}/t") == files(tmp_path / "t")
    trace, local = Trace.open(f"{store}/t", checked=True), Trace.open(tmp_path / "t")
    assert trace.complete and str(trace.path) == f"{store}/t"
    assert samples.read_all(trace) == samples.read_all(local)
    rows = np.array([7, 0, 6])
    assert np.array_equal(trace.digests(rows), local.digests(rows))
    assert compare(f"{store}/t", tmp_path / "t").identical


def test_another_digest_at_an_address_is_found_where_it_is(store: str, tmp_path: Path) -> None:
    local = samples.write_sample(tmp_path / "t")
    samples.set_element(local, "digest/0", 1, 99, index=1)
    for name, raw in files(local).items():
        at(f"{store}/b", name).put([raw])
    samples.write_sample(f"{store}/a")
    found = compare(f"{store}/a", f"{store}/b")
    assert not found.identical
    origins = [(r.id, r.origin.site, r.origin.position) for r in found.requests if r.origin is not None]
    assert origins == [("a", "embed_tokens", 3)]


def truncated(folder: Address, name: str) -> None:
    (folder / name).put([(folder / name).read_bytes()[:-8]])


def changed(folder: Address, name: str) -> None:
    raw = bytearray((folder / name).read_bytes())
    raw[-3] ^= 1
    (folder / name).put([bytes(raw)])


def lost(folder: Address, name: str) -> None:
    (folder / name).remove()


DAMAGES: dict[str, tuple[Callable[[Address, str], None], str, type[TraceError]]] = {
    "a truncated shard": (truncated, SHARD, ShardSizeError),
    "a truncated log": (truncated, LOG, LogSizeError),
    "a changed shard": (changed, SHARD, ChecksumError),
    "a changed log": (changed, LOG, ChecksumError),
    "a lost shard": (lost, SHARD, ShardMissing),
    "a lost log": (lost, LOG, LogMissing),
    "a lost header": (lost, "trace.json", NotATrace),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_refused_by_name_before_there_is_an_answer(damage: str, store: str) -> None:
    injure, name, expected = DAMAGES[damage]
    if store.startswith("s3:") and name != SHARD:
        store = memory_store()  # the store's own part is the same for every object
    samples.write_sample(f"{store}/a")
    samples.write_sample(f"{store}/b")
    assert compare(f"{store}/a", f"{store}/b").identical
    injure(at(f"{store}/b"), name)
    with pytest.raises(TraceError) as caught:
        compare(f"{store}/a", f"{store}/b")
    assert type(caught.value) is expected and samples.one_paragraph(caught.value)
    assert (f"{store}/b" if name == "trace.json" else f"{store}/b/{name}") in str(caught.value)
    if name == SHARD:
        # What is left can be read, and says what is not.
        left = Trace.open(f"{store}/b", partial=True, checked=True)
        assert not left.complete and name in left.problems[0]
        assert left.row_index().position.tolist() == [0, 0, 1, 1, 4, 4]


class Cut(Exception):
    """The process that records is gone."""


def test_a_run_that_ends_in_the_middle_is_incomplete_and_readable(store: str) -> None:
    writer = TraceWriter(f"{store}/t", samples.HEADER, shard_forwards=2)

    def killed(number: int) -> None:
        if number == 4:
            raise Cut

    with pytest.raises(Cut):
        samples.fill(writer, 6, after=killed)
    # Nothing more is written, as after kill -9: two whole shards are there, and what their rows are of.
    trace = Trace.open(f"{store}/t", checked=True)
    assert not trace.complete and f"{store}/t was not finished" in trace.problems[0]
    assert samples.read_all(trace) == 8 and len(trace.forwards()) == 4
    assert set(at(f"{store}/t").sizes()) == {
        "trace.json",
        *(f"{log}-0000{part}.jsonl" for log in ("forwards", "texts") for part in (0, 1, 2)),
        *(f"shard-0000{shard}.safetensors" for shard in (0, 1)),
    }


def test_an_interrupted_trace_copied_to_a_disk_reads_the_same(tmp_path: Path) -> None:
    address = f"{memory_store()}/t"
    with pytest.raises(Cut), TraceWriter(address, samples.HEADER, shard_forwards=2) as writer:
        samples.fill(writer, 3)
        raise Cut
    (tmp_path / "t").mkdir()
    for name, raw in objects(address).items():
        (tmp_path / "t" / name).write_bytes(raw)
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete and samples.read_all(trace) == 6
    assert compare(tmp_path / "t", address).compared.rows == 6


@pytest.mark.parametrize("when", range(9))
def test_an_upload_that_fails_is_named_and_leaves_what_was_whole(
    when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    address, done = f"{memory_store()}/t", []
    whole = MemoryFileSystem.pipe_file

    def failing(self: Any, path: str, value: bytes, **more: Any) -> None:
        if len(done) == when + 5:
            raise ConnectionError("the connection was reset")
        done.append(path)
        whole(self, path, value, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", failing)
    refused = None
    try:
        with TraceWriter(address, samples.HEADER, shard_forwards=2) as writer:
            samples.fill(writer, 6)
            writer.finish()
    except TraceWriteError as error:
        refused = error
    monkeypatch.undo()
    trace = Trace.open(address)
    if refused is None:
        assert trace.complete
        return
    assert address in str(refused) and "connection was reset" in str(refused)
    assert samples.one_paragraph(refused)
    whole_shards = sum("shard-" in path for path in done)
    assert not trace.complete and f"The {whole_shards} shards" in str(refused)
    assert samples.read_all(trace) == 4 * whole_shards


def test_what_is_there_is_not_written_over(store: str) -> None:
    samples.write_sample(f"{store}/t")
    before = objects(f"{store}/t")
    with pytest.raises(TraceExists, match="exists"):
        samples.write_sample(f"{store}/t")
    assert objects(f"{store}/t") == before


def test_of_two_recordings_that_begin_together_one_goes_on(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TraceWriter(f"{store}/t", samples.HEADER)
    monkeypatch.setattr("detdiff.trace.writer.is_taken", lambda path: False)
    with pytest.raises(TraceExists, match="another recording"):
        TraceWriter(f"{store}/t", samples.HEADER)
    samples.fill(first, 1)
    first.finish()
    assert Trace.open(f"{store}/t", checked=True).complete


def test_a_zip_file_of_traces_is_read_where_it_is(tmp_path: Path, store: str) -> None:
    local = samples.write_sample(tmp_path / "t")
    with zipfile.ZipFile(tmp_path / "pack.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for file in local.iterdir():
            made.write(file, f"a/{file.name}")
    at(f"{store}", "pack.zip").put([(tmp_path / "pack.zip").read_bytes()])
    for address in (f"zip://a::{tmp_path / 'pack.zip'}", f"zip://a::{store}/pack.zip"):
        trace = Trace.open(address, checked=True)
        assert samples.read_all(trace) == 10 and str(trace.path) == address
        assert compare(address, local).identical
    with pytest.raises(TraceWriteError):
        samples.write_sample(f"zip://b::{tmp_path / 'pack.zip'}")


def test_an_address_of_nothing_says_what_was_expected(store: str) -> None:
    with pytest.raises(NotATrace, match="is not a trace"):
        Trace.open(f"{store}/nothing")


@pytest.mark.parametrize("address", ("nosuch://a/b", "zip://a::/nowhere/pack.zip"))
def test_an_address_that_nobody_knows_is_refused_in_a_paragraph(address: str) -> None:
    with pytest.raises(StoreUnusable) as caught:
        Trace.open(address)
    assert address in str(caught.value) and samples.one_paragraph(caught.value)


def test_a_store_whose_library_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.core

    def missing(text: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(StoreUnusable, match=r"pip install 'detdiff\[s3\]'"):
        Trace.open("s3://bucket/t")


def test_a_refused_read_is_not_told_as_a_missing_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    address = f"{memory_store()}/t"
    samples.write_sample(address)

    def refused(self: Any, path: str, **more: Any) -> Any:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(MemoryFileSystem, "info", refused)
    with pytest.raises(TraceReadError, match=r"trace\.json cannot be read \(Forbidden\)"):
        Trace.open(address)


def test_only_what_is_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened without checksums, a trace of large shards costs their ends; digests cost their blocks."""
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr("detdiff.trace.store.BLOCK_BYTES", 4096)
    address, read = f"{memory_store()}/t", []
    with TraceWriter(address, samples.HEADER, shard_forwards=1000) as writer:
        samples.fill(writer, 400, values=False, lens=False)
        writer.finish()
    whole = MemoryFileSystem.cat_file

    def counted(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        found = whole(self, path, start=start, end=end, **more)
        read.append((path.rpartition("/")[2], len(found)))
        return found

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    trace = Trace.open(address)
    size = trace.shards[0].bytes
    opened = sum(count for name, count in read if name.startswith("shard-"))
    digests = sum(t.nbytes for name, t in trace.shards[0].tensors.items() if name.startswith("digest/"))
    assert opened <= size - digests + 5 * 4096
    read.clear()
    trace.digests(np.array([403, 402]))
    assert 0 < sum(count for _, count in read) <= 4 * 4096


@pytest.mark.parametrize(
    ("given", "name", "below"),
    (
        ("s3://bucket/x/", "s3://bucket/x", "s3://bucket/x/a"),
        ("memory://x", "memory://x", "memory://x/a"),
        ("zip://::p.zip", "zip://::p.zip", "zip://a::p.zip"),
        ("zip://b::s3://c/p.zip", "zip://b::s3://c/p.zip", "zip://b/a::s3://c/p.zip"),
    ),
)
def test_names_of_addresses(given: str, name: str, below: str) -> None:
    found = place(given)
    assert (str(found), str(found / "a"), (found / "a").name) == (name, below, "a")


@pytest.mark.parametrize("given", ("t", "/t", "C:/t", "file:///t", "t.zip"))
def test_local_paths_stay_local(given: str) -> None:
    assert place(given) == Path(given.removeprefix("file://"))
