"""Kinds of what people reported, each asked as they would: one answer from the command line and from Python, and a healthy twin."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import run
from reported import (
    COUNTED,
    IDENTICAL,
    LLAMA,
    SMALL,
    TOKENS,
    Ask,
    Asked,
    Kind,
    Right,
    directory,
    engine,
    verdict,
)
from tiers import some_now

import detdiff
from detdiff import Scenario, explain
from detdiff.engines.mlx.model import load
from detdiff.engines.mlx.probe_operations import find_site
from detdiff.engines.mlx.taps.forward import memory
from detdiff.engines.mlx.taps.session import Session
from detdiff.errors import ModelCodeRefused
from detdiff.probe import probe

MINICPM3 = {
    **SMALL, "model_type": "minicpm3", "num_key_value_heads": 4, "dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32, "tie_word_embeddings": True,
    "rope_scaling": {
        "type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 512,
    },
}  # fmt: skip
QWEN3_NEXT = {
    **SMALL, "model_type": "qwen3_next", "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 2, "num_experts_per_tok": 1,
    "decoder_sparse_step": 1, "shared_expert_intermediate_size": 64, "mlp_only_layers": [], "moe_intermediate_size": 64,
    "partial_rotary_factor": 0.5, "head_dim": 16, "full_attention_interval": 2, "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS = {
    **SMALL, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "state_size": 16,
    "num_hidden_layers": 1, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
}  # fmt: skip
MAMBA2 = {
    **MAMBA, "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "intermediate_size": 64, "layer_norm_epsilon": 1e-5,
    "n_groups": 1, "tie_word_embeddings": True, "time_step_limit": [0.001, 100.0],
}  # fmt: skip
JUDGED = {"controls": ("repeat", "oracle")}
PINNED = {"controls": ("repeat", "oracle", "pin_kernels", "place")}
"""Those that a verdict rests on; what only says more is not run."""


def counting(folder: Path, patch: pytest.MonkeyPatch, name: str, shift: str, calls: str = "0") -> str:
    """What is asked of an engine whose tokens are counted on from the prompt's sum, and moved by ``shift``."""
    return f"{TOKENS} max_tokens=3 {engine(folder, patch, name, COUNTED.replace('SHIFT', shift), calls)}"


def race_in_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # Both need a batch: the race, and what changes with the number of rows.
    shift = "(self.calls % 7 + 1 if batch > 1 else 0)" if ill else "0"
    return Asked(counting(folder, monkeypatch, "racing_engine", shift, "self.calls"), model="m")


def rare_race(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # Two recordings miss it, and so do two repetitions of each side.
    shift = "int(self.calls == 9)" if ill else "0"
    asked = counting(folder, monkeypatch, "rare_engine", shift, "self.calls").replace(TOKENS, "tokens=1,2,3")
    return Asked(asked, model="m", more={"repeats": 6})


def state_between_calls(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    return Asked(
        counting(folder, monkeypatch, "warm_engine", "int(self.calls > 1)" if ill else "0"), model="m"
    )


DOUBLE = """
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention  # attention is a site of this file, too

class ModelArgs(llama.ModelArgs):
    pass

class Model(llama.Model):
    def __call__(self, inputs, cache=None, **kw):
        y = super().__call__(inputs, cache=cache, **kw)
        return y * (SCALE if inputs.shape[0] > 1 else 1)
"""


QWEN3 = {**SMALL, "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32}
QUANTISED = "kv_bits=8 kv_group_size=32"


def lost_in_quantising(flags: str) -> Ask:
    """Keys are lost where the cache is quantised, which another setting of side a does elsewhere, or not at all."""

    def ask(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
        from mlx_lm.models.cache import KVCache

        native = KVCache.to_quantized

        def lossy(self: KVCache, group_size: int = 64, bits: int = 4) -> Any:
            keys, self.keys = self.keys, mx.zeros_like(self.keys)
            found = native(self, group_size, bits)
            self.keys = keys
            return found

        if ill:
            monkeypatch.setattr(KVCache, "to_quantized", lossy)
        both = f"tokens={','.join(map(str, range(1, 12)))} max_tokens=3"
        controls = {"controls": ("repeat", "configuration")}
        return Asked(both, flags, QUANTISED, directory(folder / "qwen3", QWEN3), controls)

    return ask


def quantised_attention_off(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # The sides are to differ, and that is not all that there is.
    from mlx_lm.models import base

    native = base.quantized_scaled_dot_product_attention

    def off(queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, **kw: Any) -> mx.array:
        return native(queries, keys, values, 1.1 * scale, mask, **kw)

    if ill:
        monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", off)
    both = f"tokens={','.join(map(str, range(1, 12)))} max_tokens=3"
    return Asked(both, "schedule=serial", QUANTISED, directory(folder / "qwen3", QWEN3))


def mask_without_padding(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from mlx_lm.models import minicpm3

    native = minicpm3.create_attention_mask

    def blind(h: mx.array, cache: Any = None, **kw: Any) -> Any:
        mask = native(h, cache, **kw)
        if not isinstance(mask, mx.array):
            return mask
        rows, keys = h.shape[1], mask.shape[-1]
        return mx.arange(keys) <= mx.arange(keys - rows, keys)[:, None]

    if ill:
        monkeypatch.setattr(minicpm3, "create_attention_mask", blind)
    return Asked(f"{TOKENS} max_tokens=2", model=directory(folder / "minicpm3", MINICPM3), more=JUDGED)


def padding_through_a_state(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from mlx_lm.models import qwen3_next

    if ill:
        monkeypatch.setattr(qwen3_next, "create_ssm_mask", lambda *args, **kw: None)
    return Asked(f"{TOKENS} max_tokens=2", model=directory(folder / "qwen3_next", QWEN3_NEXT))


def padding_through_mambas_state(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # A fault of mlx-lm's own (docs/findings.md); prompts of one length have no padding.
    tokens = TOKENS if ill else "tokens=1,2,3;4,5,6"
    return Asked(f"{tokens} max_tokens=2", model=directory(folder / "mamba", MAMBA))


def state_that_decays_over_padding(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # Whatever is in the padding: how much of it there is counts.
    from mlx_lm.models import gated_delta

    native = gated_delta.gated_delta_ops

    def decaying(*args: Any) -> Any:
        y, state = native(*args)
        mask = args[6]
        if mask is not None:
            state = state * mx.power(0.9, (~mask).sum(axis=1))[:, None, None, None]
        return y, state

    if ill:
        monkeypatch.setattr(gated_delta, "gated_delta_ops", decaying)
    return Asked(f"{TOKENS} max_tokens=2", model=directory(folder / "qwen3_next", QWEN3_NEXT), more=JUDGED)


def state_in_other_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # A sound model: sums of a chunk are taken in another order than from chunk to chunk.
    numbers = ",".join(map(str, range(1, 13)))
    chunk = f"prefill_chunk={4 if ill else 64}"
    model = directory(folder / "mamba2", MAMBA2)
    return Asked(f"tokens={numbers} max_tokens=2", "prefill_chunk=2048", chunk, model)


def ring_in_another_order(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # A sound model: its ring begins elsewhere, as its prompt was cut elsewhere. With sinks, and a window in the mask.
    chunk = "3" if ill else "64"
    model = directory(folder / "gpt_oss", GPT_OSS)
    numbers = ",".join(map(str, range(1, 21)))
    return Asked(
        f"tokens={numbers} max_tokens=1", "prefill_chunk=2048", f"prefill_chunk={chunk}", model, PINNED
    )


def other_place_in_the_batch(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # Rows of odd places are summed in another order, as in another tile; the other run has the same requests in another order.
    native = nn.Linear.__call__

    def tiled(self: nn.Linear, x: mx.array) -> mx.array:
        half = x.shape[-1] // 2
        other = x[..., half:] @ self.weight[:, half:].T + x[..., :half] @ self.weight[:, :half].T
        places = mx.arange(x.size // x.shape[-1]).reshape(*x.shape[:-1], 1)
        return mx.where(places % 2 == 1, other, native(self, x))

    if ill:
        monkeypatch.setattr(nn.Linear, "__call__", tiled)
    model = directory(folder / "llama", LLAMA)
    requests = ['[[request]]\nid = "one"\ntokens = [1, 2]\n', '[[request]]\nid = "two"\ntokens = [3, 4]\n']
    for name, order in (("a", requests), ("b", requests[::-1])):
        text = f'model = "{model}"\nschedule = "static"\nmax_tokens = 2\n' + "".join(order)
        (folder / f"{name}.toml").write_text(text)
    return Asked("", "", "", more=PINNED, files=(folder / "a.toml", folder / "b.toml"))


def recording_that_changes_logits(folder: Path, monkeypatch: pytest.MonkeyPatch, ill: bool) -> Asked:
    native = Session._injected

    def changed(self: Session, key: str, port: str, value: Any) -> Any:
        value = native(self, key, port, value)
        return value * 1.5 if key == "logits" and self.recording is not None else value

    if ill:
        monkeypatch.setattr(Session, "_injected", changed)
    return Asked(f"{TOKENS} max_tokens=2", model=directory(folder / "llama", LLAMA))


def explained(name: str, ask: Ask, right: Right, sound: Right = IDENTICAL) -> Kind:
    return Kind(name, ask, right, sound, "explain")


LOST = verdict("bug", "bookkeeping", "the cache entry K of layer 0, head 0, position 0 is not what was written: once quantised",
               "times the bound of its scale")  # fmt: skip
KINDS = (
    explained("A2 a cache that loses what it quantises", lost_in_quantising("schedule=serial"), LOST,
              verdict("configuration", "settings", "kv_bits None and 8")),
    explained("A2 a cache that loses what it quantises in chunks", lost_in_quantising(f"prefill_chunk=4 {QUANTISED}"), LOST,
              verdict("configuration", "quantised", "from position 4 in a and from 10 in b")),
    explained("A2 wrong attention over what was quantised", quantised_attention_off,
              verdict("bug", "quantised-attention", "layers.0.self_attn.attention", "position 10 of r0", "in run b"),
              verdict("configuration", "settings", "kv_bits None and 8")),
    explained("A5 race in a batch", race_in_a_batch,
              verdict("nondeterminism", "repeat", "Side b, run again", never=("not about the batch",))),
    explained("A6 state between calls", state_between_calls,
              verdict("nondeterminism", "served-before", "what was served before")),
    explained("D19 mask without padding", mask_without_padding,
              verdict("bug", "bookkeeping", "the row at position 2 saw cells", "which no recorded row wrote", "in run b")),
    explained("D20 padding through a state", padding_through_a_state,
              verdict("bug", "padding", "Padding leaks", "layers.0.linear_attn")),
    explained("D20 padding through mamba's state", padding_through_mambas_state,
              verdict("bug", "padding", "layers.0.mixer")),
    explained("D20 state that decays over padding", state_that_decays_over_padding,
              verdict("bug", "outside", "layers.0.linear_attn", "only padded rows", "in run b")),
    explained("D20 state in other chunks", state_in_other_chunks,
              verdict("numerics", "path", "layers.0.mixer", "stay inside their rounding bounds")),
    explained("D21 ring in another order", ring_in_another_order,
              verdict("numerics", "path", "the order in which memory has the keys moves", "layers.0.self_attn.attention",
                      never=("19 rows",))),
    explained("D21 another place in the batch", other_place_in_the_batch,
              verdict("numerics", "path", "the row's place in the call, 0 in a and 1 in b, moves its bits")),
    explained("D22 recording that changes logits", recording_that_changes_logits,
              verdict("undetermined", "observed", "recording changed the logits of runs a and b",
                      "every digest and every token was equal", never=("not everything could be compared",))),
    explained("D25 rare race", rare_race,
              verdict("nondeterminism", "repeat", "run again 5 times")),
)  # fmt: skip
"""Kinds that ``explain`` answers; ``test_reported_comparisons.py`` has those of ``compare``."""


@pytest.mark.parametrize("kind", some_now(KINDS, 3), ids=lambda kind: kind.name)
def test_a_kind_is_answered_alike_and_its_twin_is_sound(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.check(tmp_path, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("ill", [True, False])
def test_a_probe_of_the_calls_own_layout_agrees_with_the_verdict(
    ill: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8: rows that lie transposed take another kernel than rows that follow each other, from four rows on."""
    from mlx_lm.models import llama

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
    monkeypatch.setattr(llama.MLP, "__call__", turned if ill else mlp)
    model, site = directory(tmp_path / "llama", {**LLAMA, "num_hidden_layers": 2}), "layers.0.mlp.down_proj"
    asked = Asked("tokens=1,2,3,4,5,6,7,8 max_tokens=1", "prefill_chunk=8", "prefill_chunk=3", model, PINNED)
    answers = [asked.command_line("explain"), asked.python("explain", tmp_path)]
    for found in answers:
        assert (found["verdict"], found["rule"]) == (("numerics", "path") if ill else ("identical",) * 2), (
            found["said"]
        )
        assert not ill or f"{site} took native on 7 rows in a and native on 3 rows in b" in found["said"]
    loaded = load(model)
    probed = probe(find_site(loaded, site), rows="1..6", seeds=2, timed=False)
    words = ("--model", model, "--site", site, "--rows", "1..6", "--seeds", "2", "--no-time", "--json")
    answer = json.loads(run("probe", *words).stdout)
    assert answer["classes"] == [list(members) for members in probed.classes]
    assert probed.classes == (((1, 2, 3), (4, 5, 6)) if ill else ((1, 2, 3, 4, 5, 6),))
    assert ("transposed" in probed.lies) is any("transposed" in note for note in answer["notes"]) is ill
    # The site beside it has rows that follow each other, in either model.
    assert not probe(find_site(loaded, site.replace("down", "up")), rows="1..6", seeds=2, timed=False).lies


def test_a_models_own_code_runs_where_it_is_allowed_and_is_never_replaced(tmp_path: Path) -> None:
    """D24: the file makes logits of a batch twice as large, so a run of mlx-lm's own class in its place would be identical."""
    model = directory(tmp_path / "own", LLAMA, code=DOUBLE.replace("SCALE", "2"))
    asked = ("compare", "--model", model, "--a", "schedule=serial", "--b", "schedule=static", "--both")
    refused = run(*asked, f"{TOKENS} max_tokens=2")
    assert (
        refused.exit_code == 2 and "own.py" in refused.output and "engine.custom_code=true" in refused.output
    )
    with pytest.raises(ModelCodeRefused, match="custom_code"):
        detdiff.record(Scenario.from_flags(model, (), f"{TOKENS} max_tokens=2"), tmp_path / "refused")
    allowed = f"{TOKENS} max_tokens=2 engine.custom_code=true"
    assert run(*asked, allowed, "--keep", tmp_path / "kept").exit_code == 1
    a, b = (
        detdiff.record(Scenario.from_flags(model, (), f"{allowed} schedule={each}"), tmp_path / each)
        for each in ("serial", "static")
    )
    assert (
        detdiff.compare(a, b).identical
        is detdiff.compare(tmp_path / "kept" / "a", tmp_path / "kept" / "b").identical
        is False
    )
    digest = hashlib.sha256((tmp_path / "own" / "own.py").read_bytes()).hexdigest()
    probed = ("probe", "--model", model, "--site", "layers.0.mlp.up_proj", "--rows", "1..2", "--no-time")
    refused = run(*probed)
    assert refused.exit_code == 2 and "--custom-code" in refused.output
    assert run(*probed, "--custom-code").exit_code == 0
    for trace in (a, detdiff.Trace.open(tmp_path / "kept" / "a")):
        assert (trace.model["model_file"], trace.model["model_file_sha256"]) == ("own.py", digest)
        assert any(site.kind == "attention" for site in trace.sites)


@pytest.mark.thorough
def test_a_trace_of_other_code_is_told_from_a_race(tmp_path: Path) -> None:
    """A4: nothing but the model's own file is another than when the trace was recorded."""
    model = directory(tmp_path / "own", LLAMA, code=DOUBLE.replace("SCALE", "2"))
    (tmp_path / "asked.toml").write_text(
        f'model = "{model}"\nengine = {{ name = "mlx", custom_code = true }}\nmax_tokens = 2\nschedule = "static"\n'
        "[[request]]\ntokens = [1, 2, 3]\n[[request]]\ntokens = [4, 5, 6, 7]\n"
    )
    for name in ("static", "serial"):
        done = run("record", tmp_path / "asked.toml", "-o", tmp_path / name, "--set", f"schedule={name}")
        assert done.exit_code == 0, done.output
    twin = json.loads(run("explain", tmp_path / "static", tmp_path / "serial", "--json").stdout)
    assert twin["rule"] != "changed"
    (tmp_path / "own" / "own.py").write_text(DOUBLE.replace("SCALE", "3"))
    found = json.loads(run("explain", tmp_path / "static", tmp_path / "serial", "--json").stdout)
    verdict = explain(tmp_path / "static", tmp_path / "serial")
    assert (found["verdict"], found["rule"]) == (verdict.kind, verdict.rule) == ("undetermined", "changed")
    for said in (found["said"], verdict.sentence):
        assert "the code or the machine changed" in said and "the model's own code own.py" in said
