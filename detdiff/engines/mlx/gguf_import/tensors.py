"""GGUF tensors to the named arrays of an mlx-lm model: names, row order and the two conventions that
differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.gguf_import.blocks import PACKABLE, pack, unpack
from detdiff.engines.mlx.gguf_import.container import GgufFile
from detdiff.engines.mlx.gguf_import.rope import DIVISORS
from detdiff.errors import GgufCorrupt, GgufUnsupported

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# gemma3 has four norms in a layer, so the name that others give to the second means the third.
GEMMA3_LAYER = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def module_name(tensor: str, architecture: str) -> str | None:
    """mlx-lm's name of the parameter that GGUF calls `tensor`, None where the architecture has no such
    parameter."""
    stem, _, kind = tensor.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        inner = (GEMMA3_LAYER if architecture == "gemma3" else LAYER).get(match[2])
        return inner and f"model.layers.{match[1]}.{inner}.{kind}"
    outer = OUTER.get(stem)
    return outer and f"{outer}.{kind}"


def arrays(file: GgufFile, config: dict[str, Any], packed: bool) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and value of every parameter; one tensor at a time is in memory.

    Values are float32, except the uint32 ``weight`` of a module whose blocks stay `packed`; such a module
    also has ``scales`` and ``biases``.

    Raises:
        GgufUnsupported: a tensor that the architecture has no place for.
    """
    architecture = file.metadata["general.architecture"]
    for tensor in file.tensors.values():
        if tensor.name == DIVISORS:
            continue
        name = module_name(tensor.name, architecture)
        if name is None:
            raise GgufUnsupported(
                f"{str(file.path)!r} has a tensor {tensor.name!r} ({tensor.kind}, shape "
                f"{list(tensor.shape)}) for which an {architecture} model has no place. Convert the original "
                f"checkpoint with `mlx_lm.convert`."
            )
        heads = _rotated_heads(tensor.name, config) if architecture == "llama" else None
        if heads and tensor.shape[0] % (2 * heads):
            raise GgufCorrupt(
                f"{str(file.path)!r} says {heads} heads, and {tensor.name!r} has {tensor.shape[0]} rows, "
                f"which do not divide into as many pairs. Convert the model again with a current converter."
            )
        if packed and tensor.kind in PACKABLE and len(tensor.shape) == 2:
            blocks, module = pack(tensor), name.removesuffix(".weight")
            parts = {"weight": blocks.words, "scales": blocks.scales, "biases": blocks.biases}
            for part, value in parts.items():
                yield f"{module}.{part}", half_split(value, heads) if heads else value
            continue
        values = unpack(tensor)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            # GGUF stores the factor itself; mlx-lm's gemma stores what it adds to 1.
            values = values - np.float32(1)
        yield name, half_split(values, heads) if heads else values


def half_split(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder the rows of each head from neighbouring rotary pairs (0,1), (2,3) to halves (0,d/2), (1,d/2+1).

    GGUF's llama keeps the pairs that are rotated together next to each other, mlx-lm's half a head apart.
    Only rows move, so packed words, scales and biases go the same way.
    """
    rows = values.shape[0]
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _rotated_heads(tensor: str, config: dict[str, Any]) -> int | None:
    stem = tensor.rpartition(".")[0]
    if stem.endswith(".attn_q"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if stem.endswith(".attn_k") else None
