"""A cache that keeps fewer positions is another configuration; one that loses what it should keep, or keeps other ones in a batch, is not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache
from runs import model, patched, scenario

from detdiff.explain import explain
from detdiff.scenario import Scenario

ASKED: dict[str, Any] = {"lengths": (9, 7), "max_tokens": 3}


def test_a_smaller_cache_is_another_configuration() -> None:
    verdict = explain(scenario(**ASKED), scenario(**ASKED, max_kv_size=8), loaded=model("qwen3"))
    assert (verdict.kind, verdict.rule) == ("configuration", "cache-size"), verdict.sentence
    assert (
        "all positions in a and 8 positions in b (max_kv_size), and no row differs before" in verdict.sentence
    )
    assert verdict.control("cache_size").result == "removed"


def test_a_position_that_is_lost_before_its_time_is_none_of_the_size() -> None:
    native = RotatingKVCache.update_and_fetch

    def lossy(self: Any, keys: mx.array, values: mx.array) -> Any:
        keys, values = native(self, keys, values)
        return keys * (mx.arange(keys.shape[2]) != 2)[:, None], values

    undo = patched(RotatingKVCache, "update_and_fetch", lossy)
    try:
        verdict = explain(scenario(**ASKED), scenario(**ASKED, max_kv_size=8), loaded=model("qwen3"))
    finally:
        undo()
    assert verdict.kind == "bug" and "position 2" in verdict.sentence, verdict.sentence


@pytest.mark.thorough
def test_the_positions_that_a_batch_forgets_are_named() -> None:
    asked = {**ASKED, "max_kv_size": 8}
    verdict = explain(scenario(**asked), scenario("static", **asked), loaded=model("qwen3"))
    assert verdict.kind == "bug" and "layers.0.self_attn.cache.read, position 8 of r0" in verdict.sentence


PROMPTS = ([43, 52, 30, 34, 65, 44, 79, 61, 69, 23, 20, 44, 46, 72, 28, 77, 69], [60, 69, 60])


def beside_padding() -> Any:
    """A long prompt and a short one: the short one's rows lie in a ring that padding has filled up."""
    requests = [{"tokens": tokens, "max_tokens": 3} for tokens in PROMPTS]
    sides = (
        Scenario.from_dict({"model": "tiny", "request": requests, "schedule": schedule, **more})
        for schedule, more in (("serial", {}), ("static", {"max_kv_size": 8}))
    )
    return explain(*sides, loaded=model("qwen3"))


@pytest.mark.thorough
def test_rounding_before_the_first_position_goes_is_no_reason_to_doubt_the_size() -> None:
    verdict = beside_padding()
    origins = {request.id: request.origin for request in verdict.divergence.requests}
    assert origins["r1"].site.endswith("attention") and origins["r1"].position < 8
    assert "what differs before one has gone is rounding" in verdict.sentence
    assert (verdict.kind, verdict.rule) == ("configuration", "cache-size"), verdict.sentence


@pytest.mark.thorough
def test_attention_that_is_wrong_over_a_limited_cache_is_none_of_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = qwen3.scaled_dot_product_attention

    def wrong(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **more: Any) -> mx.array:
        y = native(queries, keys, values, cache=cache, **more)
        return y * 1.01 if isinstance(cache, BatchRotatingKVCache) else y

    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", wrong)
    verdict = beside_padding()
    assert verdict.kind == "bug" and "layers.0.self_attn" in verdict.sentence, verdict.sentence


@pytest.mark.thorough
def test_draws_that_differ_for_another_reason_do_not_hide_the_size() -> None:
    """In a batch mlx-lm's requests draw from one random state, so that their tokens stay others with caches that keep everything."""
    requests = [
        {"tokens": tokens, "max_tokens": 3} for tokens in ([6, 84, 64, 27, 77, 3, 9], [*range(20, 30)])
    ]
    asked = {"model": "tiny", "request": requests, "sampler": "mlx-lm", "temperature": 1.0, "seed": 0}
    sides = (
        Scenario.from_dict({**asked, **more})
        for more in ({"schedule": "static", "max_kv_size": 5}, {"schedule": "serial"})
    )
    verdict = explain(*sides, loaded=model("qwen3"))
    assert (verdict.kind, verdict.rule) == ("configuration", "cache-size"), verdict.sentence
    control = verdict.control("cache_size")
    assert control.result == "removed" and "drawn from equal logits" in control.sentence
