"""Entries that MLX's graph says are unchanged are not read anew, with the same trace; whatever does change is found at its place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from runs import Runs, content, events, model, scenario
from tiers import some_now

from detdiff.engines.mlx.taps import recorder, unread
from detdiff.engines.mlx.taps.forward import Forward, memory
from detdiff.engines.mlx.taps.recorder import Recorder

CASES: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("llama", "f32", "serial", "padded", {}),
    ("llama", "bf16", "continuous", "padded", {"arrivals": (0, 2, 5), "prefill_chunk": 9}),
    ("gemma3_text", "f32", "serial", "padded", {"max_tokens": 24}),
    ("llama", "f32", "continuous", "packed", {"arrivals": (0, 2, 5), "prefill_chunk": 9}),
    (
        "qwen3",
        "f32",
        "serial",
        "padded",
        {"kv_bits": 8, "kv_group_size": 32, "kv_start": 14, "max_tokens": 6},
    ),
    ("qwen3_next", "f32", "static", "padded", {}),
    ("llama", "f32", "static", "padded", {"digest": "device"}),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[range | None]:
    """The columns that each cache call had to read; None: all."""
    found: list[range | None] = []
    sound = Recorder._fresh

    def fresh(self: Recorder, *args: Any) -> range | None:
        found.append(sound(self, *args))
        return found[-1]

    monkeypatch.setattr(Recorder, "_fresh", fresh)
    return found


@pytest.mark.parametrize(("arch", "fmt", "schedule", "layout", "keys"), some_now(CASES, 0, 1, 3))
def test_a_trace_does_not_depend_on_what_is_read_anew(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[range | None],
    arch: str,
    fmt: str,
    schedule: str,
    layout: str,
    keys: dict[str, Any],
) -> None:
    asked = scenario(schedule, layout, **keys)
    trace = runs.record(model(arch, fmt), asked)
    assert sum(each is not None for each in calls) > len(calls) / 2
    calls.clear()
    monkeypatch.setattr(unread, "nodes_are_known", lambda: False)
    assert content(runs.record(model(arch, fmt), asked)) == content(trace)
    assert calls and not any(calls)


def _in_place(cache: KVCache) -> None:
    cache.keys[0, 1, 2] = 0.0


def _by_another_name(cache: KVCache) -> None:
    keys = cache.keys
    keys *= 1.0  # the same bits
    keys[0, 1, 2] = 0.0


def _twice(cache: KVCache) -> None:
    # The node that is freed in between may lend its address to the last one.
    cache.keys[0, 1, 2] = 1.0
    mx.eval(cache.keys)
    cache.keys[0, 1, 2] = 0.0


@pytest.fixture(params=["padded", "packed"])
def changed_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[KVCache], None], int], str]]:
    """Change the cache of layer 1 before the row of a position; gives the layout to run."""
    sound = Recorder.begin

    def install(change: Callable[[KVCache], None], position: int) -> str:
        def begin(self: Recorder, forward: Forward, cache: Sequence[Any]) -> None:
            if forward.segments[0].start == position:
                change(cache[1].lanes[0] if request.param == "packed" else cache[1])
            sound(self, forward, cache)

        monkeypatch.setattr(Recorder, "begin", begin)
        return str(request.param)

    yield install


PLACE = {"kind": "cache_changed", "request": 0, "layer": 1, "entry": "K", "head": 1, "position": 2}


@pytest.mark.parametrize("change", [_in_place, _by_another_name, _twice])
def test_a_change_is_found_in_the_next_forward(
    runs: Runs, changed_once: Callable[..., str], change: Callable[[KVCache], None]
) -> None:
    asked = {"lengths": (12,), "max_tokens": 20}
    layout = changed_once(change, 20)
    trace = runs.record(model("llama"), scenario("serial", layout, **asked))
    after = [line["forward"] for line in trace.forwards() if line["rows"][0]["start"] >= 20]
    assert events(trace) == [{"in": number, **PLACE} for number in after]


def test_an_update_that_changes_older_entries_is_read_in_full(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, calls: list[range | None]
) -> None:
    native = KVCache.update_and_fetch

    @functools.wraps(native)
    def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> Any:
        native(self, keys, values)
        if self.offset == 21:
            self.keys[0, 1, 2] = 0.0
        return self.keys_and_values()

    monkeypatch.setattr(KVCache, "update_and_fetch", update_and_fetch)
    found = events(runs.record(model("llama"), scenario(lengths=(12,), max_tokens=12)))
    assert not any(calls)
    assert {(e["kind"], e["entry"], e["head"], e["position"]) for e in found} == {
        ("cache_changed", "K", 1, 2)
    }
    assert {e["layer"] for e in found} == {0, 1}


def test_what_mlx_does_not_know_of_is_found_when_a_layer_has_its_turn(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, calls: list[range | None], changed_once: Callable[..., str]
) -> None:
    def beneath(cache: KVCache) -> None:
        where = memory(cache.keys)
        at = where.address + where.strides[1] + 2 * where.strides[2]
        ctypes.c_uint32.from_address(at).value ^= 1

    layout = changed_once(beneath, 20)
    monkeypatch.setattr(recorder, "READ_ANEW", 5)
    trace = runs.record(model("llama"), scenario("serial", layout, lengths=(12,), max_tokens=20))
    after = [line["forward"] for line in trace.forwards() if line["rows"][0]["start"] >= 20]
    found = events(trace)
    assert any(calls) and found[0] == {"in": found[0]["in"], **PLACE}
    # One that is read in full is read when two more have begun.
    assert after[0] - 2 <= found[0]["in"] < after[0] + 5
