"""Tiny mlx-lm models with random weights: the architecture matrix of the tests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from detdiff.engines.mlx.model import LoadedModel

VOCAB = 96

_LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_LLAMA, "model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 10000.0},
    "qwen3": {
        **_LLAMA,
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "head_dim": 32,
        "rope_theta": 10000.0,
    },
    "gemma3_text": {
        **_LLAMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    },
    "qwen3_moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        **_LLAMA,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "head_dim": 32,
        "full_attention_interval": 2,
        "tie_word_embeddings": False,
    },
    "phi3": {**_LLAMA, "model_type": "phi3", "rope_theta": 10000.0, "tie_word_embeddings": False},
}

PACKABLE = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "phi3")
FORMATS = ("f32", "bf16", "q4")


class TinyTokenizer:
    """Just enough of a tokenizer: one word per id, no stop tokens."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{i}" for i in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) % VOCAB for c in text]


def tiny(name: str, fmt: str = "f32", seed: int = 0) -> LoadedModel:
    """A random model of architecture ``name`` in ``fmt`` (f32, bf16 or q4: 4-bit, group 32, f32 scales)."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = CONFIGS[name]
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Larger than the default initialisation: logits then differ enough that text is not one repeated token.
    model.update(tree_map(lambda p: p * 2.5 if p.ndim == 2 else p, model.parameters()))
    if fmt == "bf16":
        model.set_dtype(mx.bfloat16)
    elif fmt == "q4":
        nn.quantize(model, group_size=32, bits=4, class_predicate=_quantisable)
    mx.eval(model.parameters())
    model.eval()
    n_weights = sum(p.size for _, p in tree_flatten(model.parameters()))
    identity = {
        "name": f"tiny-{name}-{fmt}-{seed}",
        "model_type": name,
        "vocab_size": VOCAB,
        "weights": f"{name}-{fmt}-{seed}-{n_weights}",
        "n_layers": config["num_hidden_layers"],
    }
    return LoadedModel(model, TinyTokenizer(), Path("tiny"), identity, config)


def _quantisable(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
