"""A GGUF file as its reader gives it, and what its metadata says of the model, as the config.json of mlx-lm.

What has no exact counterpart there is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import GgufCorrupt, GgufMissing, GgufPackageMissing, GgufUnsupported
from detdiff_kernels import UnsupportedFormat
from detdiff_kernels.errors import MissingGgufPackage, UnreadableGguf
from detdiff_kernels.gguf_file import open_gguf

# Architecture as GGUF names it: (model_type in mlx-lm, class name in config.json).
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
DIVISORS = "rope_freqs.weight"
# Converters store only what llama3's scaling comes to, a tensor with one divisor per frequency; its parameters are
# recovered from that and checked against every divisor. All published llama3 checkpoints share these; only the factor differs.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GEMMA3_PATTERN = 6
GEMMA3_LOCAL_BASE = 10000.0
GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. shape: outermost dimension first. data: uint8 ``[rows, bytes of a row]``, mapped from the
    file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def values(self) -> NDArray[np.float32]:
        """The values as float32, shape as in the model.

        Raises:
            GgufUnsupported: the installed `gguf` package cannot unpack the type.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            found = dequantize(self.data, GGMLQuantizationType[self.kind])
        except (NotImplementedError, KeyError) as error:
            raise GgufUnsupported(
                f"Tensor {self.name!r} is stored as {self.kind}, which the installed `gguf` package cannot "
                f"unpack. Upgrade it, or requantise the file to Q8_0 or F16."
            ) from error
        return np.ascontiguousarray(found.reshape(self.shape))


@dataclass(frozen=True)
class GgufFile:
    """A whole GGUF file. metadata: key to bool, int, float, str or a list of these."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of `path` and map its tensors.

    Raises:
        GgufMissing: no such file.
        GgufCorrupt: not GGUF, cut short, or inconsistent.
        GgufUnsupported: another version, byte order, a part of a split file, or an unknown tensor type.
        GgufPackageMissing: the `gguf` package is not installed.
    """
    if not path.is_file():
        raise GgufMissing(f"There is no file {str(path)!r}. Give the path of one GGUF file.")
    try:
        reader = open_gguf(path)
    except UnreadableGguf as error:
        raise GgufCorrupt(str(error)) from error
    except UnsupportedFormat as error:
        raise GgufUnsupported(str(error)) from error
    except MissingGgufPackage as error:
        raise GgufPackageMissing(str(error)) from error
    try:
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except UnicodeDecodeError as error:
        raise GgufCorrupt(
            f"{str(path)!r} has metadata that is not UTF-8 ({error.reason}). Fetch the file again and compare its "
            f"length and checksum with its source."
        ) from error
    if metadata.get("split.count", 1) not in (0, 1):
        raise GgufUnsupported(
            f"{str(path)!r} is one of {metadata['split.count']} parts of a split model. Merge the parts into "
            f"one file (for example with `llama-gguf-split --merge`) and import that."
        )
    return GgufFile(path, metadata, {tensor.name: _tensor(tensor) for tensor in reader.tensors})


def _tensor(found: Any) -> GgufTensor:
    shape = tuple(int(length) for length in found.shape[::-1])
    data = np.ascontiguousarray(found.data).view(np.uint8)
    return GgufTensor(found.name, found.tensor_type.name, shape, data.reshape(-1, data.shape[-1]))


class Metadata:
    """The keys of a file's own architecture, with their kinds checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        named = file.metadata.get("general.architecture")
        if not isinstance(named, str) or named not in ARCHITECTURES:
            raise GgufUnsupported(
                f"{str(file.path)!r} has the architecture {named!r}. Those that can be imported "
                f"are {', '.join(ARCHITECTURES)}. For another one, convert its original checkpoint with "
                f"`mlx_lm.convert`."
            )
        self.architecture = named

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number that is the same for all layers."""
        value = self.get(key, default)
        if isinstance(value, list):
            raise self.unsupported(f"its {key} differs by layer")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.corrupt(key, "a positive whole number", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A real number: the shortest decimal that gives the file's float32, so 1e-05 and not
        9.9999997e-06."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.corrupt(key, "a number", value)
        return float(str(np.float32(value)))

    def corrupt(self, key: str, expected: str, found: Any) -> GgufCorrupt:
        state = "there is none" if found is None else f"it says {found!r}"
        return GgufCorrupt(
            f"{str(self.file.path)!r} should give {expected} under {self.architecture}.{key}, and {state}. "
            f"Convert the model again with a current converter."
        )

    def unsupported(self, what: str) -> GgufUnsupported:
        return GgufUnsupported(
            f"{str(self.file.path)!r} ({self.architecture}) cannot be imported exactly: {what}, and mlx-lm's "
            f"{ARCHITECTURES[self.architecture][0]} has no counterpart. Convert the original checkpoint with "
            f"`mlx_lm.convert`."
        )


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


def rope_scaling(metadata: Metadata, base: float, head_dim: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` entry of config.json, None where positions are not scaled.

    Raises:
        GgufUnsupported: a kind of scaling other than linear and llama3.
    """
    kind = metadata.get("rope.scaling.type", "none")
    if metadata.get("rope.scale_linear", 1.0) not in (0.0, 1.0):
        raise metadata.unsupported("it scales positions by the outdated key rope.scale_linear")
    if DIVISORS in metadata.file.tensors:
        if kind != "none":
            raise metadata.unsupported(f"it scales positions both by {DIVISORS} and by {kind!r}")
        return _llama3(metadata, base, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor")}
    raise metadata.unsupported(
        f"it scales positions by {kind!r}; `linear` and llama3's {DIVISORS} can be imported"
    )


def llama3_divisors(base: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """Divisor of each of the ``head_dim / 2`` frequencies under llama3 scaling, float64."""
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = (LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    # Clipping gives the two outer ranges: 1 for short wavelengths, `factor` for long ones.
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _llama3(metadata: Metadata, base: float, head_dim: int) -> dict[str, Any]:
    divisors = metadata.file.tensors[DIVISORS].values().reshape(-1)
    factor = float(f"{divisors.max():.6g}")
    expected = llama3_divisors(base, head_dim, factor)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise metadata.unsupported(
            f"its {DIVISORS} does not follow llama3's rule with the published parameters"
        )
    return {"rope_type": "llama3", "factor": factor} | LLAMA3
