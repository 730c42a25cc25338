"""A cache entry that changes after its write, and a cache that lies about where it is, are found at their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache
from runs import Runs, events, model, scenario
from tiers import some_now

from detdiff.compare import compare
from detdiff.engines.mlx.taps.forward import Forward
from detdiff.engines.mlx.taps.recorder import Recorder
from detdiff.scenario import Scenario

Edit = Callable[[Forward, Sequence[Any]], None]
CONTINUOUS: dict[str, Any] = {"arrivals": (0, 2, 5), "prefill_chunk": 9}


@pytest.fixture
def before_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[Edit], None]:
    """Run an edit of the caches when a recorded forward begins, before anything looks at them."""

    def install(edit: Edit) -> None:
        sound = Recorder.begin

        def begin(self: Recorder, forward: Forward, cache: Sequence[Any]) -> None:
            edit(forward, cache)
            sound(self, forward, cache)

        monkeypatch.setattr(Recorder, "begin", begin)

    return install


def moved(array: mx.array, index: tuple[int, ...]) -> mx.array:
    """A copy with one element moved by one unit in the last place."""
    raw = mx.contiguous(array).view({2: mx.uint16, 4: mx.uint32}[array.itemsize])
    raw[index] = raw[index] + 1
    return raw.view(array.dtype)


class Damage:
    """Moves one element of one entry once, in the first forward of ``request`` that starts after ``position``."""

    def __init__(self, request: int, layer: int, entry: str, head: int, position: int, wait: int = 0) -> None:
        self.request, self.layer, self.entry, self.head, self.position = request, layer, entry, head, position
        self._wait = wait
        self.row: int | None = None

    def __call__(self, forward: Forward, cache: Sequence[Any]) -> None:
        for lane, segment in enumerate(forward.segments):
            if segment.request != self.request or segment.start <= self.position or self.row is not None:
                continue
            if self._wait:
                self._wait -= 1
                continue
            self.row = segment.start
            packed = forward.layout == "packed"
            held = cache[self.layer].lanes[lane] if packed else cache[self.layer]
            slot = 0 if packed else segment.slot
            name = "keys" if self.entry == "K" else "values"
            place = self._place(held, slot, segment.start)
            setattr(held, name, moved(getattr(held, name), (slot, self.head, place, 5)))

    def _place(self, held: Any, slot: int, start: int) -> int:
        if hasattr(held, "left_padding"):
            length = held._idx
        elif hasattr(held, "max_size") and held.keys.shape[2] == held.max_size:
            return (held._idx - (start - self.position)) % held.max_size
        else:
            length = held.offset
        # Positions end at the write index, whatever padding lies before them.
        return int(length) - (start - self.position)


FAULTS = [
    ("llama", "f32", "continuous", "packed", Damage(0, 1, "K", 1, 4)),
    ("llama", "bf16", "continuous", "packed", Damage(2, 0, "V", 0, 20)),
    ("qwen3", "q4", "continuous", "padded", Damage(1, 1, "V", 1, 0)),
    ("llama", "f32", "continuous", "padded", Damage(0, 0, "K", 0, 11)),
    ("phi3", "f32", "serial", "padded", Damage(2, 1, "K", 0, 7)),
    ("qwen3_next", "f32", "static", "padded", Damage(1, 3, "K", 0, 2)),
    ("gemma3_text", "f32", "serial", "padded", Damage(2, 3, "V", 1, 20, 3)),
    ("gemma3_text", "f32", "continuous", "packed", Damage(0, 2, "K", 1, 12, 2)),
]


@pytest.mark.parametrize(("arch", "fmt", "schedule", "layout", "fault"), some_now(FAULTS, 0, 2, 5, 6))
def test_a_changed_entry_is_the_origin_and_named(
    runs: Runs,
    before_forward: Callable[[Edit], None],
    arch: str,
    fmt: str,
    schedule: str,
    layout: str,
    fault: Damage,
) -> None:
    keys = CONTINUOUS if schedule == "continuous" else {}
    asked: Scenario = scenario(schedule, layout, max_tokens=8, **keys)
    base = runs.record(model(arch, fmt), asked)
    assert events(base) == []
    before_forward(fault)
    fault.row = None
    damaged = runs.record(model(arch, fmt), asked)
    row = fault.row
    assert row is not None and row > fault.position

    found = events(damaged)
    expected = {
        "kind": "cache_changed",
        "request": fault.request,
        "layer": fault.layer,
        "entry": fault.entry,
        "head": fault.head,
        "position": fault.position,
    }
    assert found and all({k: v for k, v in e.items() if k != "in"} == expected for e in found)
    holding = [
        line["forward"]
        for line in damaged.forwards()
        if any(r["request"] == fault.request and r["start"] >= row for r in line["rows"])
    ]
    assert [event["in"] for event in found] == holding

    divergence = compare(base, damaged)
    for request in divergence.requests:
        if request.id != f"r{fault.request}":
            assert request.identical and request.differing == 0
            continue
        origin = request.origin
        assert origin is not None
        assert (origin.kind, origin.layer, origin.how) == ("cache_read", fault.layer, "changed")
        assert origin.site == f"layers.{fault.layer}.self_attn.cache.read"
        assert origin.position == row
        assert sum(count.count for count in request.origins) == 1
        assert {(c.run, c.kind, c.head, c.position) for c in origin.changes} == {
            ("b", fault.entry, fault.head, fault.position)
        }


@pytest.mark.parametrize(
    ("arch", "schedule", "layout"),
    [("llama", "serial", "padded"), ("llama", "static", "padded"), ("qwen3", "continuous", "packed")],
)
def test_an_offset_that_lies_is_an_event(
    runs: Runs, before_forward: Callable[[Edit], None], arch: str, schedule: str, layout: str
) -> None:
    request, layer = 2, 1
    lied: list[tuple[int, int]] = []

    def lie(forward: Forward, cache: Sequence[Any]) -> None:
        for lane, segment in enumerate(forward.segments):
            if segment.request == request and segment.start > 20 and not lied:
                lied.append((forward.index, segment.start))
                held = cache[layer].lanes[lane] if layout == "packed" else cache[layer]
                if isinstance(held.offset, mx.array):
                    held.offset = held.offset + (mx.arange(held.offset.size) == segment.slot)
                else:
                    held.offset += 1

    asked = scenario(schedule, layout, max_tokens=6)
    base = runs.record(model(arch), asked)
    before_forward(lie)
    wrong = runs.record(model(arch), asked)
    offsets = [event for event in events(wrong) if event["kind"] == "offset"]
    assert offsets and lied
    assert offsets[0]["in"] == lied[0][0]
    assert (offsets[0]["expected"], offsets[0]["found"]) == (lied[0][1], lied[0][1] + 1)
    assert {(event["request"], event["layer"]) for event in offsets} == {(request, layer)}
    divergence = compare(base, wrong)
    assert not divergence.identical and divergence.bookkeeping
    assert divergence.bookkeeping[0].run == "b" and divergence.bookkeeping[0].request == f"r{request}"
    assert divergence.stage == "bookkeeping"
    others = [r for r in divergence.requests if r.id != f"r{request}"]
    assert len(others) == 2 and all(r.identical for r in others)


def test_many_changed_entries_are_all_counted_in_what_is_read(
    runs: Runs, before_forward: Callable[[Edit], None]
) -> None:
    """Events have a limit a call; the digests that compare uses do not."""
    damaged: list[int] = []

    def wipe(forward: Forward, cache: Sequence[Any]) -> None:
        if not damaged and forward.segments[0].start == 70:
            damaged.append(forward.index)
            cache[0].keys = cache[0].keys * 0.5

    asked = scenario(lengths=(70,), max_tokens=4)
    base = runs.record(model("llama"), asked)
    before_forward(wipe)
    wrong = runs.record(model("llama"), asked)
    changed = [event for event in events(wrong) if event["in"] == damaged[0]]
    named = [event for event in changed if event["kind"] == "cache_changed"]
    (more,) = (event for event in changed if event["kind"] == "cache_changed_more")
    assert len(named) == 64 and {event["entry"] for event in named} == {"K"}
    # Layer 0 of 70 positions with two K heads was changed whole.
    assert more["layer"] == 0 and len(named) + more["entries"] == 140
    (request,) = compare(base, wrong).requests
    assert request.origin is not None and request.origin.kind == "cache_read"
    assert request.origin.position == 70


def test_a_cache_that_returns_what_it_does_not_store_is_read_wrong(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored rightly, returned wrongly: the read is the origin, for the entry of the row itself too."""
    sound = BatchKVCache.update_and_fetch
    asked = scenario("static", "padded", lengths=(9, 9), max_tokens=4)
    base = runs.record(model("llama"), asked)

    def update_and_fetch(self: Any, keys: Any, values: Any) -> Any:
        found, stored = sound(self, keys, values)
        if keys.shape[2] == 1:
            stored = mx.concatenate([stored[1:2], stored[1:]])
        return found, stored

    monkeypatch.setattr(BatchKVCache, "update_and_fetch", update_and_fetch)
    wrong = runs.record(model("llama"), asked)
    first, second = compare(base, wrong).requests
    assert first.origin is not None and first.origin.kind == "cache_read"
    assert (first.origin.layer, first.origin.position) == (0, 8)
    named = {(e["entry"], e["layer"], e["position"]) for e in events(wrong) if e["kind"] == "cache_changed"}
    assert {entry for entry, _, _ in named} == {"V"} and ("V", 0, 8) in named
    assert second.identical
