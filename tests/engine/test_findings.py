"""What is wrong in mlx-lm's own batches is named at its place; docs/findings.md has the cases without detdiff."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from runs import Runs, events, loaded, scenario
from tiny import VOCAB

from detdiff.compare import compare
from detdiff.engines.mlx.model import LoadedModel

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "gemma2": {**SMALL, "query_pre_attn_scalar": 16},
    "afm7": {
        "vocab_size": VOCAB,
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "llama": SMALL,
}


def small(name: str) -> LoadedModel:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    built = module.Model(module.ModelArgs.from_dict({**MODELS[name], "model_type": name}))
    built.update(tree_map(lambda p: p * 2.5 if p.ndim == 2 else p, built.parameters()))
    return loaded(built, name)


@pytest.mark.parametrize(
    ("arch", "site", "kind", "how"),
    [
        ("mamba", "layers.0.mixer", "recurrent", "composite"),
        ("gemma2", "layers.0.self_attn", "attn_block", "composite"),
        ("afm7", "kv_reuse_layers.0.self_attn.rope", "rope", "leaf"),
    ],
)
def test_a_batch_s_fault_is_named_at_its_place(runs: Runs, arch: str, site: str, kind: str, how: str) -> None:
    of = small(arch)
    keys = {"lengths": (12, 21), "max_tokens": 6, "capture": "full"}
    base = runs.record(of, scenario(**keys))
    other = runs.record(of, scenario("static", **keys))
    divergence = compare(base, other)
    short, long = divergence.requests
    # gemma2 masks by the neighbour's padding whoever has the same number as one of its heads.
    assert long.id == "r1" and long.identical == (arch != "gemma2")
    assert short.origin is not None
    assert (short.origin.site, short.origin.kind, short.origin.how) == (site, kind, how)
    # The last row of the shorter prompt that a batch prefills, or the one after it: there the padding begins to count.
    assert short.origin.position in (10, 11)
    # Not rounding, which is some 1e-6 here.
    assert short.origin.magnitude is not None and (short.origin.magnitude.max_rel or 0) > 1e-4
    assert events(base) == events(other) == []


def test_the_same_length_has_no_padding_and_no_fault(runs: Runs) -> None:
    for arch in ("mamba", "gemma2", "afm7", "llama"):
        of = small(arch)
        keys = {"lengths": (12, 12), "max_tokens": 6}
        other = runs.record(of, scenario("static", **keys))
        assert compare(runs.record(of, scenario(**keys)), other).identical, arch
