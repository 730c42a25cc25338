"""GGUF metadata to the config.json of the same model in mlx-lm. What has no exact counterpart is refused."""

from __future__ import annotations

from typing import Any

from detdiff.engines.mlx.gguf_import.container import GgufFile
from detdiff.engines.mlx.gguf_import.metadata import ARCHITECTURES, Metadata
from detdiff.engines.mlx.gguf_import.rope import rope_scaling
from detdiff.errors import GgufCorrupt

GEMMA3_PATTERN = 6
GEMMA3_LOCAL_BASE = 10000.0
GEMMA3_27B_LAYERS = 62


def make_config(file: GgufFile) -> dict[str, Any]:
    """config.json of the model in `file`, without its quantisation and dtype.

    Raises:
        GgufUnsupported: the architecture, or a feature of it, cannot be carried over exactly.
        GgufCorrupt: a needed key is absent or of another kind.
    """
    metadata = Metadata(file)
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    _refuse_variants(metadata, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufCorrupt(
            f"{str(file.path)!r} has no token_embd.weight matrix, so it does not hold a whole model. Give "
            f"the main file of the model, not an adapter or a projector."
        )
    base = metadata.real("rope.freq_base", 10000.0)
    model_type, class_name = ARCHITECTURES[metadata.architecture]
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.count("block_count"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.count("context_length"),
        "rope_theta": base,
        "rope_scaling": rope_scaling(metadata, base, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name in ("bos", "eos", "padding"):
        if (token := file.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{'pad' if name == 'padding' else name}_token_id"] = token
    return config | _PARTICULARS[metadata.architecture](metadata, config)


def _refuse_variants(metadata: Metadata, head_dim: int) -> None:
    if metadata.get("expert_count"):
        raise metadata.unsupported("it is a mixture of experts")
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise metadata.unsupported("its keys and values have different lengths")
    if metadata.count("rope.dimension_count", head_dim) != head_dim:
        raise metadata.unsupported("it rotates a part of each head only")


def _llama(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    tensors = metadata.file.tensors
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _qwen2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    # mlx-lm's qwen2 takes the head length from the width and knows no other.
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise metadata.unsupported(f"its heads have {config['head_dim']} elements")
    return {"hidden_act": "silu"}


def _qwen3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": False}


def _gemma3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == GEMMA3_27B_LAYERS:
        # The largest of the family scales by width / heads; the file format does not say so, its engines do.
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", GEMMA3_LOCAL_BASE),
        "sliding_window": metadata.count("attention.sliding_window"),
        "sliding_window_pattern": _window_pattern(metadata, config["num_hidden_layers"]),
    }


def _window_pattern(metadata: Metadata, layers: int) -> int:
    value = metadata.get("attention.sliding_window_pattern")
    if not isinstance(value, list):
        return metadata.count("attention.sliding_window_pattern", GEMMA3_PATTERN)
    for period in range(1, layers + 1):
        if all(bool(local) == ((layer + 1) % period != 0) for layer, local in enumerate(value)):
            return period
    raise metadata.unsupported("its sliding-window layers follow no period")


_PARTICULARS = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}
