"""Which entries rows saw, from the mask and keys that attention was given: wrong masks and short caches are named, sound ones are not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from every_model import build
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import KVCache
from runs import Runs, events, model, scenario
from tiers import some_now

from detdiff.compare import compare
from detdiff.explain import explain
from detdiff.trace import Trace


def limited(trace: Trace) -> list[dict[str, Any]]:
    """What forwards say of rows that do not see just the positions from 0 to their own."""
    return [
        {"in": line["forward"], "layers": note["layers"], **row}
        for line in trace.forwards()
        for note in line["caches"]
        for row in note.get("sees", ())
    ]


def test_windows_and_chunks_are_read_off_their_masks(runs: Runs) -> None:
    sliding = limited(runs.record(model("gemma3_text"), scenario(lengths=(20,), max_tokens=1)))
    assert sliding[:2] == [
        {"in": 0, "layers": "0-1,3-4", "request": 0, "rows": [16, 18], "first": 1, "slides": True},
        {"in": 1, "layers": "0-1,3-4", "request": 0, "rows": [19, 19], "first": 4},
    ]
    chunked = limited(runs.record(build("llama4"), scenario(lengths=(20,), max_tokens=1)))
    firsts = {(row["rows"][0], row["rows"][1]): row["first"] for row in chunked if row["in"] < 2}
    assert firsts == {(8, 15): 8, (16, 18): 16, (19, 19): 16}
    assert limited(runs.record(model("llama"), scenario("static", lengths=(9, 3), max_tokens=2))) == []


@pytest.mark.parametrize("hidden", some_now([2, 4], 0))
def test_a_mask_that_hides_an_entry_is_named_by_the_row_that_misses_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    of, sound = model("llama"), KVCache.make_mask
    a = runs.record(of, scenario(lengths=(12,), max_tokens=3, prefill_chunk=6))
    again = runs.record(of, scenario(lengths=(12,), max_tokens=3, prefill_chunk=4))
    assert compare(a, again).identical

    def make_mask(self: Any, rows: int, *args: Any, **kw: Any) -> Any:
        if rows == 1 or self.offset != 4:
            return sound(self, rows, *args, **kw)
        mask = caches.create_causal_mask(rows, self.offset)
        mask[:, hidden] = False
        return mask

    monkeypatch.setattr(KVCache, "make_mask", make_mask)
    b = runs.record(of, scenario(lengths=(12,), max_tokens=3, prefill_chunk=4))
    origin = compare(a, b).requests[0].origin
    assert origin is not None and (origin.how, origin.layer, origin.position) == ("visible", 0, 4)
    assert limited(b)[0]["sees"] == ("0-1,3-4" if hidden == 2 else "0-3")
    assert events(b) == []
    verdict = explain(a, b, loaded=of)
    assert (verdict.kind, verdict.rule) == ("bug", "reading")
    assert "layers.0.self_attn" in verdict.sentence and "position 4 of r0" in verdict.sentence


def test_a_mask_without_its_padding_shows_rows_of_nobody(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    of, sound = model("llama"), caches.create_causal_mask
    lengths = {"lengths": (9, 3), "max_tokens": 3}
    a = runs.record(of, scenario(**lengths))
    monkeypatch.setattr(
        caches, "create_causal_mask", lambda *args, left_padding=None, **kw: sound(*args, **kw)[None, None]
    )
    b = runs.record(of, scenario("static", **lengths))
    found = compare(a, b)
    assert found.request("r0").identical
    origin = found.request("r1").origin
    assert origin is not None and (origin.layer, origin.how, origin.position) == (0, "visible", 2)
    (first, *_) = [finding for finding in found.bookkeeping if finding.what == "cache_foreign"]
    assert first.request == "r1" and "which no recorded row wrote" in first.detail
    assert explain(a, b, loaded=of).kind == "bug"


def test_a_cache_that_gives_back_a_slice_lost_entries_and_changed_none(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, sound = model("llama"), KVCache.update_and_fetch
    keys = {"lengths": (12,), "max_tokens": 3}
    a = runs.record(of, scenario(**keys))
    assert compare(a, runs.record(of, scenario(prefill_chunk=3, **keys))).identical

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        found = sound(self, keys, values)
        self.chunked = getattr(self, "chunked", False) or keys.shape[2] == 3
        return tuple(side[..., 4:, :] for side in found) if keys.shape[2] == 1 and self.chunked else found

    monkeypatch.setattr(KVCache, "update_and_fetch", update_and_fetch)
    b = runs.record(of, scenario(prefill_chunk=3, **keys))
    found = compare(a, b)
    assert {finding.what for finding in found.bookkeeping} == {"cache_missing"}
    assert "did not see 4 of its own entries, the first of position 0" in found.bookkeeping[0].detail
    origin = found.requests[0].origin
    assert origin is not None and (origin.kind, origin.how, origin.position) == ("cache_read", "visible", 11)
    assert explain(a, b, loaded=of).kind == "bug"
