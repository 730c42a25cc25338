"""What mlx-lm and the packed engine do to caches is recorded; what they do wrongly is found at its place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.models import cache as cache_module
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache
from runs import Runs, model, scenario
from tiers import some_now
from tiny import tiny

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx.cache_events import CacheOwners, watched
from detdiff.engines.mlx.caches import RequestCaches
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.report import divergence_text
from detdiff.scenario import Scenario
from detdiff.trace import Trace

CONTINUOUS: dict[str, Any] = {"schedule": "continuous", "arrivals": (0, 2, 5), "prefill_chunk": 9}
QUANTISED: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32, "kv_start": 20, "max_tokens": 4}


def events(trace: Trace, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in trace.events() if event["event"] in kinds]


def said(found: Divergence, what: str, run: str | None = None) -> list[tuple[str | None, int | None, str]]:
    return [
        (f.request, f.forward, f.detail) for f in found.bookkeeping if f.what == what and run in (None, f.run)
    ]


def test_batches_are_recorded_as_they_merge_extend_shrink_and_roll(runs: Runs) -> None:
    trace = runs.record(model("llama"), scenario(**CONTINUOUS))
    assert [e["requests"] for e in events(trace, "merge")] == [[0], [1], [2]]
    assert events(trace, "extend")[-1]["requests"] == [0, 1] and events(trace, "extend")[-1]["by"] == [2]
    ended = [event for event in events(trace, "filter") if event["forward"] > 13]
    assert [(e["requests"], e["kept"]) for e in ended] == [([0, 1, 2], [1, 2]), ([1, 2], [2]), ([2], [])]
    static = runs.record(model("llama"), scenario("static"))
    (roll,) = events(static, "roll")
    # Prompts of 12, 3 and 21 tokens, of which the last token of each runs with the first answer.
    assert (roll["requests"], roll["by"], roll["forward"]) == ([0, 1, 2], [9, 18, 0], 0)
    found = compare(static, trace)
    assert found.identical and not found.bookkeeping
    assert {(count.event, count.a, count.b) for count in found.events.counts} >= {
        ("merge", 1, 3),
        ("roll", 1, 0),
    }


def natives() -> list[Any]:
    generators = importlib.import_module("mlx_lm.generate")
    return [
        vars(PromptProcessingBatch)["__init__"],
        vars(PromptProcessingBatch)["prompt"],
        vars(GenerationBatch)["filter"],
        vars(GenerationBatch)["extend"],
        vars(generators)["trim_prompt_cache"],
        vars(generators)["maybe_quantize_kv_cache"],
    ]


def test_mlx_lm_is_as_before_after_a_block_an_exception_and_a_second_block() -> None:
    before = natives()
    owners = CacheOwners(of_uid=int)
    with watched(owners, print), watched(owners, print):
        assert natives() != before
    assert natives() == before
    with pytest.raises(KeyError), watched(owners, print):
        raise KeyError
    assert natives() == before


def test_a_filter_that_keeps_the_wrong_slot_is_found_after_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = BatchKVCache.filter

    def filter_(self: BatchKVCache, batch_indices: list[int]) -> None:
        if batch_indices == [1, 2]:  # r0 has finished
            order = mx.array([0, 1, 1])
            self.keys = self.keys[order]  # r2's keys are now r1's
        native(self, batch_indices)

    good = runs.record(model("llama"), scenario(**CONTINUOUS))
    monkeypatch.setattr(BatchKVCache, "filter", filter_)
    wrong = runs.record(model("llama"), scenario(**CONTINUOUS))
    at = next(e["forward"] for e in events(wrong, "filter") if e["kept"] == [1, 2])
    found = compare(good, wrong)
    request, forward, detail = said(found, "cache_changed", "b")[0]
    assert (request, forward) == ("r2", at + 1)
    assert "are not what was written: K, layers 0-1, heads 0-1, positions 0-" in detail
    assert detail.endswith(f"; right before, after forward {at}: filter (kept r1, r2 of r0, r1, r2)")
    assert found.stage == "bookkeeping"


def test_a_roll_by_one_too_few_is_found_after_it(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    native = cache_module.dynamic_roll

    def roll(x: mx.array, shifts: mx.array, axis: int) -> mx.array:
        return native(x, mx.maximum(shifts - (shifts == 9), 0), axis)

    good = runs.record(model("llama"), scenario("static"))
    monkeypatch.setattr(cache_module, "dynamic_roll", roll)
    wrong = runs.record(model("llama"), scenario("static"))
    found = compare(good, wrong)
    # No entry changed: each lies a column further left, so the padding's mask hides the first and shows what follows the last.
    assert said(found, "cache_changed", "b") == []
    ((request, forward, detail), *others) = said(found, "cache_foreign", "b")
    assert (request, forward) == ("r0", 1) and all(request == "r0" for request, *_ in others)
    assert "saw cell" in detail and "of layers 0-1" in detail
    assert "right before, after forward 0: roll (r0 by 9, r1 by 18, r2 by 0)" in detail
    origin = found.requests[0].origin
    assert origin is not None and (origin.site, origin.how) == ("layers.0.self_attn.cache.read", "visible")


# Speculation: a draft of other weights, whose proposals are mostly rejected.


def speculating(arch: str, layout: str, lengths: tuple[int, ...] = (12, 3), **keys: Any) -> Scenario:
    kind = "continuous" if layout == "packed" else "serial"
    return scenario(kind, layout, lengths=lengths, draft="tiny-draft", drafts=3, max_tokens=12, **keys)


def speculate(runs: Runs, arch: str, asked: Scenario) -> Trace:
    return runs.record(model(arch), asked, draft=tiny(arch, seed=5))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_trims_of_both_models_are_recorded_and_sound(runs: Runs, layout: str) -> None:
    trace = speculate(runs, "llama", speculating("llama", layout))
    trims = events(trace, "trim")
    assert {event["model"] for event in trims} == {"target", "draft"}
    assert all(event["asked"] == event["done"] > 0 for event in trims)
    found = compare(runs.record(model("llama"), scenario(lengths=(12, 3), max_tokens=12)), trace)
    assert found.identical, (found.bookkeeping, found.notes)


TRIMS: dict[str, Callable[[KVCache, int], int]] = {
    "done 0": lambda cache, n: 0,
    "said to be done": lambda cache, n: n,
}


@pytest.mark.parametrize("layout", some_now(["packed", "padded"], 0))
@pytest.mark.parametrize("how", some_now(TRIMS, 1))
def test_a_trim_that_does_nothing_is_found(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, how: str, layout: str
) -> None:
    good = speculate(runs, "llama", speculating("llama", layout))
    monkeypatch.setattr(KVCache, "trim", TRIMS[how])
    wrong = speculate(runs, "llama", speculating("llama", layout))
    first = events(wrong, "trim")[0]
    found = compare(good, wrong)
    assert bool(said(found, "trim", "b")) == (how == "done 0")
    if how == "done 0":
        target = next(e for e in events(wrong, "trim") if e["model"] == "target")
        details = [detail for *_, detail in said(found, "trim", "b")]
        assert any(
            f"a trim of the target's cache after forward {target['forward']} took 0 of {target['asked']} rows off in layers 0-1"
            in detail
            for detail in details
        )
    stale = said(found, "stale", "b")
    assert {request for request, *_ in stale} == {"r0", "r1"}
    of_target = next(detail for request, _, detail in stale if request == "r0" and "target" in detail)
    assert "stayed in the target's cache in layers 0-1" in of_target
    assert found.stage == "bookkeeping" and first["forward"] >= 0


@pytest.mark.thorough
def test_one_row_that_stays_in_one_layer_is_found_while_tokens_agree(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = RequestCaches.trim
    good = speculate(runs, "llama", speculating("llama", "packed", (12,)))
    last = [event for event in events(good, "trim") if event["model"] == "target"]
    agreed = 0
    for skipped in range(len(last) - 1):
        seen = 0

        def trim(held: RequestCaches, request: int, count: int, skipped: int = skipped) -> int:
            nonlocal seen
            done = native(held, request, count)
            if held._name == "target":
                seen += 1
                if seen == skipped + 1:
                    held.of(request)[1].offset += 1
            return done

        with monkeypatch.context() as patch:
            patch.setattr(RequestCaches, "trim", trim)
            wrong = speculate(runs, "llama", speculating("llama", "packed", (12,)))
        found = compare(good, wrong)
        ((request, forward, detail), *_) = said(found, "stale", "b")
        event = [e for e in events(wrong, "trim") if e["model"] == "target"][skipped]
        assert request == "r0" and detail.startswith(
            f"1 rejected row that forward {event['forward']} wrote at position "
        )
        assert "stayed in the target's cache in layers 1," in detail
        assert forward == min(
            line["forward"]
            for line in wrong.forwards()
            if line["forward"] > event["forward"] and line.get("model", "target") == "target"
        )
        agreed += found.requests[0].flip is None
    assert agreed


def test_a_trim_in_one_layer_only_names_the_layer(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    native, seen = KVCache.trim, []

    def trim(cache: KVCache, n: int) -> int:
        if not any(cache is known for known in seen):
            seen.append(cache)
        # Caches of a model are trimmed in order of layers.
        return 0 if [c is cache for c in seen].index(True) % 2 else int(native(cache, n))

    monkeypatch.setattr(KVCache, "trim", trim)
    wrong = speculate(runs, "llama", speculating("llama", "packed", (12,)))
    found = compare(wrong, wrong)
    assert all("in layers 1" in detail for _, _, detail in said(found, "trim"))
    assert all("cache in layers 1," in detail for _, _, detail in said(found, "stale")) and said(
        found, "stale"
    )


@pytest.mark.thorough
def test_a_wrapped_window_keeps_rejected_rows_in_mlx_lm(runs: Runs) -> None:
    """A real fault: mlx-lm's speculation asks a wrapped rotating cache for a trim that it cannot do."""
    trace = speculate(
        runs, "gemma3_text", speculating("gemma3_text", "padded", (3,)).with_changes(max_tokens=40)
    )
    found = compare(trace, trace)
    failed = [event for event in events(trace, "trim") if event["done"] < event["asked"]]
    assert failed and all(event["done"] == 0 and event["layers"] == "0-1,3-4" for event in failed)
    wrap = events(trace, "wrap")[0]
    assert (wrap["window"], wrap["layers"]) == (16, "0-1,3-4")
    # A window that is full refuses already, before it has let anything go.
    rows = trace.row_index()
    full = rows.forward[(rows.position >= 15) & (rows.request == 0)]
    assert int(full.min()) <= min(event["forward"] for event in failed) <= wrap["forward"]
    ((_, forward, detail), *_) = [f for f in said(found, "stale") if "target" in f[2]]
    assert "stayed in the target's cache in layers 0-5" in detail
    assert forward is not None and forward > failed[0]["forward"]
    # The findings come from the bookkeeping, in both runs alike, and before any tensor.
    assert found.bookkeeping[0].what == "trim" and found.stage is None


def test_counts_of_drafts_that_do_not_add_up_are_found(runs: Runs) -> None:
    trace = speculate(runs, "llama", speculating("llama", "packed"))
    counted = trace.header["speculation"]["r1"]
    assert not compare(trace, trace).bookkeeping
    trace.header["speculation"]["r1"] = {**counted, "accepted": counted["accepted"] + 1}
    ((request, _, detail),) = said(compare(trace, trace), "acceptance")
    assert request == "r1"
    assert detail == (
        f"the engine counted {counted['accepted'] + 1} of {counted['proposed']} drafts accepted, and its verifications sum "
        f"to {counted['accepted']} of {counted['proposed']}"
    )


def test_a_cache_quantised_from_another_position_is_found_with_its_chunk(runs: Runs) -> None:
    whole = runs.record(model("qwen3"), scenario(lengths=(40,), **QUANTISED))
    for chunk, position, index in ((7, 21, 2), (16, 32, 1), (32, 32, 0)):
        parts = runs.record(model("qwen3"), scenario(lengths=(40,), prefill_chunk=chunk, **QUANTISED))
        found = compare(whole, parts)
        ((request, _, detail),) = said(found, "quantise")
        assert (request, detail) == (
            "r0",
            "the cache of layers 0-1 was quantised from position 39 on (after forward 0, prefill chunk 0) in run a and from "
            f"position {position} on (after forward {index}, prefill chunk {index}) in run b",
        )
        assert found.stage == "bookkeeping" and not said(found, "cache_changed")
        entry = found.requests[0].cache_entry
        assert entry is not None and entry.position == position
    assert compare(whole, runs.record(model("qwen3"), scenario(lengths=(40,), **QUANTISED))).identical


def test_a_quantised_entry_that_changes_is_still_found(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from detdiff.engines.mlx.taps.recorder import Recorder

    native = Recorder.begin

    def begin(self: Recorder, forward: Any, cache: Any) -> None:
        if forward.index == 3:
            scales = cache[1].keys[1]
            scales[0, 1, 5] = scales[0, 1, 5] * 2
        native(self, forward, cache)

    good = runs.record(model("qwen3"), scenario(lengths=(40,), **QUANTISED))
    monkeypatch.setattr(Recorder, "begin", begin)
    found = compare(good, runs.record(model("qwen3"), scenario(lengths=(40,), **QUANTISED)))
    assert said(found, "cache_changed", "b")[0] == (
        "r0",
        3,
        "the cache entry K of layer 1, head 1, position 5 is not what was written",
    )


def test_a_ring_without_slack_is_found_with_chunk_and_rows(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = RotatingKVCache._update_concat

    def update(self: RotatingKVCache, keys: mx.array, values: mx.array) -> Any:
        # The chunk's last rows are written over entries that its first rows should still see.
        native(self, keys, values)
        lost = min(keys.shape[2], self.keys.shape[2] - keys.shape[2])
        if lost > 0:
            for side in (self.keys, self.values):
                side[..., :lost, :] = side[..., -lost:, :]
        return self.keys, self.values

    asked = scenario(lengths=(60,), prefill_chunk=20, max_tokens=4)
    good = runs.record(model("gemma3_text"), asked)
    monkeypatch.setattr(RotatingKVCache, "_update_concat", update)
    found = compare(good, runs.record(model("gemma3_text"), asked))
    (request,) = found.requests
    a, b = request.chunks
    assert (b.run, b.index, b.first, b.last, b.earlier_equal) == ("b", 1, 20, 39, True)
    assert b.differing[0][0] == 20 and b.differing[-1][1] < 60
    assert (a.index, a.differing) == (1, b.differing)
    assert "prefill chunk 1, positions 20 to 39, of which" in divergence_text(found)


@pytest.mark.parametrize("suffix", some_now([1, 2, 3], 1))
def test_reused_tokens_leave_the_cache_as_it_is(runs: Runs, suffix: int) -> None:
    asked = scenario(lengths=(16 + suffix,))
    whole = runs.record(model("llama"), asked)
    reused = runs.record(model("llama"), asked.with_changes(reuse_tokens=16))
    assert compare(whole, reused).identical
    (prefix,) = events(reused, "prefix")
    assert (prefix["from"], prefix["tokens"], prefix["forward"]) == (0, 16, 0)
    rows = [line["rows"][0]["count"] for line in reused.forwards()]
    assert rows[: 1 + (suffix > 1)] == [16, *([suffix - 1] if suffix > 1 else [])]


def test_reused_tokens_part_where_the_suffix_takes_another_path(runs: Runs) -> None:
    """16 + 3 tokens in one forward of 18 rows, against 16 rows and 2 rows, of which the latter go row by row."""
    asked = scenario(lengths=(19,), kernels="candle-metal", split_rows=4, max_tokens=4)
    whole = runs.record(model("llama"), asked)
    found = compare(whole, runs.record(model("llama"), asked.with_changes(reuse_tokens=16)))
    (request,) = found.requests
    assert request.origin is not None and request.origin.position in (16, 17)
    assert request.origin.path_a != request.origin.path_b
    assert request.cache_entry is None or request.cache_entry.position >= 16
    assert [chunk.index for chunk in request.chunks] == [0, 1]


def test_recording_events_changes_no_logits(runs: Runs) -> None:
    for asked in (scenario(**CONTINUOUS), scenario("static"), scenario(lengths=(19,), reuse_tokens=16)):
        trace = runs.record(model("llama"), asked, RecordOptions(observe=6))
        assert trace.header["observer"]["equal"] is True
