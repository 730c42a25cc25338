"""A model's sites as operations: found by name, run with its own weights, swept by shape."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import run
from mlx_lm.models import llama
from tiny import CONFIGS, tiny

from detdiff.engines.mlx.model import load
from detdiff.engines.mlx.probe_operations import find_site, shapes_of, sites_of
from detdiff.engines.mlx.taps.forward import memory
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


def _halves_of_transposed_rows(monkeypatch: pytest.MonkeyPatch, *, transposed: bool) -> None:
    """A linear layer that sums four rows or more in another order where they lie side by side, and a model that gives it such."""
    native, mlp = nn.Linear.__call__, llama.MLP.__call__

    def linear(self: nn.Linear, x: mx.array) -> mx.array:
        strides = memory(x).strides
        if strides[-1] < strides[-2] or x.shape[-2] < 4:
            return native(self, x)
        half = x.shape[-1] // 2
        return x[..., half:] @ self.weight[:, half:].T + x[..., :half] @ self.weight[:, :half].T

    def turned(self: nn.Module, x: mx.array) -> mx.array:
        hidden = nn.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(mx.contiguous(hidden.swapaxes(1, 2)).swapaxes(1, 2))

    monkeypatch.setattr(nn.Linear, "__call__", linear)
    monkeypatch.setattr(llama.MLP, "__call__", turned if transposed else mlp)


@pytest.mark.parametrize("transposed", [True, False])
def test_rows_lie_as_the_models_own_call_has_them(
    transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8: rows that follow each other take another kernel than those that the model gives, and show nothing of it."""
    config = {**CONFIGS["llama"], "num_hidden_layers": 1, "detdiff_random": {"seed": 0, "dtype": "float32"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _halves_of_transposed_rows(monkeypatch, transposed=transposed)
    loaded = load(str(tmp_path))
    site = next(one.site for one in sites_of(loaded) if one.site.endswith("mlp.down_proj"))
    found = probe(find_site(loaded, site), rows="1..6", seeds=2, timed=False)
    assert found.classes == (((1, 2, 3), (4, 5, 6)) if transposed else ((1, 2, 3, 4, 5, 6),))
    assert ("transposed" in found.lies) is transposed
    asked = (
        "probe",
        "--model",
        tmp_path,
        "--site",
        site,
        "--rows",
        "1..6",
        "--seeds",
        "2",
        "--no-time",
        "--json",
    )
    answer = json.loads(run(*asked).stdout)
    assert answer["classes"] == [list(members) for members in found.classes]
    assert any("transposed" in note for note in answer["notes"]) is transposed
    # The site beside it has rows that follow each other, in either model.
    assert not probe(find_site(loaded, site.replace("down", "up")), rows="1..6", seeds=2, timed=False).lies
