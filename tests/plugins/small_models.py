"""Small random models and their tokenizers, as mlx-lm directories and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "In the beginning was the word, and the word was in a table of 256 bytes.",
    "A differing cache entry is a cache entry that differs; it's read before the flip, isn't it?",
    "  Two spaces, 12345 digits, naïve café, 日本語, and a line\nbreak.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 6,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
    },
}


def small_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer trained on `TEXT`; every text has a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def small_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json of a small model of a GGUF architecture."""
    size = small_tokenizer().get_vocab_size()
    return COMMON | {"vocab_size": size, "eos_token_id": 2} | CONFIGS[architecture] | changes


def small_weights(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights for `config`: multiples of 1/1024, which float16 and the sum with 1 hold exactly."""
    rng = np.random.default_rng(seed)
    weights = {}
    parameters: Any = tree_flatten(build(config, {}).parameters())
    for name, value in parameters:
        if not (name.startswith("lm_head") and config["model_type"] == "gemma3_text"):
            scale = 0.1 if value.ndim == 2 else 0.3
            weights[name] = (np.round(rng.normal(0, scale, value.shape) * 1024) / 1024).astype(np.float32)
    return weights


def build(config: dict[str, Any], weights: dict[str, NDArray[np.float32]]) -> Any:
    """The mlx-lm module of `config`, with `weights` when they are given."""
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    if weights:
        arrays = model.sanitize({name: mx.array(value) for name, value in weights.items()})
        model.load_weights(list(arrays.items()), strict=True)
    model.eval()
    return model


def logits(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """float32 ``[positions, vocabulary]``, from one prefill and, through the cache, two single steps."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    parts = [tokens[:-2], tokens[-2:-1], tokens[-1:]]
    out = [np.array(model(mx.array([part]), cache=cache)[0].astype(mx.float32)) for part in parts]
    return np.concatenate(out)


def write_directory(path: Path, config: dict[str, Any] | None = None) -> Path:
    """A whole mlx-lm model directory with random weights."""
    config = config or small_config("llama")
    path.mkdir(parents=True)
    arrays = {name: mx.array(value) for name, value in small_weights(config).items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    small_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
