"""A tiny gemma3 as a GGUF file: two layers of three see a window of positions, and each kind of layer has a cache of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from detdiff.engines.llama_cpp.known_model import TOKENS, add_byte_tokenizer

WINDOW, LAYERS = 8, 6
_WIDTH, _INNER, _HEADS, _KV_HEADS, _HEAD = 64, 96, 4, 2, 16


def windowed_gguf(path: Path, kind: str = "Q8_0", seed: int = 0) -> Path:
    """Write it at ``path``, with seeded random weights."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "gemma3")
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(256)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(WINDOW)
    add_byte_tokenizer(writer)

    def draw(name: str, *shape: int) -> None:
        values = random.normal(0, 0.2, shape) if len(shape) > 1 else random.normal(1, 0.2, shape)
        stored = GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        writer.add_tensor(name, quantize(values.astype(np.float32), stored), raw_dtype=stored)

    draw("token_embd.weight", len(TOKENS), _WIDTH)
    draw("output_norm.weight", _WIDTH)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for name, *shape in (
            ("attn_norm", _WIDTH), ("attn_q", _HEADS * _HEAD, _WIDTH), ("attn_k", _KV_HEADS * _HEAD, _WIDTH),
            ("attn_v", _KV_HEADS * _HEAD, _WIDTH), ("attn_output", _WIDTH, _HEADS * _HEAD), ("attn_q_norm", _HEAD),
            ("attn_k_norm", _HEAD), ("post_attention_norm", _WIDTH), ("ffn_norm", _WIDTH), ("ffn_gate", _INNER, _WIDTH),
            ("ffn_up", _INNER, _WIDTH), ("ffn_down", _WIDTH, _INNER), ("post_ffw_norm", _WIDTH),
        ):  # fmt: skip
            draw(f"{at}{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
