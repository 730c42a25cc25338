"""GGUF tensors as the weights of an mlx-lm model: names, row order, kept blocks, and the safetensors files.

Arrays are in name order in each file, so the same import gives the same bytes, and one weight hash, everywhere.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.gguf_import.metadata import DIVISORS, GgufFile, GgufTensor
from detdiff.engines.mlx.model_directory import WEIGHTS_INDEX
from detdiff.errors import GgufCorrupt, GgufUnsupported
from detdiff_kernels import Affine, Blocks
from detdiff_kernels.rounding import narrow

GROUP = 32
PACKABLE = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
SHARD_BYTES = 2 << 30
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
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


def pack(tensor: GgufTensor) -> Affine:
    """The blocks of a two-dimensional tensor of a `PACKABLE` kind as affine groups; no value changes.

    Such a block holds ``w = scale * q + offset`` with one scale for 32 elements, which is what MLX's affine mode
    computes for ``group_size=32``. Only nibble order and sign convention differ.
    """
    blocks = Blocks(tensor.kind, tensor.data).unpacked()
    codes, scales, bits = blocks.codes.view(np.uint8), blocks.scale, PACKABLE[tensor.kind]
    if bits == 8:
        # Signed bytes become unsigned ones by flipping the top bit; the offset takes the 128 back.
        codes = codes ^ np.uint8(0x80)
    else:
        codes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    offsets = blocks.minimum if blocks.minimum is not None else scales * np.float32(-(1 << (bits - 1)))
    return Affine(np.ascontiguousarray(codes).view("<u4"), scales, offsets, bits, GROUP)


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
            parts = {"weight": blocks.packed, "scales": blocks.scales, "biases": blocks.biases}
            for part, value in parts.items():
                yield f"{module}.{part}", half_split(value, heads) if heads else value
            continue
        values = tensor.values()
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


def write_shards(
    directory: Path, arrays: Iterable[tuple[str, NDArray[Any]]], dtype: str, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write `arrays` (float32 or uint32) to `directory`, floats rounded to `dtype`, a key of `DTYPES`.

    One ``model.safetensors``, or numbered files of about `shard_bytes` and their index. Returns the bytes of
    all values.

    Raises:
        GgufUnsupported: a value is too large for `dtype`.
        OSError: the files cannot be written.
    """
    pending: dict[str, tuple[str, NDArray[Any]]] = {}
    shards: list[list[str]] = []
    size = total = 0
    for name, values in arrays:
        stored = ("U32", values) if values.dtype == np.uint32 else _rounded(name, values, dtype)
        pending[name] = stored
        size += stored[1].nbytes
        total += stored[1].nbytes
        if size >= shard_bytes:
            shards.append(_write(directory / f"part-{len(shards)}.safetensors", pending))
            pending, size = {}, 0
    if pending:
        shards.append(_write(directory / f"part-{len(shards)}.safetensors", pending))
    _name_shards(directory, shards, total)
    return total


def _rounded(name: str, values: NDArray[np.float32], dtype: str) -> tuple[str, NDArray[Any]]:
    if dtype == "f32":
        return "F32", values
    if dtype == "bf16":
        return "BF16", narrow(values, "bfloat16")
    largest = float(np.abs(values).max(initial=0.0))
    if largest > float(np.finfo(np.float16).max):
        raise GgufUnsupported(
            f"{name} holds {largest:.6g}, and float16 ends at 65504. Import with dtype bf16 or f32 instead."
        )
    return "F16", narrow(values, "float16")


def _write(file: Path, arrays: dict[str, tuple[str, NDArray[Any]]]) -> list[str]:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name in sorted(arrays):
        kind, values = arrays[name]
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(arrays):
            stream.write(np.ascontiguousarray(arrays[name][1]).data)
    return sorted(arrays)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}.safetensors").rename(directory / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (directory / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
