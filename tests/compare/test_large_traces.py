"""Memory that grows with a trace: what is kept of a row, whatever the number of sites and requests."""

from __future__ import annotations

import os
import shutil
import sys
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from detdiff.compare import compare, digests, series
from detdiff.compare.ladder import align, scan
from detdiff.compare.series import DRAWN, OTHERS
from detdiff.errors import ShardSizeError
from detdiff.report.build import build
from detdiff.report.html import LARGEST, html
from detdiff.trace import Trace, TraceWriter
from detdiff.trace.contents import TokenIndices
from detdiff.trace.files import FileReader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import compare as benchmark  # noqa: E402
from benchmarks.compare import Workload, write  # noqa: E402

REQUESTS = 104
LOAD = Workload(requests=REQUESTS, prompt=4, tokens=9, chunk=4, together=8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """More requests than are drawn, of which every fourth differs and two flip."""
    folder = tmp_path_factory.mktemp("large")
    write(folder / "a", "identical", LOAD)
    write(folder / "b", "some", LOAD)
    return folder / "a", folder / "b"


def test_what_matters_of_many_requests_is_drawn_and_the_page_says_what_is_not(
    pair: tuple[Path, Path],
) -> None:
    traces = Trace.open(pair[0]), Trace.open(pair[1])
    found = compare(*traces)
    assert sum(not request.identical for request in found.requests) == REQUESTS // 4
    drawn = series(*traces, found)
    ids = [request.id for request in drawn.requests]
    assert len(ids) == DRAWN and {f"r{n}" for n in range(3, REQUESTS, 4)} < set(ids)
    assert ids == [request.id for request in found.requests if request.id in ids]
    # In a batch of eight those that are not drawn are one member, and no row is lost.
    last = drawn.a[-1].members
    assert sum(member.rows for member in last) == 8 and last[-1].request == OTHERS
    page = html(build(found, None, drawn, ""))
    assert f"Drawn are {DRAWN} of {REQUESTS} requests" in page and len(page.encode()) <= LARGEST


def test_rows_are_in_memory_once(pair: tuple[Path, Path]) -> None:
    """Of a shard's own copy and the whole trace's one is enough."""
    trace = Trace.open(pair[0])
    whole = trace.row_index()
    for shard in trace.shards:
        assert all(np.shares_memory(getattr(shard.rows, name), each) for name, each in vars(whole).items())
    assert sum(len(shard.rows.row) for shard in trace.shards) == len(whole.row)


@pytest.mark.parametrize("long", (1, 16, 1 << 30), ids=("strips", "either", "gathered"))
@pytest.mark.parametrize("together", ((6, 24), (24, 6), (24, 1), (1, 6)))
def test_digests_are_compared_row_by_row_whatever_lies_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: tuple[int, int], long: int
) -> None:
    """Against rows read by their places. A flip leaves gaps in both runs."""
    load = Workload(requests=24, prompt=5, tokens=20, chunk=5, together=1)
    monkeypatch.setattr(digests, "_LONG", long)
    # Several parts and several shards, of rows of 2 kB.
    monkeypatch.setattr(digests, "_NEAR_BYTES", 20_000)
    monkeypatch.setattr(digests, "_FAR_BYTES", 500_000)
    monkeypatch.setattr(benchmark, "TraceWriter", partial(TraceWriter, shard_bytes=700_000))
    for name, case, count in zip("ab", ("identical", "some"), together, strict=True):
        write(tmp_path / name, case, replace(load, together=count))
    a, b = (Trace.open(tmp_path / name) for name in "ab")
    assert len(a.shards) > 2
    aligned = align(a, b)
    blocks = list(digests.Scanner(a, b, aligned.ports, aligned.pairs).blocks())
    places = np.concatenate([block.rows for block in blocks])
    assert np.array_equal(np.sort(places), np.arange(len(aligned.pairs))) and len(blocks) > 2
    seen = 0
    for block in blocks:
        expected = a.digests(aligned.pairs.a[block.rows]) != b.digests(aligned.pairs.b[block.rows])
        assert np.array_equal(block.differ, expected)
        seen += int(expected.any(axis=1).sum())
    assert 0 < seen < len(places) and aligned.pairs.after_flip_a > 0


def test_a_shard_that_shrinks_while_it_is_compared_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Its healthy twin is what is drawn of the same pair."""
    shutil.copytree(pair[1], tmp_path / "b")
    aligned = align(Trace.open(pair[0]), Trace.open(tmp_path / "b"))
    last = aligned.runs.b.shards[-1].path
    assert isinstance(last, Path)
    os.truncate(last, last.stat().st_size // 2)
    with pytest.raises(ShardSizeError, match=rf"{last.name} ends at byte"):
        scan(aligned)


def test_files_that_were_read_last_stay_open_and_no_more(tmp_path: Path) -> None:
    paths = [tmp_path / str(n) for n in range(5)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]) * 16)
    reader, out = FileReader(kept=2), np.zeros(4, np.uint8)
    for n in (0, 1, 0, 2, 3, 4, 1, 1, 0):
        reader.fill(paths[n], 3, out)
        assert out.tolist() == [n] * 4 and len(reader._files) <= 2
    reader.close()
    assert not reader._files
    reader.fill(paths[2], 0, out)
    assert out.tolist() == [2] * 4
    reader.close()


def test_memory_of_recording_does_not_grow_with_tokens() -> None:
    """A set of all tokens took 200 bytes for each."""
    count = 100_000
    tracemalloc.start()
    try:
        known = TokenIndices()
        for start in range(0, count, 1000):
            assert known.add(np.zeros(1000, np.int32), np.arange(start, start + 1000, dtype=np.int32)) is None
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 50_000


def test_tokens_that_come_again_are_found_in_any_order() -> None:
    def add(known: TokenIndices, *pairs: tuple[int, int]) -> tuple[int, int] | None:
        requests, indices = np.array(pairs, np.int32).T
        return known.add(requests, indices)

    known = TokenIndices()
    assert add(known, (1, 0), (0, 0), (0, 1)) is None
    assert add(known, (0, 4), (1, 1), (0, 3)) is None
    assert add(known, (0, 3)) == (0, 3) and add(known, (1, 0)) == (1, 0)
    assert add(known, (2, 7), (2, 7)) == (2, 7)
    # What was refused was not added.
    assert add(known, (2, 7), (0, 2)) is None
    assert add(known, (0, 2)) == (0, 2) and add(known, (0, 5)) is None and add(known, (0, 4)) == (0, 4)
