"""Kinds of what people reported that ``compare`` answers: one answer from the command line and from Python, and a healthy twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import run
from reported import LLAMA, SMALL, Answer, Ask, Asked, Kind, directory, engine, module
from tiers import some_now
from torch_models import torch_or_skip

import detdiff


def a_setting(body: str) -> Ask:
    """Two settings of one engine, of which the second does what ``body`` says where it is on."""
    name = f"made_{crc32(body.encode())}"

    def ask(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
        on = "true" if ill else "false"
        asked = f"tokens=1,2,3 max_tokens=2 {engine(folder, patch, name, body)}"
        return Asked(asked, "engine.on=false", f"engine.on={on}", "m")

    return ask


def a_prefix_that_is_reused(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # Warm, the engine computes the last row of the prompt and those behind it, and has no rows for what it kept.
    body = (
        "warm = 2 * on\n"
        f"taps['layer'] = Tap((2 * x + np.float32({ill} and on))[warm:], x[warm:], positions=np.arange(warm, len(x)))"
    )
    asked = f"tokens=1,2,3 max_tokens=2 {engine(folder, patch, f'kept_{ill}', body)}"
    return Asked(asked, "engine.on=false", "engine.on=true", "m")


LLAMA4 = {
    "model_type": "llama4", "text_config": {
        **SMALL, "num_hidden_layers": 4, "attention_bias": False, "attention_chunk_size": 4, "head_dim": 16, "interleave_moe_layer_step": 2,
        "intermediate_size": 64, "intermediate_size_mlp": 128, "model_type": "llama4_text", "num_experts_per_tok": 1,
        "num_local_experts": 4, "rope_scaling": None, "use_qk_norm": True,
    },
}  # fmt: skip


def a_chunked_cache(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from mlx_lm.models.cache import ChunkedKVCache

    sound = ChunkedKVCache.update_and_fetch

    def lossy(self: Any, keys: mx.array, values: mx.array) -> Any:
        if self.offset == 6:
            self.keys[:, 1, 5 - self.start_position] = 0
        return sound(self, keys, values)

    if ill:
        patch.setattr(ChunkedKVCache, "update_and_fetch", lossy)
    both = "tokens=1,2,3,4,5,6,7,8,9 max_tokens=1"
    return Asked(both, "prefill_chunk=2048", "prefill_chunk=2", directory(folder / "llama4", LLAMA4))


def a_cache_quantised_whole(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    b = "kv_bits=8 kv_group_size=32" if ill else "prefill_chunk=4"
    wide = {**LLAMA, "hidden_size": 64, "num_hidden_layers": 2}
    tokens = ",".join(map(str, range(1, 12)))
    return Asked(f"tokens={tokens} max_tokens=4", "prefill_chunk=2048", b, directory(folder / "llama", wide))


def other_weights(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    one, two = (
        directory(folder / "one", LLAMA),
        directory(folder / "two", LLAMA, "bfloat16" if ill else "float32"),
    )
    return Asked("tokens=1,2,3 max_tokens=2", f"model={one}", f"model={two}", more={"across_models": True})


SINK = """
import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

class SinkCache(KVCache):
    def update_and_fetch(self, keys, values):
        held = super().update_and_fetch(keys, values)
        newest = max(1, self.offset - 4)
        if keys.shape[2] > 1:
            return held
        return tuple(mx.concatenate([side[..., :1, :], side[..., newest:, :]], axis=2) for side in held)

class ModelArgs(llama.ModelArgs):
    pass

class Model(llama.Model):
    def make_cache(self):
        return [SinkCache() for _ in self.layers]
"""


def a_cache_that_evicts(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    model = directory(folder / "own", LLAMA, code=SINK)
    both = "tokens=1,2,3,4,5,6,7,8,9 max_tokens=1 engine.custom_code=true"
    return Asked(both, "prefill_chunk=2048", f"prefill_chunk={1 if ill else 64}", model)


TORCH = """
from torch_models import row_by_row, torch_or_skip
from detdiff.engines.transformers import TransformersEngine

def engine(model=None, settings=None):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch = torch_or_skip()
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=4, layer_types=["full_attention"], eos_token_id=None,
        bos_token_id=None, pad_token_id=0, attn_implementation="eager",
    )
    made = row_by_row(torch, Gemma3ForCausalLM(config).eval())

    def fault(module, args, output):
        # [batch, heads, rows, width]
        changed = output.clone()
        if output.shape[0] == 2 and output.shape[2] == 3:
            changed[1, :, 1] += 1
        return changed

    if ILL:
        made.get_submodule("model.layers.0.self_attn.q_norm").register_forward_hook(fault)
    return TransformersEngine(made, name="tiny")
"""


def a_norm_over_heads_in_torch(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    torch_or_skip()
    module(folder, patch, "torch_engine", TORCH.replace("ILL", str(ill)))
    both = "tokens=1,2,3;4,5,6 max_tokens=2 engine=torch_engine:engine"
    return Asked(both, "schedule=serial", "schedule=static", "m")


def request(answer: Answer) -> Answer:
    (found,) = answer["requests"]
    return dict(found)


KINDS = (
    Kind(
        "A1 a mask that sees less than its cache holds", a_chunked_cache,
        lambda found: request(found)["origin"]["how"] == "changed" and request(found)["origin"]["position"] == 6,
    ),
    Kind(
        "A3 a cache converted whole", a_cache_quantised_whole,
        lambda found: request(found)["cache_entry"]["position"] == 0
        and request(found)["differing_entries"]["count"] == request(found)["differing_entries"]["entries"],
    ),
    Kind(
        "A7 a norm over heads in torch", a_norm_over_heads_in_torch,
        lambda found: found["requests"][0]["identical"]
        and found["requests"][1]["origin"]["site"] == "model.layers.0.self_attn.q_norm"
        and found["requests"][1]["origin"]["position"] == 1,
    ),
    Kind(
        "A9 a cache that evicts", a_cache_that_evicts,
        lambda found: request(found)["origin"]["site"] == "layers.0.self_attn.attention"
        and request(found)["origin"]["position"] == 5 and not found["bookkeeping"]
        and any("not recorded: class SinkCache" in note for note in found["notes"]),
    ),
    Kind(
        "A10 sizes in the dtype that was computed", a_setting("scores[1] -= 0.03 * on"),
        lambda found: abs(request(found)["scores"]["max_abs"] - 0.03) < 1e-3
        and request(found)["scores"]["max_ulp"] < 1 << 20,
    ),
    Kind(
        "A10 all logits NaN on both sides", a_setting("top = ([[7, 8]] * 2, [[float('nan') if on else 2.0, 1.0]] * 2)"),
        lambda found: not found["identical"],
    ),
    Kind(
        "A11 logits are equal and the token is another",
        a_setting("top, tokens = ([[7, 8]] * 2, [[2.0, 1.0], [1.0, 2.0]]), [7, 7 if on else 8]"),
        lambda found: request(found)["logits_equal"] and request(found)["flip"]["index"] == 1,
    ),
    Kind(
        "B12 two settings of one engine", a_setting("taps['twice'] = Tap(2 * x + np.float32(on), x)"),
        lambda found: request(found)["origin"]["site"] == "twice" and found["b"]["scenario"]["engine"]["on"] is True,
    ),
    Kind(
        "B13 two sets of weights", other_weights,
        lambda found: found["across_models"] and request(found)["stage"] is not None,
    ),
    Kind(
        "B14 a prefix that is reused", a_prefix_that_is_reused,
        lambda found: request(found)["origin"]["site"] == "layer" and request(found)["origin"]["position"] == 2
        and request(found)["flip"] is None and not found["bookkeeping"],
        lambda found: found["identical"] and request(found)["rows"] == 2 and not found["bookkeeping"],
    ),
)  # fmt: skip


@pytest.mark.parametrize("kind", some_now(KINDS, 4, 6, 7), ids=lambda kind: str(getattr(kind, "name", kind)))
def test_a_kind_is_answered_alike_and_its_twin_is_identical(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.check(tmp_path, monkeypatch)


@pytest.mark.parametrize("ill", [True, False])
def test_a_comparison_prints_as_its_report(
    ill: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B18: of traces and of paths of traces; a Divergence and a Verdict print what the command prints."""
    asked = a_setting("scores[1] -= 0.03 * on")(tmp_path, monkeypatch, ill)
    asked.python("compare", tmp_path)
    a, b = tmp_path / "a", tmp_path / "b"
    found = detdiff.compare(detdiff.Trace.open(a), str(b))
    assert str(found) == run("compare", a, b).stdout and len(str(found)) < 3000
    assert ("by at most 0.03" in str(found)) is ill
    verdict = detdiff.explain(a, b, controls=("oracle",))
    assert str(verdict) == run("explain", a, b, "--control", "oracle").stdout
    assert (verdict.kind == "identical") is not ill


@pytest.mark.thorough
@pytest.mark.parametrize("ill", [True, False])
def test_a_chunk_of_one_row_is_said_as_one(
    ill: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D27: no "positions 11 to 11, of which 11 differ"."""
    native = nn.Linear.__call__

    def off(self: nn.Linear, x: mx.array) -> mx.array:
        return native(self, x) * (1 + 0.1 * (x.shape[-2] == 1))

    if ill:
        monkeypatch.setattr(nn.Linear, "__call__", off)
    both = f"tokens={','.join(map(str, range(1, 15)))} max_tokens=1"
    Asked(both, "prefill_chunk=64", "prefill_chunk=4", directory(tmp_path / "llama", LLAMA)).python(
        "compare", tmp_path
    )
    a, b = tmp_path / "a", tmp_path / "b"
    text = str(detdiff.compare(a, b))
    assert text == run("compare", a, b).stdout
    assert ("prefill chunk 0, positions 0 to 12, of which position 12 differs" in text) is ill
    assert ("prefill chunk 3, position 12, which differs; earlier ones are equal" in text) is ill
    assert ("are identical" in text) is not ill
