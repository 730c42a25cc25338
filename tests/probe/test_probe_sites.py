"""A model's sites as operations: found by name, run with its own weights, swept by shape."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tiny import tiny

from detdiff.engines.mlx.probe_operations import find_site, shapes_of
from detdiff.errors import ProbeSiteUnknown
from detdiff.probe import probe


@pytest.mark.parametrize("fmt", ["f32", "q4"])
@pytest.mark.parametrize("on", ["native", "candle-metal", "rows"])
def test_a_sites_error_is_that_of_its_own_weights_and_bias(fmt: str, on: str) -> None:
    loaded = tiny("qwen2", fmt)
    site = find_site(loaded, "layers.1.self_attn.q_proj", on)
    site.module["bias"] = mx.arange(64).astype(mx.float32)
    found = probe(site, rows="1..3", seeds=2, timed=False)
    assert found.errors is not None
    # candle-metal/mm rounds dequantised weights to float16; everything else is float32.
    worst = max(error.max_relative or 0.0 for error in found.errors)
    assert 0 < worst < (1e-3 if on == "candle-metal" else 1e-5)
    assert found.n == 64


@pytest.mark.parametrize(
    ("name", "head"), [("llama", "embed_tokens.as_linear"), ("qwen2", "lm_head"), ("phi3", "lm_head")]
)
def test_each_linear_site_is_of_one_shape(name: str, head: str) -> None:
    loaded = tiny(name, "bf16")
    found = shapes_of(loaded)
    sites = [site for one in found for site in one.sites]
    assert len(sites) == len(set(sites)) and head in sites
    keys = [(one.shape, one.op) for one in found]
    assert len(keys) == len(set(keys))
    for one in found:
        assert one.op == ("head" if one.sites == (head,) else "linear")
        assert {find_site(loaded, site).shape for site in one.sites} == {one.shape}
        assert one.shape.dtype == "bfloat16" and one.shape.bits is None


def test_a_quantised_model_is_swept_by_bits_and_group_size() -> None:
    shapes = {one.shape for one in shapes_of(tiny("qwen2", "q4"))}
    assert {(shape.bits, shape.group_size, shape.dtype) for shape in shapes} == {(4, 32, "float32")}
    assert {shape.k for shape in shapes} == {64, 128}


def test_a_site_that_works_on_more_than_rows_is_refused() -> None:
    with pytest.raises(ProbeSiteUnknown, match=r"the nearest of .* are .*layers\.0\.self_attn"):
        find_site(tiny("llama"), "layers.0.self_attn.attention")
