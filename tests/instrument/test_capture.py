"""Captured values are what was digested; levels and budgets change what is kept, never what was seen."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Runs, content, digests, events, model, scenario
from tiers import some_now

from detdiff.trace import Trace, digest_rows

KEYS: dict[str, Any] = {"arrivals": (0, 2, 5), "prefill_chunk": 9, "max_tokens": 5}
CASES = [
    ("llama", "bf16", "padded"),
    ("llama", "f32", "packed"),
    ("gemma3_text", "f32", "padded"),
    ("qwen3_moe", "q4", "packed"),
    ("qwen3_next", "f32", "padded"),
]
Found = dict[tuple[int, int, str, str], tuple[int, int, str]]


def captured(trace: Trace) -> Found:
    """(digest stored, digest of the values, dtype) by (request, position, site, port) where values were kept."""
    names = [(trace.sites[port.site].name, port.name) for port in trace.ports]
    found: Found = {}
    for shard in trace.shards:
        for number, table in shard.tables.items():
            rows = shard.table_rows(number).tolist()
            stored = shard.digests(number)
            for port, column in enumerate(table.tolist()):
                kept = shard.values(number, column) if column >= 0 else None
                if kept is None:
                    continue
                made = digest_rows(kept.data, kept.dtype).tolist()
                for row, digest in zip(kept.rows.tolist(), made, strict=True):
                    key = (int(shard.rows.request[row]), int(shard.rows.position[row]), *names[port])
                    found[key] = (int(stored[rows.index(row), column]), digest, kept.dtype)
    return found


@pytest.mark.parametrize(("arch", "fmt", "layout"), some_now(CASES, 0, 1, 4))
def test_full_values_digest_to_what_is_stored(runs: Runs, arch: str, fmt: str, layout: str) -> None:
    lean = runs.once(model(arch, fmt), scenario("continuous", layout, **KEYS))
    trace = runs.once(model(arch, fmt), scenario("continuous", layout, capture="full", **KEYS))
    trace.verify()
    found, stored = captured(trace), digests(trace)
    assert {key: made for key, (_, made, _) in found.items()} == {key: stored[key] for key in found}
    # All ports but the sums over cache entries, which are no values of the model.
    sums = {("cache_read", "written"), ("cache_read", "read"), ("attention", "kv")}
    kinds = {site.name: site.kind for site in trace.sites}
    missing = {(kinds[key[2]], key[3]) for key in stored if key not in found}
    assert missing <= sums
    assert stored == digests(lean)
    wide = {dtype for _, _, dtype in found.values()}
    assert ("BF16" if fmt == "bf16" else "F32") in wide
    if fmt == "bf16":
        assert "F32" not in wide and "F16" not in wide


def test_bf16_is_stored_as_bf16(runs: Runs) -> None:
    trace = runs.record(model("llama", "bf16"), scenario(capture="full", max_tokens=2))
    shard = trace.shards[0]
    dtypes = {tensor.dtype for name, tensor in shard.tensors.items() if _is_value(name)}
    assert dtypes == {"BF16", "I32"}
    (table, column), *_ = [
        c for c in shard.value_columns() if shard.tensors[f"value/{c[0]}/{c[1]}"].dtype == "BF16"
    ]
    value = shard.values(table, column)
    assert value is not None and value.data.dtype == np.uint16


def _is_value(name: str) -> bool:
    return name.startswith("value/") and not name.endswith(".rows")


@pytest.mark.parametrize(
    "window",
    [
        {"window_requests": ["r1"]},
        {"window_positions": [3, 13]},
        {"window_sites": ["layers.1.mlp*", "norm"]},
        {"window_requests": ["r0", "r2"], "window_positions": [11, 12], "window_sites": ["*.cache.write"]},
    ],
)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_window_keeps_what_it_names_and_nothing_else(
    runs: Runs, layout: str, window: dict[str, Any]
) -> None:
    full = captured(runs.once(model("llama"), scenario("continuous", layout, capture="full", **KEYS)))
    trace = runs.record(model("llama"), scenario("continuous", layout, capture="window", **window, **KEYS))
    found = captured(trace)
    low, high = window.get("window_positions", (0, 1 << 30))
    requests = {int(name[1:]) for name in window.get("window_requests", ("r0", "r1", "r2"))}
    patterns = window.get("window_sites", ["*"])

    def wanted(key: tuple[int, int, str, str]) -> bool:
        inside = key[0] in requests and low <= key[1] <= high
        return inside and any(fnmatchcase(key[2], pattern) for pattern in patterns)

    expected = {key: value for key, value in full.items() if wanted(key)}
    assert expected and {key: found.get(key) for key in expected} == expected
    # A port outside may come along where it is the very array of one that was asked for; rows may not.
    assert all(key[0] in requests and low <= key[1] <= high for key in found)
    if patterns != ["*"]:
        digest_of = {value[0] for value in expected.values()}
        assert all(value[0] in digest_of for value in found.values())
    assert digests(trace) == digests(runs.once(model("llama"), scenario("continuous", layout, **KEYS)))


@pytest.mark.parametrize(
    ("arch", "layout"),
    some_now(
        [
            ("llama", "padded"),
            ("llama", "packed"),
            ("gemma3_text", "padded"),
            ("qwen3_moe", "packed"),
            ("qwen3_next", "padded"),
        ],
        1,
        2,
    ),
)
@pytest.mark.parametrize("level", some_now(["digest", "full"], 1))
def test_a_small_memory_budget_changes_nothing_that_was_seen(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, arch: str, layout: str, level: str
) -> None:
    from detdiff.engines.mlx.taps.digesting import Digester

    flushed = [0]
    sound = Digester.flush

    def flush(self: Digester, record: Any) -> None:
        flushed[0] += 1
        sound(self, record)

    monkeypatch.setattr(Digester, "flush", flush)
    keys = {"lengths": (90, 3, 21), "max_tokens": 4, "capture": level}
    large = runs.record(model(arch), scenario("static", layout, **keys))
    assert flushed[0] == 0
    small = runs.record(model(arch), scenario("static", layout, memory_mb=1, **keys))
    assert flushed[0] > 0
    assert content(small) == content(large)
    if level == "full":
        assert captured(small) == captured(large)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_changed_entry_is_seen_with_a_small_budget_too(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    from detdiff.engines.mlx.taps.recorder import Recorder

    sound, done = Recorder.begin, [0]

    def begin(self: Recorder, forward: Any, cache: Any) -> None:
        if forward.index == 2:
            held = cache[1].lanes[0] if layout == "packed" else cache[1]
            held.keys = held.keys * 1.5
            done[0] += 1
        sound(self, forward, cache)

    monkeypatch.setattr(Recorder, "begin", begin)
    # Chunks that are themselves beyond the budget, so that the entries are digested block by block.
    keys = {"lengths": (90,), "prefill_chunk": 32, "max_tokens": 2, "memory_mb": 1}
    found = events(runs.record(model("llama"), scenario("serial", layout, **keys)))
    assert done == [1]
    assert {event["kind"] for event in found} <= {"cache_changed", "cache_changed_more"}
    assert {event["layer"] for event in found} == {1}
    assert {event["entry"] for event in found if event["kind"] == "cache_changed"} == {"K"}


def files(trace: Trace) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in sorted(Path(trace.path).iterdir())}
    header = json.loads(found.pop("trace.json"))
    header.pop("times")
    found["trace.json"] = json.dumps(header).encode()
    return found


@pytest.mark.parametrize(
    ("arch", "layout", "keys"),
    some_now(
        [
            ("llama", "padded", {"capture": "full", "lens": True}),
            ("qwen3_moe", "packed", {"kernels": "candle-metal", "split_rows": 2}),
            ("qwen3_next", "padded", {"temperature": 0.7}),
            ("gemma3_text", "packed", {"digest": "device"}),
        ],
        0,
        3,
    ),
)
def test_the_same_run_twice_gives_the_same_bytes(
    runs: Runs, arch: str, layout: str, keys: dict[str, Any]
) -> None:
    asked = scenario("continuous", layout, **KEYS, **keys)
    first, second = (files(runs.record(model(arch), asked)) for _ in range(2))
    assert first.keys() == second.keys() and len(first) >= 4
    for name, data in first.items():
        assert data == second[name], name
