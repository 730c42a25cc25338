"""The malformed corpus: each rule of docs/trace-format.md is broken, and its own exception must say so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_samples as samples

from detdiff import errors
from detdiff.trace import B_DTYPE, B_LENGTH, DTYPE_CODES, Trace

DOCS = Path(__file__).parents[2] / "docs" / "trace-format.md"
Damage = Callable[[Path], Any]


def header_field(key: str, value: Any) -> Damage:
    return lambda path: samples.edit_json(path, lambda header: header.update({key: value}))


def site_field(place: int, key: str, value: Any) -> Damage:
    return lambda path: samples.edit_json(path, lambda header: header["sites"][place].update({key: value}))


def forward_field(line: int, key: str, value: Any) -> Damage:
    return lambda path: samples.edit_lines(
        path, "forwards.jsonl", lambda lines: lines[line].update({key: value})
    )


def element(name: str, place: int, value: float, shard: int = 0) -> Damage:
    return lambda path: samples.set_element(path, name, place, value, shard)


def tensor_field(name: str, key: str, value: Any) -> Damage:
    return lambda path: samples.edit_shard(path, lambda header, _: header[name].update({key: value}))


def both(first: Damage, second: Damage) -> Damage:
    def damage(path: Path) -> None:
        first(path)
        second(path)

    return damage


def without(name: str) -> Damage:
    """Removes a tensor and closes the hole it leaves."""

    def damage(path: Path) -> None:
        header, data = samples.split_shard(path)
        start, stop = header.pop(name)["data_offsets"]
        del data[start:stop]
        for entry in header.values():
            if entry["data_offsets"][0] >= stop:
                entry["data_offsets"] = [offset - (stop - start) for offset in entry["data_offsets"]]
        samples.join_shard(path, header, data)

    return damage


def renamed(name: str, to: str) -> Damage:
    """Renames a tensor, and with values their rows."""
    names = {name: to, f"{name}.rows": f"{to}.rows"}
    return lambda path: samples.edit_shard(
        path, lambda header, _: {names.get(key, key): entry for key, entry in header.items()}
    )


def with_file(name: str, content: bytes | None) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        if content is not None:
            (path / name).write_bytes(content)

    return damage


def linked(name: str) -> Damage:
    """The same bytes outside the directory, and a link to them."""

    def damage(path: Path) -> None:
        (path / name).rename(path.parent / "elsewhere")
        (path / name).symlink_to(path.parent / "elsewhere")

    return damage


def claim(length: int) -> Damage:
    def damage(path: Path) -> None:
        file = path / "shard-00000.safetensors"
        file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
        samples.reseal(path)

    return damage


def raw_header(text: bytes) -> Damage:
    def damage(path: Path) -> None:
        _, data = samples.split_shard(path)
        (path / "shard-00000.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        samples.reseal(path)

    return damage


def shard_entry(key: str, value: Any) -> Damage:
    return lambda path: samples.edit_json(path, lambda header: header["shards"][0].update({key: value}))


def flipped(name: str) -> Damage:
    def damage(path: Path) -> None:
        raw = bytearray((path / name).read_bytes())
        raw[-10] ^= 1
        (path / name).write_bytes(raw)

    return damage


def appended(name: str, content: bytes, seal: bool = True) -> Damage:
    def damage(path: Path) -> None:
        with open(path / name, "ab") as file:
            file.write(content)
        if seal:
            samples.reseal(path)

    return damage


def event(**changes: Any) -> Damage:
    """A trim after the last forward, with ``changes``."""
    line = {**samples.TRIM, "forward": 4, **changes}
    return appended("forwards.jsonl", json.dumps(line).encode() + b"\n")


def verification(**changes: Any) -> Damage:
    line = {**samples.VERIFY, "forward": 4, **changes}
    return appended("forwards.jsonl", json.dumps(line).encode() + b"\n")


def extra_dimension(header: dict[str, Any], _: bytearray) -> None:
    header["digest/0"]["shape"].append(1)


def narrower(header: dict[str, Any], data: bytearray) -> None:
    """The vectors of a shard lose their last number."""
    end = header["embedding.vector"]["data_offsets"][1]
    del data[end - 4 : end]
    header["embedding.vector"]["shape"] = [1, 2]
    for tensor in header.values():
        tensor["data_offsets"] = [offset - 4 * (offset >= end) for offset in tensor["data_offsets"]]


def _call(at: Any = None) -> dict[str, Any]:
    """A call of site 1, for the rows ``at``."""
    return {"path": "native", "sites": "1", **({} if at is None else {"at": at})}


CASES: dict[str, tuple[type[errors.TraceError], Damage]] = {
    "no trace.json": (errors.NotATrace, with_file("trace.json", None)),
    "trace.json is a link": (errors.NotATrace, linked("trace.json")),
    "trace.json is empty": (errors.TraceHeaderError, with_file("trace.json", b"")),
    "trace.json is a list": (errors.TraceHeaderError, with_file("trace.json", b"[]")),
    "trace.json repeats a key": (
        errors.TraceHeaderError,
        with_file("trace.json", b'{"schema":1,"schema":1}'),
    ),
    "trace.json is nested deeply": (errors.TraceHeaderError, with_file("trace.json", b"[" * 100_000)),
    "trace.json is not UTF-8": (errors.TraceHeaderError, with_file("trace.json", b'"\xff"')),
    "complete is a number": (errors.TraceHeaderError, header_field("complete", 1)),
    "a note is a number": (errors.TraceHeaderError, header_field("notes", [1])),
    "schema 2": (errors.TraceSchemaError, header_field("schema", 2)),
    "schema as text": (errors.TraceSchemaError, header_field("schema", "1")),
    "no sites": (errors.SiteListError, header_field("sites", [])),
    "a site is text": (errors.SiteListError, header_field("sites", ["norm"])),
    "a site's layer is text": (errors.SiteListError, site_field(1, "layer", "0")),
    "a site has a field too many": (errors.SiteListError, site_field(1, "color", 0)),
    "two sites of one name": (errors.SiteListError, site_field(0, "name", "layers.0.mlp.up")),
    "two ports of one name": (errors.SiteListError, site_field(3, "inputs", ["k", "k"])),
    "a parent that comes first": (errors.SiteListError, site_field(2, "parent", "embed_tokens")),
    "requests with one id": (
        errors.RequestListError,
        header_field("requests", [{"id": "a", "tokens": []}] * 2),
    ),
    "a token too large": (
        errors.RequestListError,
        header_field("requests", [{"id": "a", "tokens": [1 << 31]}]),
    ),
    "no forwards.jsonl": (errors.LogMissing, with_file("forwards.jsonl", None)),
    "texts.jsonl is a link": (errors.LogMissing, linked("texts.jsonl")),
    "forwards.jsonl is longer": (errors.LogSizeError, appended("forwards.jsonl", b"{}\n", seal=False)),
    "a log is not listed": (errors.LogSizeError, header_field("logs", [])),
    "a half line": (errors.LogLineError, appended("forwards.jsonl", b'{"forward":')),
    "a line is not JSON": (errors.LogLineError, appended("texts.jsonl", b"[1,\n")),
    "a line holds NaN": (errors.LogLineError, appended("texts.jsonl", b'[NaN,"a"]\n')),
    "an unknown line": (errors.ForwardLineError, appended("forwards.jsonl", b'{"more":1}\n')),
    "a forward is skipped": (errors.ForwardLineError, forward_field(2, "forward", 2)),
    "an unknown plan": (errors.ForwardLineError, forward_field(1, "plan", 1)),
    "a shape of three": (errors.ForwardLineError, forward_field(1, "shape", [1, 2, 3])),
    "an unknown layout": (errors.ForwardLineError, forward_field(1, "layout", "loose")),
    "rows of no request": (errors.ForwardLineError, forward_field(1, "rows", [{"request": 2}])),
    "events as text": (errors.ForwardLineError, forward_field(1, "events", "none")),
    "a plan is skipped": (errors.PlanLineError, forward_field(0, "plan", 1)),
    "a call of no site": (
        errors.PlanLineError,
        forward_field(0, "calls", [{"path": "native", "sites": "4"}]),
    ),
    "a call without a path": (errors.PlanLineError, forward_field(0, "calls", [{"sites": "1"}])),
    "a call of all rows and of some": (
        errors.PlanLineError,
        forward_field(0, "calls", [_call(), _call("1")]),
    ),
    "two calls of one row": (errors.PlanLineError, forward_field(0, "calls", [_call("0-1"), _call("1")])),
    "a site in two calls": (errors.PlanLineError, forward_field(0, "calls", [_call(), _call()])),
    "a call of no rows": (errors.PlanLineError, forward_field(0, "calls", [_call("")])),
    "rows that go back": (errors.PlanLineError, forward_field(0, "calls", [_call("1,0")])),
    "a row as a number": (errors.PlanLineError, forward_field(0, "calls", [_call(1)])),
    "a row beyond 2^31": (errors.PlanLineError, forward_field(0, "calls", [_call(str(1 << 31))])),
    "rows beyond the shape": (errors.ForwardLineError, forward_field(0, "calls", [_call("0-2")])),
    "a shape below the plan's rows": (errors.ForwardLineError, forward_field(3, "shape", [1, 1])),
    "an event of another forward": (errors.EventLineError, event(forward=3)),
    "an event of no kind": (errors.EventLineError, event(event="")),
    "an event of no request": (errors.EventLineError, event(request=2)),
    "an event from no request": (errors.EventLineError, event(event="prefix", tokens=1, **{"from": 2})),
    "an event of requests as a number": (errors.EventLineError, event(event="merge", requests=1)),
    "an event of a third model": (errors.EventLineError, event(model="judge")),
    "a trim of no layers": (errors.EventLineError, event(layers="")),
    "a trim of true rows": (errors.EventLineError, event(asked=True)),
    "a verification of nothing": (errors.EventLineError, verification(proposals=[])),
    "a verification of text": (errors.EventLineError, verification(choices="4")),
    "a verification without an end": (errors.EventLineError, verification(committed=None)),
    "a forward of a third model": (errors.ForwardLineError, forward_field(1, "model", "judge")),
    "an engine without a name": (errors.TraceHeaderError, header_field("engine", {"settings": {}})),
    "an engine as text": (errors.TraceHeaderError, header_field("engine", "mlx")),
    "lacks without a reason": (errors.TraceHeaderError, header_field("lacks", {"cache": ""})),
    "lacks of what no trace has": (errors.TraceHeaderError, header_field("lacks", {"colours": "none"})),
    "sites although it lacks them": (errors.LacksError, header_field("lacks", {"sites": "a function"})),
    "top logits although it lacks them": (errors.LacksError, header_field("lacks", {"logits": "a function"})),
    "text that is no text": (
        errors.LacksError,
        both(element("gen.token", 0, 0xD800), header_field("lacks", {"tokens": "text"})),
    ),
    "drafts as a list": (errors.TraceHeaderError, header_field("draft", [])),
    "counts as a number": (errors.TraceHeaderError, header_field("speculation", 1)),
    "a text without an id": (errors.TextLineError, appended("texts.jsonl", b'["a","b"]\n')),
    "two texts of one id": (errors.TextLineError, appended("texts.jsonl", b'[7,"eight"]\n')),
    "a name with ..": (errors.ShardNameError, shard_entry("name", "../shard-00000.safetensors")),
    "an absolute name": (errors.ShardNameError, shard_entry("name", "/etc/passwd")),
    "a negative size": (errors.ShardNameError, shard_entry("bytes", -1)),
    "a shard deleted": (errors.ShardMissing, with_file("shard-00001.safetensors", None)),
    "a shard is a link": (errors.ShardMissing, linked("shard-00001.safetensors")),
    "a shard cut": (errors.ShardSizeError, with_file("shard-00001.safetensors", b"\0" * 100)),
    "a header of 2^60 bytes": (errors.ShardLengthError, claim(1 << 60)),
    "a header of no bytes": (errors.ShardLengthError, claim(0)),
    "a header that is not JSON": (errors.ShardHeaderError, raw_header(b"{nothing}")),
    "a header that is a list": (errors.ShardHeaderError, raw_header(b"[]")),
    "a tensor without dtype": (
        errors.ShardHeaderError,
        raw_header(b'{"a":{"shape":[],"data_offsets":[0,0]}}'),
    ),
    "a negative offset": (errors.ShardHeaderError, tensor_field("digest/0", "data_offsets", [-1, 5])),
    "a shape of true": (errors.ShardHeaderError, tensor_field("digest/0", "shape", [True])),
    "an unknown tensor": (errors.TensorNameError, renamed("row.slot", "row.sloth")),
    "the name of a group": (errors.TensorNameError, renamed("row.slot", "table")),
    "a number with a zero": (errors.TensorNameError, renamed("digest/0", "digest/00")),
    "metadata": (errors.ShardHeaderError, raw_header(b'{"__metadata__":{"a":"b"}}')),
    "values of no column": (errors.TensorNameError, renamed("value/0/0", "value/0/9")),
    "an unknown dtype": (errors.TensorTypeError, tensor_field("digest/0", "dtype", "U65")),
    "digests as I64": (errors.TensorTypeError, tensor_field("digest/0", "dtype", "I64")),
    "a shape of 2^61": (errors.TensorOffsetError, tensor_field("digest/0", "shape", [1 << 61, 7])),
    "a tensor too short": (errors.TensorOffsetError, tensor_field("row.slot", "shape", [1])),
    "bytes after the last": (errors.TensorOffsetError, appended("shard-00000.safetensors", b"\0")),
    "no row.table": (errors.TensorMissing, without("row.table")),
    "no top logits": (errors.TensorMissing, without("gen.top_logits")),
    "no lens.contested": (errors.TensorMissing, without("lens.contested")),
    "no table for a digest": (errors.TensorMissing, without("table/0")),
    "no rows for values": (errors.TensorMissing, without("value/0/1.rows")),
    "one dimension too many": (
        errors.TensorShapeError,
        lambda path: samples.edit_shard(path, extra_dimension),
    ),
    "rows in two dimensions": (errors.TensorShapeError, tensor_field("row.slot", "shape", [2, 2])),
    "top-k of another length": (errors.TensorShapeError, tensor_field("gen.top_ids", "shape", [2, 4])),
    "contested of three": (errors.TensorShapeError, tensor_field("lens.contested", "shape", [4, 2, 1])),
    "a column beyond": (errors.TableError, element("table/0", 0, 7)),
    "a column below -1": (errors.TableError, element("table/0", 0, -2)),
    "a column without a port": (errors.TableError, element("table/0", 9, -1)),
    "a table that changes": (errors.TableError, lambda path: swap_table(path)),
    "a row of no request": (errors.RowError, element("row.request", 0, 2)),
    "a row of no forward": (errors.RowError, element("row.forward", 3, 5)),
    "a row of no table": (errors.RowError, element("row.table", 0, 3)),
    "a row of another table": (errors.TensorShapeError, element("row.table", 0, 0, shard=1)),
    "a row of no phase": (errors.RowError, element("row.phase", 1, 4)),
    "a row before the start": (errors.RowError, element("row.position", 1, -1)),
    "forwards that go back": (errors.RowError, element("row.forward", 0, 1)),
    "shards that go back": (errors.RowError, element("row.forward", 0, 0, shard=2)),
    "a token of no request": (errors.GeneratedError, element("gen.request", 0, 2)),
    "top logits that rise": (errors.GeneratedError, element("gen.top_logits", 1, 9.0)),
    "equal logits by higher id": (errors.GeneratedError, element("gen.top_ids", 2, 10)),
    "a token generated twice": (errors.GeneratedError, element("gen.index", 0, 1)),
    "an embedding of no request": (errors.EmbeddingError, element("embedding.request", 0, 2)),
    "an embedding of an earlier shard": (errors.EmbeddingError, element("embedding.request", 0, 0, shard=1)),
    "embeddings of another width": (
        errors.EmbeddingError,
        lambda path: samples.edit_shard(path, narrower, 1),
    ),
    "no vector": (errors.TensorMissing, without("embedding.vector")),
    "rows of values that go back": (errors.ValueRowsError, element("value/0/0.rows", 1, 0)),
    "rows of values beyond": (errors.ValueRowsError, element("value/0/1.rows", 1, 4)),
    "rows of another table": (errors.ValueRowsError, element("value/0/1.rows", 0, 1, shard=1)),
    "a changed shard": (errors.ChecksumError, flipped("shard-00000.safetensors")),
    "a changed log": (errors.ChecksumError, flipped("forwards.jsonl")),
}
"""What is broken, the rule's exception, and how to break it in a trace that is whole."""


def swap_table(path: Path) -> None:
    """Two ports change columns in the first shard only."""
    samples.set_element(path, "table/0", 0, 1)
    samples.set_element(path, "table/0", 1, 0)


@pytest.mark.parametrize("case", CASES)
def test_a_broken_rule_raises_its_own_exception(case: str, tmp_path: Path) -> None:
    expected, damage = CASES[case]
    path = samples.write_sample(tmp_path / "t", forwards=6)
    assert samples.read_all(Trace.open(path)) == 12
    damage(path)
    with pytest.raises(errors.TraceError) as caught:
        samples.read_all(Trace.open(path))
    assert type(caught.value) is expected
    assert samples.one_paragraph(caught.value)
    assert caught.value.exit_code == 2


def test_a_read_that_the_system_refuses(tmp_path: Path) -> None:
    path = samples.write_sample(tmp_path / "t")
    trace = Trace.open(path)
    (path / "shard-00000.safetensors").unlink()
    with pytest.raises(errors.TraceReadError, match="shard-00000") as caught:
        trace.fetch(0, 0)
    assert samples.one_paragraph(caught.value)


def test_a_shard_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = samples.write_sample(tmp_path / "t")
    trace = Trace.open(path)
    os.truncate(path / "shard-00000.safetensors", trace.shards[0].tensors["digest/0"].offset + 12)
    for read in (lambda: trace.fetch(0, 0), lambda: trace.digests(np.array([1, 0]))):
        with pytest.raises(errors.ShardSizeError, match="Something else writes") as caught:
            read()
        assert samples.one_paragraph(caught.value)


def all_rules() -> set[type[errors.TraceError]]:
    found: set[type[errors.TraceError]] = set()
    todo = [errors.TraceError]
    while todo:
        todo += [rule for rule in todo.pop().__subclasses__() if rule not in found and not found.add(rule)]
    return found


def test_every_rule_has_a_malformed_trace_or_a_test_of_its_own() -> None:
    own = {
        errors.TraceReadError,  # test_a_read_that_the_system_refuses
        errors.TraceExists,  # test_trace_misuse.py
        errors.TraceWriteError,  # test_trace_misuse.py
        errors.TraceDiskFull,  # test_trace_damage.py
        errors.WriterClosed,  # test_trace_misuse.py
        errors.StoreUnusable,  # test_trace_stores.py
    }
    assert {expected for expected, _ in CASES.values()} | own == all_rules()


def test_the_page_of_the_format_names_every_rule() -> None:
    text = DOCS.read_text()
    assert {rule.__name__ for rule in all_rules() if f"`{rule.__name__}`" not in text} == set()


def test_the_page_of_the_format_states_the_digests_constants() -> None:
    text = DOCS.read_text()
    assert f"B_DTYPE = 0x{B_DTYPE:X}, B_LENGTH = 0x{B_LENGTH:X}" in text
    assert all(f"{name} {code}" in text.replace("\n", " ") for name, code in DTYPE_CODES.items())
