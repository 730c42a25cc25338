"""Caches that nobody knows: nothing is presumed of them, what is not recorded is said, and faults are found at their site."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache
from odd_caches import LatentCache, SinkCache, chunked, indexed, narrowing, odd
from runs import Runs, content, scenario
from toy_models import Attention

from detdiff.compare import compare
from detdiff.engines.base import RunOptions
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.explain import explain
from detdiff.trace import Trace

NINE = [{"id": "r", "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9]}]
LACKS = "the cache of layers 0, 2 is not recorded: class LatentCache"


def run(runs: Runs, loaded: LoadedModel, *injected_faults: InjectedFault, **keys: Any) -> Trace:
    asked = scenario(**{"max_tokens": 1, "request": NINE, **keys})
    return runs.record(loaded, asked, RunOptions(observe=0, faults=injected_faults))


@pytest.mark.parametrize("other", [{"prefill_chunk": 2}, {"reuse_tokens": 6}, {"prefill_chunk": 3}])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_mask_that_sees_less_than_its_cache_holds_is_sound(
    runs: Runs, other: dict[str, Any], tokens: int
) -> None:
    loaded = chunked()
    a, b = (run(runs, loaded, max_tokens=tokens, **keys) for keys in ({}, other))
    found = compare(a, b)
    assert found.identical, found.requests
    assert "lacks" not in a.header
    assert explain(a, b, loaded=loaded).kind == "identical"


def test_a_mask_that_a_model_changes_in_place_is_what_attention_was_given(runs: Runs) -> None:
    # Masks are looked at when their forward is digested, long after the model went on with them.
    loaded = narrowing(in_place=True)
    a, b = (run(runs, loaded, max_tokens=2, **keys) for keys in ({}, {"prefill_chunk": 1}))
    found = compare(a, b)
    assert found.identical, found.requests
    assert content(a) == content(run(runs, narrowing(in_place=False), max_tokens=2))


def test_an_entry_that_changes_in_a_chunked_cache_is_found(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, sound = chunked(), ChunkedKVCache.update_and_fetch

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        if self.offset == 6:
            self.keys[:, 1, 5 - self.start_position] = 0
        return sound(self, keys, values)

    a = run(runs, loaded)
    monkeypatch.setattr(ChunkedKVCache, "update_and_fetch", update_and_fetch)
    found = compare(a, run(runs, loaded, prefill_chunk=2))
    (request,) = found.requests
    assert request.origin is not None
    assert (request.origin.site, request.origin.how) == ("layers.0.self_attn.cache.read", "changed")
    assert (request.origin.position, request.origin.changes[0].position) == (6, 5)


def test_values_that_a_model_throws_away_itself_are_no_changed_entries(runs: Runs) -> None:
    loaded = indexed()
    a, b = (run(runs, loaded, max_tokens=6, **keys) for keys in ({}, {"prefill_chunk": 4}))
    ports = {site.name: site.outputs for site in a.sites if site.kind == "cache_write" and site.layer == 0}
    assert ports["layers.0.self_attn.indexer.cache.write"] == ("K.0",)
    assert ports["layers.0.self_attn.cache.write"] == ("K.0", "V.0")
    found = compare(a, b)
    assert found.identical and not found.bookkeeping
    wrong = compare(a, run(runs, loaded, InjectedFault("layers.1.self_attn.indexer.wk", 0, 3), max_tokens=6))
    entry = wrong.requests[0].cache_entry
    assert wrong.requests[0].origin is not None and entry is not None
    assert wrong.requests[0].origin.site == "layers.1.self_attn.indexer.wk"
    assert (entry.layer, entry.kind, entry.position) == (1, "K", 3)


def test_a_cache_without_a_write_to_see_is_named(runs: Runs) -> None:
    loaded = odd()
    a, b = run(runs, loaded, max_tokens=4), run(runs, loaded, max_tokens=4, prefill_chunk=2)
    assert a.header["lacks"] == {"cache": LACKS}
    kinds = {site.name: site.kind for site in a.sites}
    assert kinds["layers.0.self_attn"] == "stateful"
    assert [site.layer for site in a.sites if site.kind == "cache_write"] == [1]
    found = compare(a, b)
    assert found.identical and not found.bookkeeping
    assert f"both runs: {LACKS}" in found.notes
    assert found.a.lacks == {"cache": LACKS}


def test_what_an_unknown_cache_loses_is_found_where_it_is_first_read(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, sound = odd(), LatentCache.append

    def append(self: LatentCache, latent: mx.array) -> mx.array:
        if self.seen == 4 and self.latent is not None:
            self.latent = mx.concatenate([self.latent[:, :3], mx.zeros_like(self.latent[:, 3:])], axis=1)
        return sound(self, latent)

    a = run(runs, loaded)
    monkeypatch.setattr(LatentCache, "append", append)
    found = compare(a, run(runs, loaded, prefill_chunk=2))
    (request,) = found.requests
    assert request.origin is not None
    assert (request.origin.site, request.origin.position) == ("layers.0.self_attn", 4)
    assert request.origin.between[-1] == "layers.0.self_attn.o_proj.in"
    # What later rows read is inherited: each layer's cache is an origin once at most.
    assert [count.count for count in request.origins if count.layer == 0] == [1]
    assert found.bookkeeping == ()


def evicting(runs: Runs) -> tuple[LoadedModel, Trace, Trace]:
    loaded = odd(Attention, SinkCache)
    return loaded, run(runs, loaded), run(runs, loaded, prefill_chunk=1)


def test_a_cache_that_gives_back_fewer_rows_is_no_bug(runs: Runs) -> None:
    loaded, a, b = evicting(runs)
    assert a.header["lacks"] == {"cache": LACKS.replace("LatentCache", "SinkCache")}
    found = compare(a, b)
    (request,) = found.requests
    assert request.origin is not None
    assert (request.origin.site, request.origin.kind) == ("layers.0.self_attn.attention", "attention")
    # The first row whose past is longer than what such a cache gives back.
    assert (request.origin.position, request.origin.how) == (5, "leaf")
    assert found.bookkeeping == ()
    assert explain(a, b, loaded=loaded).kind != "bug"
    assert compare(a, run(runs, loaded)).identical


@pytest.mark.parametrize("site", ["layers.0.self_attn.o_proj", "layers.2.mlp", "layers.0.self_attn.qkv_proj"])
def test_a_fault_beside_an_unknown_cache_is_found_at_its_site(runs: Runs, site: str) -> None:
    loaded = odd(Attention, SinkCache)
    found = compare(run(runs, loaded), run(runs, loaded, InjectedFault(site, position=3, request=0)))
    (request,) = found.requests
    assert request.origin is not None
    assert (request.origin.site, request.origin.position, request.origin.how) == (site, 3, "leaf")
