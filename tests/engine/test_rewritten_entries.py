"""Entries that a cache stores anew after their write: the whole cache, when it is quantised."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from runs import Runs, model, scenario
from tiers import some_now

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.cache_events import quantisation_error
from detdiff.explain import explain

HEADS, LAYERS, PROMPT, TOKENS = 2, 2, 12, 4
QUANTISED = {"kv_bits": 8, "kv_group_size": 32}


def compared(runs: Runs, a: dict[str, Any], b: dict[str, Any]) -> Divergence:
    sides = [
        runs.record(model("qwen3"), scenario(lengths=(PROMPT,), max_tokens=TOKENS, **keys)) for keys in (a, b)
    ]
    return compare(*sides)


@pytest.mark.parametrize("quantised", ["a", "b"])
def test_a_cache_that_is_quantised_differs_from_its_first_entry_on(runs: Runs, quantised: str) -> None:
    sides = (QUANTISED, {}) if quantised == "a" else ({}, QUANTISED)
    (request,) = compared(runs, *sides).requests
    entry, differing_entries = request.cache_entry, request.differing_entries
    assert entry is not None and differing_entries is not None
    assert (entry.layer, entry.kind, entry.head, entry.position) == (0, "K", 0, 0)
    rewritten = (entry.rewritten_a, entry.rewritten_b)
    # mlx-lm keeps the last prompt token for a forward of its own and quantises after the one before.
    assert rewritten == ((0, None) if quantised == "a" else (None, 0))
    rows = differing_entries.alive_at + 1
    assert (differing_entries.count, differing_entries.entries) == (
        2 * HEADS * LAYERS * rows,
        2 * HEADS * LAYERS * rows,
    )
    assert differing_entries.positions == ((0, differing_entries.alive_at),)


def test_a_cache_that_both_quantise_alike_differs_nowhere(runs: Runs) -> None:
    found = compared(runs, QUANTISED, QUANTISED)
    assert found.identical and found.requests[0].cache_entry is None


def test_a_quantisation_that_starts_later_leaves_what_was_read_before_alone(runs: Runs) -> None:
    (request,) = compared(runs, {}, {**QUANTISED, "kv_start": PROMPT + TOKENS + 1}).requests
    assert request.identical and request.cache_entry is None


LOST = {
    "zeros": lambda array: mx.zeros_like(array),
    "a neighbouring head": lambda array: mx.roll(array, 1, axis=1),
    "two steps": lambda array: (
        array + 2 * (array.max(axis=-1, keepdims=True) - array.min(axis=-1, keepdims=True)) / 255
    ),
}


@pytest.mark.parametrize("how", some_now(LOST, 2))
@pytest.mark.parametrize(("a", "b"), [({}, QUANTISED), ({**QUANTISED, "prefill_chunk": 4}, QUANTISED)])
def test_a_conversion_that_loses_entries_is_a_bug_at_its_place(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, a: dict[str, Any], b: dict[str, Any], how: str
) -> None:
    sound = KVCache.to_quantized

    def to_quantized(self: KVCache, group_size: int = 64, bits: int = 4) -> Any:
        keys, self.keys = self.keys, LOST[how](self.keys)
        found = sound(self, group_size, bits)
        self.keys = keys
        return found

    monkeypatch.setattr(KVCache, "to_quantized", to_quantized)
    traces = [
        runs.record(model("qwen3"), scenario(lengths=(PROMPT,), max_tokens=TOKENS, **k)) for k in (a, b)
    ]
    verdict = explain(*traces, loaded=model("qwen3"))
    assert verdict.kind == "bug" and verdict.rule == "bookkeeping"
    assert (
        "the cache entry K of layer 0, head 0, position 0 is not what was written: once quantised"
        in verdict.sentence
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_a_sound_conversion_is_within_its_bound(runs: Runs, bits: int, fmt: str) -> None:
    sides = ({"prefill_chunk": 4}, {})
    keys = {"lengths": (PROMPT,), "max_tokens": TOKENS, "kv_bits": bits, "kv_group_size": 32}
    traces = [runs.record(model("qwen3", fmt), scenario(**keys, **side)) for side in sides]
    errors = [e["error"] for trace in traces for e in trace.events() if e["event"] == "quantise"]
    assert len(errors) == 2 and all(0.1 < error <= 1 for error in errors)
    assert not any("outside" in event for trace in traces for event in trace.events())


def test_another_cache_is_a_configuration_whose_conversion_was_measured(runs: Runs) -> None:
    traces = [
        runs.record(model("qwen3"), scenario(lengths=(PROMPT,), max_tokens=TOKENS, **k))
        for k in ({}, QUANTISED)
    ]
    verdict = explain(*traces, loaded=model("qwen3"))
    assert verdict.kind == "configuration"
    (evidence,) = [each for each in verdict.evidence if each.fact == "quantised"]
    assert "off what was written by at most 0.9" in evidence.sentence and evidence.detail["error"] <= 1


def test_the_bound_holds_for_any_group(runs: Runs) -> None:
    mx.random.seed(4)
    for size in (1e-6, 1.0, 1e4):
        for bits in (2, 3, 4, 6, 8):
            exact = size * mx.random.normal((1, 2, 400, 64)) + size * mx.random.normal((1, 2, 400, 1))
            error = quantisation_error(exact, mx.quantize(exact, group_size=32, bits=bits), 32, bits)
            assert 0.3 < float(error.max()) <= 1, (size, bits, float(error.max()))
