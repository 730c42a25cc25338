"""Write a small model as a GGUF file, by the `gguf` package's own names and the reference converter's
conventions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray
from plugins.small_models import SPECIAL, TEMPLATE, small_config, small_tokenizer, small_weights
from tokenizers import Tokenizer

from detdiff.errors import ModelError

CONTROL, NORMAL = 3, 1


@dataclass
class SmallGguf:
    """What `write` puts into the file; each field is a place to inject a fault.

    kinds: GGUF type of every matrix by mlx-lm name, F32 where it names none. metadata: keys added, or
    replaced, as they are.
    """

    architecture: str
    config: dict[str, Any]
    weights: dict[str, NDArray[np.float32]]
    kinds: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    splitter: str = "gpt-2"
    interleave: bool = True
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.metadata.pop("general.architecture", self.architecture))
        self._describe(writer)
        (self.tokenizer or self._tokenizer)(writer)
        for key, value in self.metadata.items():
            add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
            add.get(type(value), writer.add_uint32)(key, value)
        names = gguf.get_tensor_name_map(
            getattr(gguf.MODEL_ARCH, self.architecture.upper()), self.config["num_hidden_layers"]
        )
        for name, values in self.weights.items():
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, name
            kind = gguf.GGMLQuantizationType[self.kinds.get(name, "F32")]
            writer.add_tensor(theirs, quantize(self._converted(name, values), kind), raw_dtype=kind)
        for name, values in self.extra.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _converted(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return values + np.float32(1)
        if self.architecture == "llama" and self.interleave and ".q_proj." in name + ".":
            return _interleaved(values, self.config["num_attention_heads"])
        if self.architecture == "llama" and self.interleave and ".k_proj." in name + ".":
            return _interleaved(values, self.config["num_key_value_heads"])
        return values

    def _describe(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        if "head_dim" in config:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        if "sliding_window" in config:
            writer.add_sliding_window(config["sliding_window"])

    def _tokenizer(self, writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, small_tokenizer(), self.splitter)


def small_gguf(architecture: str, **changes: Any) -> SmallGguf:
    """A small model of `architecture` with random weights, not yet written."""
    config = small_config(architecture, **changes)
    return SmallGguf(architecture, config, small_weights(config))


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer, splitter: str) -> None:
    """The metadata of a byte-level BPE `tokenizer` that has `SPECIAL` tokens."""
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=lambda token: ids[token])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_chat_template(TEMPLATE)


def check_refusal(error: ModelError, folder: Path) -> None:
    """One paragraph, and nothing left beside the source file."""
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert text.endswith(".")
    assert {path.name for path in folder.iterdir()} <= {"m.gguf"}


def _interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    # As the reference converter writes llama: rows i and i + d/2 of a head become neighbours.
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
