"""Small decoders as model directories that both mlx-lm and transformers load, and those engines on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from numpy.typing import NDArray
from tiny import TinyTokenizer

from detdiff.engines.base import Engine
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.registry import mlx_engine

VOCABULARY = 64
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 2, 32, 48, 4, 2, 8
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True, "rope_theta": 500000.0},
    "llama3": {
        **LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {
        **LLAMA,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
    },
    "gemma": {
        **LLAMA,
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
}


def weights(name: str, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random ones, large enough that text depends on the prompt."""
    random = np.random.default_rng(seed)
    config = CONFIGS[name]

    def matrix(n: int, k: int) -> NDArray[np.float32]:
        return (random.normal(size=(n, k)) * 1.5 / np.sqrt(k)).astype(np.float32)

    def norm(n: int) -> NDArray[np.float32]:
        around = 0.0 if name == "gemma" else 1.0
        return (around + 0.3 * random.normal(size=n)).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found[f"{at}input_layernorm.weight"] = norm(HIDDEN)
        found[f"{at}post_attention_layernorm.weight"] = norm(HIDDEN)
        for proj, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{at}self_attn.{proj}_proj.weight"] = matrix(heads * WIDTH, HIDDEN)
            if name == "qwen2":
                found[f"{at}self_attn.{proj}_proj.bias"] = matrix(1, heads * WIDTH)[0]
        if name == "qwen3":
            found |= {f"{at}self_attn.{side}_norm.weight": norm(WIDTH) for side in "qk"}
        found[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * WIDTH)
        found[f"{at}mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        found[f"{at}mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        found[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    return found


def directory(
    path: Path,
    name: str = "llama",
    dtype: str = "float32",
    changed: Callable[[dict[str, NDArray[np.float32]]], None] | None = None,
    **config: Any,
) -> Path:
    """A model directory; ``changed`` changes its weights, ``config`` its configuration."""
    path.mkdir(parents=True)
    told = {**CONFIGS[name], **config, "dtype": dtype, "torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(told))
    made = weights(name)
    if changed is not None:
        changed(made)
    arrays = {key: mx.array(value).astype(getattr(mx, dtype)) for key, value in made.items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return path


def on_mlx(path: Path, fault: Callable[[Any], None] | None = None) -> Engine:
    """The mlx engine on a directory's model, which ``fault`` has changed after it was loaded."""
    model, config = load_model(path)
    mx.eval(model.parameters())
    if fault is not None:
        fault(model)
    identity = {"name": path.name, "model_type": config["model_type"], "vocab_size": VOCABULARY}
    return mlx_engine(LoadedModel(model, TinyTokenizer(), path, identity, config))


def in_torch(path: Path, fault: Callable[[Any], None] | None = None, attention: str = "eager") -> Engine:
    """The transformers engine on it."""
    from torch_models import torch_or_skip
    from transformers import AutoModelForCausalLM

    from detdiff.engines.transformers import TransformersEngine

    torch_or_skip()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    model.set_attn_implementation(attention)
    if fault is not None:
        fault(model)
    return TransformersEngine(model)
