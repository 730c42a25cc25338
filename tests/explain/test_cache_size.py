"""A cache that keeps fewer positions is another configuration; one that loses what it should keep, or keeps other ones in a batch, is not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache
from runs import model, patched, scenario

from detdiff.explain import explain

ASKED: dict[str, Any] = {"lengths": (9, 7), "max_tokens": 3}


def test_a_smaller_cache_is_another_configuration() -> None:
    verdict = explain(scenario(**ASKED), scenario(**ASKED, max_kv_size=8), loaded=model("qwen3"))
    assert (verdict.kind, verdict.rule) == ("configuration", "cache-size"), verdict.sentence
    assert "all positions in a and 8 positions in b" in verdict.sentence
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
