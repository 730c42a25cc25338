"""Models that are sound and unusual: layers that run twice, calls by keyword, projections that give lists."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from every_model import build
from runs import Runs, digests, events, loaded, scenario
from tiers import some_now
from toy_models import CastAttention, Keyworded, Listing, Looped, Toy

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.scenario import Scenario

ODD: dict[str, Callable[[], nn.Module]] = {
    "looped": Looped,
    "keyworded": Keyworded,
    "listing": lambda: Toy(mixer=Listing),
    "cast": lambda: Toy(CastAttention),
}


def odd(name: str, dtype: mx.Dtype = mx.float32) -> LoadedModel:
    mx.random.seed(5)
    built = ODD[name]()
    built.set_dtype(dtype)
    return loaded(built, name)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("layout", some_now(["padded", "packed"], 0))
def test_they_are_recorded_like_any_other(runs: Runs, name: str, layout: str) -> None:
    of = odd(name, mx.bfloat16 if name == "cast" else mx.float32)
    base = runs.record(of, scenario(), RecordOptions(observe=100))
    other = runs.record(of, scenario("continuous", layout, arrivals=(0, 2, 5)))
    assert base.header["observer"]["equal"] is True
    found = compare(base, other)
    assert found.identical and found.compared.unattributed == 0
    assert events(base) == events(other) == []
    kinds = [site.kind for site in base.sites]
    passes = 2 if name == "looped" else 1
    assert kinds.count("block") == kinds.count("attn_block") == kinds.count("cache_write") == 2 * passes
    assert len({site.name for site in base.sites}) == len(base.sites)


def test_the_second_time_through_a_layer_is_a_site_of_its_own(runs: Runs) -> None:
    of = odd("looped")
    base = runs.record(of, scenario())
    parents = {site.name: site.parent for site in base.sites}
    assert parents["layers.0.self_attn.qkv_proj"] == "layers.0.self_attn"
    assert parents["layers.0.self_attn.qkv_proj.2"] == "layers.0.self_attn.2"
    assert parents["layers.0.self_attn.2"] == "layers.0.2"
    found = digests(base)
    seen = set()
    for again in ("", ".2"):
        kv = found[0, 5, f"layers.1.self_attn.attention{again}", "kv"]
        assert kv == found[0, 5, f"layers.1.self_attn.cache{again}.read", "read"]
        seen.add(kv)
    assert len(seen) == 2
    for site in ("layers.1.up_proj.2", "layers.0.self_attn.attention.2", "layers.0.2"):
        injected_fault = InjectedFault(site, 1, 2, 9)
        other = runs.record(of, scenario(), RecordOptions(observe=0, faults=(injected_fault,)))
        (hit,) = [request for request in compare(base, other).requests if request.origin is not None]
        assert hit.origin is not None
        assert (hit.id, hit.origin.site, hit.origin.position) == ("r1", site, 2)
        assert sum(count.count for count in hit.origins) == 1


def test_an_array_that_does_not_begin_with_the_batch_has_no_rows(runs: Runs) -> None:
    """gemma3n's layers give [streams, batch, rows, width]: the third request of a batch is no third stream."""
    of = build("gemma3n")
    asked = scenario("static", lengths=(13, 4, 9), max_tokens=3)
    base, other = runs.record(of, asked), runs.record(of, asked)
    assert compare(base, other).identical
    names = {site.name for site in base.sites}
    assert "language_model.layers.0" not in names and "language_model.layers.0.mlp" in names
    others = asked.to_dict()
    for request in others["request"][1:]:
        request["tokens"] = [token % 90 + 1 for token in request["tokens"]]
    beside = compare(base, runs.record(of, Scenario.from_dict(others)), requests=["r0"])
    assert beside.identical
