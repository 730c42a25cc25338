from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import trace_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from detdiff.trace import (
    Generated,
    Lens,
    Rows,
    Site,
    Trace,
    TraceWriter,
    Value,
    flat_row,
    format_ranges,
    parse_ranges,
    ports_of,
)
from detdiff.trace.digest import STORAGE

PORTS = 6
SITES = tuple(Site(f"s{i}", "linear", i, ("in",), ("out",)) for i in range(PORTS // 2))


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, ...]:
    """Tables whose columns are numbered by first use, with absent ports."""
    groups = draw(
        st.lists(st.integers(-1, PORTS - 1), min_size=PORTS, max_size=PORTS).filter(lambda g: max(g) >= 0)
    )
    order = {group: i for i, group in enumerate(dict.fromkeys(g for g in groups if g >= 0))}
    return tuple(order.get(group, -1) for group in groups)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[Rows, Generated | None]]:
    """One batch a forward: several tables, values of four dtypes, tokens with or without lens."""
    known = draw(st.lists(tables(), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lens = draw(st.booleans())
    found = []
    for forward in range(draw(st.integers(1, 7))):
        count = draw(st.integers(0, 3))
        table = draw(st.sampled_from(known))
        ints = rng.integers(0, 2, (3, count), dtype=np.int32)
        values = {}
        for column in range(max(table) + 1):
            dtype = draw(st.sampled_from(["", "F32", "BF16", "F16", "U32"]))
            rows = np.flatnonzero(rng.integers(0, 2, count))
            if dtype:
                width = draw(st.sampled_from([(2,), (1, 3), ()]))
                raw = rng.integers(0, 256, (len(rows), *width, STORAGE[dtype].itemsize), dtype=np.uint8)
                values[column] = Value(rows, raw.view(STORAGE[dtype])[..., 0], dtype)
        digests = rng.integers(0, 2**64, (count, max(table) + 1), dtype=np.uint64)
        same = np.full(count, forward, np.int32)
        rows_ = Rows(ints[0], same, same, ints[1], ints[2], same, table, digests, values)
        top = np.sort(rng.standard_normal((1, 2)).astype(np.float32))[:, ::-1]
        ids = rng.integers(0, 9, (1, 2)).astype(np.int32)
        layers = Lens(ids[:, None].repeat(3, 1), top[:, None].repeat(3, 1), top[:, None].repeat(3, 1))
        one = np.array([forward], np.int32)
        token = Generated(one * 0, one, ids[:, 0], one, one, ids, top, layers if lens else None)
        found.append((rows_, token if draw(st.booleans()) else None))
    return found


def write(
    path: Path, given_batches: list[tuple[Rows, Generated | None]], shard_bytes: int, **times: Any
) -> None:
    header = {**samples.HEADER, "sites": SITES}
    with TraceWriter(path, header, shard_bytes=shard_bytes) as writer:
        for number, (rows, token) in enumerate(given_batches):
            plan = writer.plan([{"path": f"pad:{number % 2 + 1}", "sites": "0-2"}])
            writer.forward(samples.forward_line(number, plan))
            writer.rows(rows)
            if token is not None:
                writer.generated(token)
            writer.text(number, f"t{number}")
        writer.finish(times=times)


@settings(max_examples=examples(60), deadline=None)
@given(batches(), st.sampled_from([1, 200, 1 << 20]))
def test_what_is_written_is_read(
    given_batches: list[tuple[Rows, Generated | None]], shard_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        write(path, given_batches, shard_bytes)
        trace = Trace.open(path)
        assert trace.complete and not trace.problems and trace.sites == SITES
        assert samples.read_all(trace) == sum(len(rows.request) for rows, _ in given_batches)
        index, place = trace.row_index(), 0
        for rows, _ in given_batches:
            here = slice(place, place + len(rows.request))
            place = here.stop
            for name in ("request", "position", "forward", "slot", "phase", "token"):
                assert np.array_equal(getattr(index, name)[here], getattr(rows, name))
            if not len(rows.request):
                continue
            table = int(index.table[here.start])
            assert tuple(trace.tables[table].tolist()) == rows.table
            assert np.array_equal(trace.digests(np.arange(here.start, here.stop)), rows.digests)
            assert_values(trace, here, table, rows)
        assert_tokens(trace, [token for _, token in given_batches if token is not None])
        assert len(trace.forwards()) == len(given_batches)
        assert [forward["calls"][0]["path"] for forward in trace.forwards()] == [
            f"pad:{number % 2 + 1}" for number in range(len(given_batches))
        ]
        assert trace.texts() == {number: f"t{number}" for number in range(len(given_batches))}


def assert_values(trace: Trace, here: slice, table: int, rows: Rows) -> None:
    index = trace.row_index()
    shard = trace.shard(int(index.shard[here.start]))
    first = int(index.row[here.start])
    for column in range(max(rows.table) + 1):
        given_value = rows.values.get(column)
        kept = given_value.rows.tolist() if given_value is not None else []
        for row in range(len(rows.request)):
            found = shard.value_at(table, column, first + row)
            assert (found is not None) == (row in kept)
            if found is not None and given_value is not None:
                data = given_value.data[kept.index(row)]
                assert found.tobytes() == data.tobytes() and found.shape == data.shape
                whole = shard.values(table, column)
                assert whole is not None and whole.dtype == given_value.dtype
                assert whole.data[whole.rows.tolist().index(first + row)].tobytes() == data.tobytes()


def assert_tokens(trace: Trace, given_tokens: list[Generated]) -> None:
    found = trace.generated()
    assert len(found.token) == len(given_tokens)
    assert trace.generated(lens=False).lens is None
    if not given_tokens:
        return
    for name in ("request", "index", "token", "forward", "position", "top_ids", "top_logits"):
        expected = np.concatenate([getattr(token, name) for token in given_tokens])
        assert np.array_equal(getattr(found, name), expected)
    assert (found.lens is None) == (given_tokens[0].lens is None)
    if found.lens is not None:
        for name in ("top_ids", "top_logits", "contested"):
            expected = np.concatenate([getattr(token.lens, name) for token in given_tokens])
            assert np.array_equal(getattr(found.lens, name), expected)


@settings(max_examples=examples(15), deadline=None)
@given(batches(), st.sampled_from([1, 300]))
def test_the_same_input_gives_the_same_bytes(
    given_batches: list[tuple[Rows, Generated | None]], shard_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "a", Path(folder) / "b"
        write(first, given_batches, shard_bytes, seconds=1.5)
        write(second, given_batches, shard_bytes, seconds=2.5)
        names = sorted(file.name for file in first.iterdir())
        assert names == sorted(file.name for file in second.iterdir())
        for name in names:
            a, b = (first / name).read_bytes(), (second / name).read_bytes()
            if name == "trace.json":
                assert a != b
                b = b.replace(b'"seconds":2.5', b'"seconds":1.5')
            assert a == b


def test_a_injected_difference_changes_exactly_one_digest(tmp_path: Path) -> None:
    """The twin of the two tests above: they would not pass on a writer that drops or mixes rows up."""
    samples.write_sample(tmp_path / "a")
    with TraceWriter(tmp_path / "b", samples.HEADER, shard_forwards=2) as writer:
        for number in range(5):
            writer.forward(samples.forward_line(number, writer.plan(samples.CALLS)))
            rows = samples.batch(number, samples.SHORT if number % 3 == 2 else samples.FULL)
            if number == 3:
                rows.digests[1, 4] ^= np.uint64(1)
            writer.rows(rows)
        writer.finish()
    a, b = Trace.open(tmp_path / "a"), Trace.open(tmp_path / "b")
    places = np.arange(len(a.row_index().row))
    for table in a.tables:
        rows = places[a.row_index().table == table]
        different = np.argwhere(a.digests(rows) != b.digests(rows))
        found = [(int(rows[row]), int(column)) for row, column in different]
        assert found == ([(7, 4)] if a.tables[table].max() == 6 else [])


def test_a_shard_is_a_standard_safetensors_file(tmp_path: Path) -> None:
    path = samples.write_sample(tmp_path / "t", forwards=7)
    trace = Trace.open(path)
    assert len(trace.shards) == 4
    for shard in trace.shards:
        header, _ = samples.split_shard(path, int(shard.path.stem[-5:]))
        assert "__metadata__" not in header
        with safetensors.safe_open(shard.path, framework="numpy") as file:
            assert set(file.keys()) == set(shard.tensors)
            for name in file.keys():
                if header[name]["dtype"] == "BF16":
                    continue
                tensor = file.get_tensor(name)
                assert tensor.shape == shard.tensors[name].shape
                if name.startswith("digest/"):
                    assert np.array_equal(tensor, shard.digests(int(name[7:])))
                if name == "row.position":
                    assert np.array_equal(tensor, shard.rows.position)


def test_shards_hold_aligned_tensors_and_no_padding(tmp_path: Path) -> None:
    path = samples.write_sample(tmp_path / "t")
    for shard in Trace.open(path).shards:
        end = 0
        for tensor in sorted(shard.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            assert tensor.offset % STORAGE[tensor.dtype].itemsize == 0
            end = tensor.offset + tensor.nbytes
        assert end == shard.path.stat().st_size


def test_stock_writers_shards_are_accepted(tmp_path: Path) -> None:
    """Tensors in another order, as another safetensors writer lays them out, mean the same."""
    path = samples.write_sample(tmp_path / "t")
    with TraceWriter(tmp_path / "u", samples.HEADER, shard_forwards=2) as writer:
        samples.fill(writer, 5, values=False)
        writer.finish()
    path = tmp_path / "u"
    before = Trace.open(path).row_index()
    for shard in Trace.open(path).shards:
        tensors = safetensors.numpy.load_file(shard.path)
        safetensors.numpy.save_file(dict(reversed(tensors.items())), shard.path)
    samples.reseal(path)
    assert np.array_equal(Trace.open(path).row_index().position, before.position)
    assert samples.read_all(Trace.open(path)) == 10


def test_the_writer_keeps_no_reference_to_the_callers_arrays(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", samples.HEADER) as writer:
        writer.forward(samples.forward_line(0, writer.plan(samples.CALLS)))
        rows = samples.batch(0)
        expected = rows.digests.copy()
        writer.rows(rows)
        rows.digests[:] = 0
        rows.position[:] = 0
        rows.values[0].data[:] = 0
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert np.array_equal(trace.fetch(0, 0), expected)
    value = trace.shard(0).values(0, 0)
    assert value is not None and (value.data == 0x3F80).all()


def test_values_that_change_their_form_start_a_new_shard(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", samples.HEADER) as writer:
        for number, dtype in enumerate([np.float32, np.float32, np.float16]):
            writer.forward(samples.forward_line(number, writer.plan(samples.CALLS)))
            rows = samples.batch(number, values=False)
            name = "F32" if dtype is np.float32 else "F16"
            value = Value(np.array([1]), np.ones((1, 3), dtype), name)
            writer.rows(replace(rows, values={2: value}))
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert [len(shard.rows.row) for shard in trace.shards] == [4, 2]
    values = [shard.values(0, 2) for shard in trace.shards]
    assert [value.dtype for value in values if value is not None] == ["F32", "F16"]
    assert trace.shard(0).values(0, 3) is None


def test_an_empty_run_is_a_complete_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", samples.HEADER) as writer:
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert trace.complete and trace.shards == () and samples.read_all(trace) == 0
    assert trace.generated().token.shape == (0,)


def test_chosen_rows_come_in_the_order_asked_for(tmp_path: Path) -> None:
    trace = Trace.open(samples.write_sample(tmp_path / "t", forwards=9))
    rows = np.flatnonzero(trace.row_index().table == 0)
    everything = trace.digests(rows)
    order = np.random.default_rng(0).permutation(len(rows)).repeat(2)
    assert np.array_equal(trace.digests(rows[order]), everything[order])
    with pytest.raises(ValueError, match="one table"):
        trace.digests(np.arange(len(trace.row_index().row)))


def test_header_blocks_and_names(tmp_path: Path) -> None:
    trace = Trace.open(samples.write_sample(tmp_path / "t"))
    assert trace.header["observer"] == {"checked": True} and trace.header["notes"] == ["a note"]
    assert [request["id"] for request in trace.requests] == ["a", "b"]
    assert trace.scenario["schedule"] == "serial" and trace.model == {"hash": "0"}
    assert trace.ports == ports_of(samples.SITES)
    port = trace.ports[trace.port_index("layers.0.cache.write", "V.0")]
    assert (trace.sites[port.site].name, port.name, port.is_input) == ("layers.0.cache.write", "V.0", False)
    with pytest.raises(KeyError):
        trace.port_index("layers.0.cache.write", "V.1")
    call = trace.call(0, 3)
    assert call is not None and call["path"] == "native"
    assert trace.call(0, 2) is None
    # Row by row, and without a row as the first of them.
    paths = {"reference/a/mm": (0, 2), "reference/a/mv": (1, 2), None: (1, 3)}
    for path, row in paths.items():
        found = trace.call(2, 1, row)
        assert (found and found["path"]) == path
    first = trace.call(2, 1)
    assert first is not None and first["path"] == "reference/a/mm"
    assert trace.forwards()[-1]["forward"] == 4 and trace.forwards()[0]["events"] == []


PADDED = {
    "layout": "padded",
    "shape": [3, 5],
    "rows": [
        {"request": 1, "slot": 0, "start": 7, "count": 5, "phase": "prefill"},
        {"request": 0, "slot": 2, "start": 0, "count": 3, "phase": "prefill"},
    ],
}


@pytest.mark.parametrize(
    ("layout", "row", "place"),
    [
        ("padded", (1, 7), 0),
        ("padded", (1, 11), 4),
        ("padded", (0, 0), 10),
        ("padded", (0, 2), 12),
        ("packed", (1, 11), 4),
        ("packed", (0, 0), 5),
        ("packed", (0, 2), 7),
        ("packed", (0, 3), None),
        ("padded", (1, 6), None),
        ("padded", (2, 7), None),
    ],
)
def test_where_a_row_lies_in_its_forward(layout: str, row: tuple[int, int], place: int | None) -> None:
    assert flat_row({**PADDED, "layout": layout}, *row) == place


def test_reading_blocks_needs_memory_for_the_blocks_only(tmp_path: Path) -> None:
    columns, rows = 400, 5000
    sites = [Site(f"s{i}", "linear", 0, ("in",), ("out",)) for i in range(columns // 2)]
    digests = np.random.default_rng(0).integers(0, 2**64, (500, columns), dtype=np.uint64)
    none = np.zeros(500, np.int32)
    with TraceWriter(tmp_path / "t", {**samples.HEADER, "sites": sites}, shard_bytes=4 << 20) as writer:
        for number in range(rows // 500):
            writer.forward(samples.forward_line(number, writer.plan(samples.CALLS)))
            same = np.full(500, number, np.int32)
            writer.rows(Rows(none, same, same, none, none, none, tuple(range(columns)), digests))
        writer.finish()
    tracemalloc.start()
    try:
        trace = Trace.open(tmp_path / "t")
        total = 0
        for number, shard in enumerate(trace.shards):
            for start in range(0, len(shard.rows.row), 250):
                total += len(trace.fetch(number, 0, start, start + 250))
        trace.digests(np.arange(0, rows, 500))
        assert total == rows
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # the digests alone are 16 MB
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(0, 40)))
def test_ranges_round_trip(indices: list[int]) -> None:
    text = format_ranges(indices)
    assert [i for run in parse_ranges(text, 41) for i in run] == sorted(set(indices))


@pytest.mark.parametrize(
    "text", ["1-0", "5", "2,1", "1,1", "-1", "1-", "a", "1,,2", " 1", "0-9999999999999999999"]
)
def test_ranges_that_are_not(text: str) -> None:
    with pytest.raises(ValueError):
        parse_ranges(text, 5)


def test_the_package_needs_neither_mlx_nor_numba() -> None:
    heavy = "{'mlx', 'numba', 'transformers'}"
    code = f"import sys, detdiff.trace; print({heavy} & {{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_trace_json_reads_as_lines(tmp_path: Path) -> None:
    """One line for each site and request, so that two headers can be compared with diff(1)."""
    text = (samples.write_sample(tmp_path / "t") / "trace.json").read_text()
    assert list(json.loads(text))[:2] == ["schema", "complete"] and list(json.loads(text))[-1] == "times"
    assert sum('"kind":"linear"' in line for line in text.splitlines()) == 1
