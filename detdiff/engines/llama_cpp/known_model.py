"""A tiny llama as a GGUF file, and its logits in float64: what a loaded library must give back before it is trusted.

NumPy and the `gguf` package alone; nothing here comes from llama.cpp, so that both must be right for the two to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

SPECIAL: Final = ("<unk>", "<s>", "</s>")
SPACE: Final = "\u2581"
TOKENS: Final = (*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE)
"""A token for each byte: any text comes back as it was."""
PROMPT: Final = (1, 75, 104, 111, 259, 40, 200, 17)
"""What the library is asked about: token ids of the vocabulary."""
TOLERANCE: Final = 1e-3
"""How far float32 sums over a float32 cache can be from `KnownModel.logits`, with much to spare."""
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_EPS: Final = 1e-5
_BASE: Final = 10000.0


@dataclass(frozen=True)
class KnownModel:
    """A llama with random weights, which are multiples of 1/1024, so that float16 holds them exactly.

    ``kind`` is the type of its matrices in the file: F32, F16 or any that the `gguf` package quantises to. ``tied``: the
    head is the embedding. ``width`` is a multiple of 32 and of ``heads``, ``inner`` of 32.
    """

    layers: int = 1
    kind: str = "F32"
    tied: bool = False
    context: int = 256
    seed: int = 0
    width: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """The weights by their GGUF names, matrices (out, in), as they were drawn."""
        random = np.random.default_rng(self.seed)
        kv = self.kv_heads * self.head_width
        found: dict[str, NDArray[np.float32]] = {}

        def draw(name: str, *shape: int) -> None:
            # Large enough for logits that depend on the whole prompt, small enough for float32 to be near float64.
            values = random.normal(0, 0.2, shape) if len(shape) > 1 else random.normal(1, 0.2, shape)
            found[name] = (np.round(values * 1024) / 1024).astype(np.float32)

        draw("token_embd.weight", len(TOKENS), self.width)
        for layer in range(self.layers):
            at = f"blk.{layer}."
            draw(f"{at}attn_norm.weight", self.width)
            draw(f"{at}attn_q.weight", self.width, self.width)
            draw(f"{at}attn_k.weight", kv, self.width)
            draw(f"{at}attn_v.weight", kv, self.width)
            draw(f"{at}attn_output.weight", self.width, self.width)
            draw(f"{at}ffn_norm.weight", self.width)
            draw(f"{at}ffn_gate.weight", self.inner, self.width)
            draw(f"{at}ffn_up.weight", self.inner, self.width)
            draw(f"{at}ffn_down.weight", self.width, self.inner)
        draw("output_norm.weight", self.width)
        if not self.tied:
            draw("output.weight", len(TOKENS), self.width)
        return found

    def write(self, path: Path) -> Path:
        """Write the GGUF file; returns its path. Raises ImportError without the `gguf` package."""
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize

        writer = GGUFWriter(path, "llama")
        writer.add_vocab_size(len(TOKENS))
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.width)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_rope_dimension_count(self.head_width)
        writer.add_rope_freq_base(_BASE)
        writer.add_layer_norm_rms_eps(_EPS)
        add_byte_tokenizer(writer)
        for name, values in self.weights().items():
            kind = GGMLQuantizationType[self.kind if values.ndim > 1 else "F32"]
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def logits(self, tokens: Sequence[int]) -> Float64:
        """(len(tokens), vocabulary) logits of a prompt at positions from 0, with the weights as the file stores them."""
        w = {name: self._stored(values) for name, values in self.weights().items()}
        x = w["token_embd.weight"][list(tokens)]
        for layer in range(self.layers):
            at = f"blk.{layer}."
            h = _norm(x, w[f"{at}attn_norm.weight"])
            q, k, v = (self._split(h @ w[f"{at}attn_{name}.weight"].T) for name in "qkv")
            attended = self._attention(_turned(q), _turned(k), v)
            x = x + attended @ w[f"{at}attn_output.weight"].T
            h = _norm(x, w[f"{at}ffn_norm.weight"])
            gate, up = (h @ w[f"{at}ffn_{name}.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}ffn_down.weight"].T
        head = w["token_embd.weight" if self.tied else "output.weight"]
        found: Float64 = _norm(x, w["output_norm.weight"]) @ head.T
        return found

    def _stored(self, values: NDArray[np.float32]) -> Float64:
        if self.kind == "F32" or values.ndim == 1:
            return values.astype(np.float64)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quantize

        kind = GGMLQuantizationType[self.kind]
        found: Float64 = dequantize(quantize(values, kind), kind).astype(np.float64)
        return found

    def _split(self, values: Float64) -> Float64:
        """(heads, rows, head width)."""
        return values.reshape(len(values), -1, self.head_width).swapaxes(0, 1)

    def _attention(self, q: Float64, k: Float64, v: Float64) -> Float64:
        """(rows, width): causal attention, a key's head shared by neighbouring query heads."""
        k, v = (np.repeat(each, self.heads // self.kv_heads, axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(self.head_width)
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found: Float64 = powers / powers.sum(axis=-1, keepdims=True) @ v
        return found.swapaxes(0, 1).reshape(q.shape[1], -1)


def _norm(x: Float64, weight: Float64) -> Float64:
    found: Float64 = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + _EPS) * weight
    return found


def _turned(x: Float64) -> Float64:
    """Rotary positions from 0, neighbours as pairs, (heads, rows, head width)."""
    width = x.shape[-1]
    angles = np.outer(np.arange(x.shape[1]), _BASE ** (-np.arange(0, width, 2) / width))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def add_byte_tokenizer(writer: Any) -> None:
    kinds = {"<unk>": _UNKNOWN, "<s>": _CONTROL, "</s>": _CONTROL, SPACE: _NORMAL}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(TOKENS))
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([kinds.get(token, _BYTE) for token in TOKENS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
