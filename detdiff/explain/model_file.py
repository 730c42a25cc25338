"""What a model's own file says: its configuration and its weights by role, read without any engine.

A directory of config.json and safetensors, or a GGUF file. What an engine made of it when it loaded it is another matter:
this is what it is judged by. Rows of queries and keys are in halves: the items of a head that are rotated together lie half
a head apart, whatever the file's own order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.base import DECODERS
from detdiff.errors import OracleRefused
from detdiff_kernels import Affine, Blocks
from detdiff_kernels.errors import KernelLibraryError
from detdiff_kernels.gguf_file import open_gguf
from detdiff_kernels.rounding import widen
from detdiff_kernels.weights import BLOCKS, Dense, Weight

from .roundings import Float64

Array = NDArray[Any]
Activation = Literal["silu", "gelu", "gelu_tanh"]

_HUGGING: Final[Mapping[str, str]] = {
    "embedding": "model.embed_tokens", "attn_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj", "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj", "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm", "o": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm", "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj", "down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm", "head": "lm_head",
}  # fmt: skip
_GGUF: Final[Mapping[str, str]] = {
    "embedding": "token_embd", "attn_norm": "blk.{}.attn_norm", "q": "blk.{}.attn_q", "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v", "q_norm": "blk.{}.attn_q_norm", "k_norm": "blk.{}.attn_k_norm",
    "o": "blk.{}.attn_output", "mlp_norm": "blk.{}.ffn_norm", "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up", "down": "blk.{}.ffn_down", "final_norm": "output_norm", "head": "output",
}  # fmt: skip
WEIGHTS: Final = tuple(_HUGGING)
"""The roles that have weights, in order."""
NORMS: Final = ("attn_norm", "q_norm", "k_norm", "mlp_norm", "final_norm")
"""Those of them that are vectors, which multiply."""
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_DTYPES: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32}
_DENSE: Final = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(np.uint16): "bfloat16",
}


@dataclass(frozen=True)
class Configuration:
    """What a decoder computes beside its weights.

    ``rope_scale`` multiplies positions; ``rope_divisors`` are those of the frequencies, or None; ``rope_width`` is how many
    items of a head are rotated. ``window``: how many positions a row sees where some layer sees less than all, else None.
    ``tied``: the head is the embedding, whatever else the file holds. ``embedding_scale`` multiplies
    embeddings, ``norm_offset`` is added to the norms' weights. ``unknown`` says of roles why they cannot be judged.
    """

    model_type: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    eps: float
    activation: Activation
    rope_base: float
    rope_width: int
    attention_scale: float
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    rope_scale: float = 1.0
    rope_divisors: tuple[float, ...] | None = None
    window: int | None = None
    tied: bool = False
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model's file, opened: ``configuration``, and its tensors by the role that they feed."""

    path: Path
    configuration: Configuration
    _names: Mapping[str, str]
    _tensors: Mapping[str, Callable[[], Array | Weight]]
    _neighbours: bool
    _quantisation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> ModelFile:
        """Raises OracleRefused for what is no model's file, or a model that is not built as llama is."""
        try:
            if path.is_dir():
                return _directory(cls, path)
            return _gguf(cls, path)
        except (OSError, ValueError, KeyError, TypeError, KernelLibraryError) as error:
            raise OracleRefused(
                f"What the model's file {path} says cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); expected "
                "a directory with config.json and safetensors, or a GGUF file. Name the model by its file."
            ) from error

    def weight(self, role: str, layer: int | None) -> Weight:
        """The matrix (outputs, inputs) that feeds a role; the head's is the embedding's where there is none of its own.

        Raises OracleRefused where the file has none.
        """
        if role == "head" and (self.configuration.tied or self._tensor(role, None, "weight") is None):
            role = "embedding"
        found = self._tensor(role, layer, "weight")
        if found is None:
            raise OracleRefused(
                f"The model's file {self.path} has no {self._name(role, layer)}.weight, which feeds {role}. Give the file that was "
                "loaded."
            )
        if isinstance(found, Dense | Affine | Blocks):
            made: Weight = found
        elif found.dtype == np.uint32:
            made = self._affine(role, layer, found)
        else:
            made = Dense(found, _DENSE[found.dtype])
        return _rows(made, self._order(role, made.n)) if role in ("q", "k") else made

    def bias(self, role: str, layer: int | None) -> Float64 | None:
        """What is added to a role's products, float64 (outputs,); None where the file has nothing."""
        found = self._tensor(role, layer, "bias")
        if found is None:
            return None
        values = _wide(found).reshape(-1)
        return values[self._order(role, len(values))] if role in ("q", "k") else values

    def norm(self, role: str, layer: int | None) -> tuple[Float64, str] | None:
        """What a norm multiplies by, float64 (n,), the file's convention applied, and the dtype that the file has it in."""
        found = self._tensor(role, layer, "weight")
        if found is None:
            return None
        assert isinstance(found, np.ndarray)
        values = _wide(found).reshape(-1) + self.configuration.norm_offset
        return (values[self._order(role, len(values))] if role[1:] == "_norm" else values), _DENSE[
            found.dtype
        ]

    def _name(self, role: str, layer: int | None) -> str:
        return self._names[role].format(layer)

    def _tensor(self, role: str, layer: int | None, kind: str) -> Array | Weight | None:
        make = self._tensors.get(f"{self._name(role, layer)}.{kind}")
        return None if make is None else make()

    def _affine(self, role: str, layer: int | None, packed: Array) -> Affine:
        parts = []
        for kind in ("scales", "biases"):
            part = self._tensor(role, layer, kind)
            assert isinstance(part, np.ndarray)
            parts.append(_wide(part).astype(np.float32))
        own = self._quantisation.get(self._name(role, layer), self._quantisation)
        return Affine(
            np.ascontiguousarray(packed), parts[0], parts[1], int(own["bits"]), int(own["group_size"])
        )

    def _order(self, role: str, count: int) -> NDArray[np.int64]:
        """Where each row of queries or keys lies in the file."""
        rows = np.arange(count)
        width = self.configuration.head_width
        if not self._neighbours:
            return rows
        return rows.reshape(-1, width // 2, 2).swapaxes(1, 2).reshape(-1)


def _rows(weight: Weight, order: NDArray[np.int64]) -> Weight:
    if np.array_equal(order, np.arange(len(order))):
        return weight
    if isinstance(weight, Dense):
        return Dense(np.ascontiguousarray(weight.data[order]), weight.dtype)
    if isinstance(weight, Blocks):
        return Blocks(weight.kind, np.ascontiguousarray(weight.raw[order]))
    packed = np.ascontiguousarray(weight.packed[order])
    scales, biases = (np.ascontiguousarray(part[order]) for part in (weight.scales, weight.biases))
    return Affine(packed, scales, biases, weight.bits, weight.group_size)


def _wide(found: Array | Weight) -> Float64:
    assert isinstance(found, np.ndarray)
    return np.asarray(widen(found, _DENSE[found.dtype]), np.float64)


def _directory(cls: type[ModelFile], path: Path) -> ModelFile:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Callable[[], Array | Weight]] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= _safetensors(file)
    quantisation = config.get("quantization") or {}
    # What mlx-lm adds to names is the path of the module.
    return cls(
        path, _configured(config), _HUGGING, tensors, config.get("rope_traditional") is True, quantisation
    )


def _safetensors(file: Path) -> dict[str, Callable[[], Array | Weight]]:
    """The arrays of a file, mapped when they are asked for. Format: eight bytes of header length, JSON, arrays."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))

    def array(entry: Mapping[str, Any]) -> Callable[[], Array]:
        def mapped() -> Array:
            kind = _DTYPES.get(entry["dtype"])
            if kind is None:
                raise OracleRefused(
                    f"The model's file {file} holds {entry['dtype']}; the oracle reads {', '.join(_DTYPES)}. Convert it."
                )
            first = 8 + length + int(entry["data_offsets"][0])
            return np.memmap(file, kind, "r", first, tuple(entry["shape"]))

        return mapped

    return {name: array(entry) for name, entry in header.items() if name != "__metadata__"}


def _configured(config: Mapping[str, Any]) -> Configuration:
    kind = str(config["model_type"])
    _known(kind)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    width = int(config.get("head_dim") or hidden // heads)
    # Newer configurations have all of the positions in one place.
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    base = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotated = int(width * float(share))
    act = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    if act not in _ACTIVATIONS:
        raise OracleRefused(
            f"The model's activation is {act!r}; known are {', '.join(_ACTIVATIONS)}. Judge another model."
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None
    scale, divisors, unknown = _scaled(scaling, base, rotated)
    gemma = kind == "gemma"
    if gemma and act == "gelu":
        # Its first files say so and mean the approximation by tanh, which some engines know.
        unknown["activation"] = "its file says gelu, which engines read as exact or as approximated by tanh"
    return Configuration(
        model_type=kind,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        inner=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_width=width,
        vocabulary=int(config["vocab_size"]),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_ACTIVATIONS[act],
        rope_base=base,
        rope_width=rotated,
        attention_scale=width**-0.5,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        norm_offset=1.0 if gemma else 0.0,
        rope_scale=scale,
        rope_divisors=divisors,
        window=None if window is None else int(window),
        tied=config.get("tie_word_embeddings") is True,
        unknown=unknown,
    )


def _known(kind: str) -> None:
    if kind not in DECODERS:
        raise OracleRefused(
            f"The model is of type {kind!r}, and what it computes is not known by role; known are {', '.join(DECODERS)}. Judge one of "
            "these."
        )


def _scaled(
    scaling: Mapping[str, Any], base: float, width: int
) -> tuple[float, tuple[float, ...] | None, dict[str, str]]:
    """What positions are multiplied by, what frequencies are divided by, and the roles that are not known for it."""
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return 1.0, None, {}
    if kind == "linear":
        return 1.0 / float(scaling["factor"]), None, {}
    if kind == "llama3":
        return 1.0, _llama3(scaling, base, width), {}
    return 1.0, None, _other_angles(kind)


def _other_angles(kind: str) -> dict[str, str]:
    return dict.fromkeys(
        ("rope_q", "rope_k"), f"positions are scaled by {kind!r}, whose angles are not known"
    )


def _llama3(scaling: Mapping[str, Any], base: float, width: int) -> tuple[float, ...]:
    """Read in transformers 5.24 modeling_rope_utils.py _compute_llama3_parameters."""
    lengths = 2 * np.pi * base ** (np.arange(0, width, 2) / width)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    smooth = np.clip(
        (float(scaling["original_max_position_embeddings"]) / lengths - low) / (high - low), 0.0, 1.0
    )
    return tuple((1 / ((1 - smooth) / float(scaling["factor"]) + smooth)).tolist())


def _gguf(cls: type[ModelFile], path: Path) -> ModelFile:
    reader = open_gguf(path)
    kind = str(reader.fields["general.architecture"].contents())
    _known(kind)

    def told(key: str, default: Any = None) -> Any:
        found = reader.fields.get(f"{kind}.{key}")
        return default if found is None else found.contents()

    entries = {tensor.name: tensor for tensor in reader.tensors}
    heads, hidden = int(told("attention.head_count")), int(told("embedding_length"))
    width = int(told("attention.key_length", hidden // heads))
    scaling = str(told("rope.scaling.type", "none"))
    unknown = {} if scaling in ("none", "linear") else _other_angles(scaling)
    if told("attention.scale") is not None:
        unknown["attention"] = "its file names an attention scale, which some engines take and others do not"
    divisors = entries.get("rope_freqs.weight")
    configuration = Configuration(
        model_type=kind,
        layers=int(told("block_count")),
        hidden=hidden,
        inner=int(told("feed_forward_length")),
        heads=heads,
        kv_heads=int(told("attention.head_count_kv", heads)),
        head_width=width,
        vocabulary=int(entries["token_embd.weight"].shape[-1]),
        eps=float(told("attention.layer_norm_rms_epsilon")),
        activation="gelu_tanh" if kind == "gemma" else "silu",
        rope_base=float(told("rope.freq_base", 10000.0)),
        rope_width=int(told("rope.dimension_count", width)),
        attention_scale=width**-0.5,
        embedding_scale=hidden**0.5 if kind == "gemma" else 1.0,
        rope_scale=1.0 / float(told("rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0,
        rope_divisors=None if divisors is None else tuple(np.asarray(divisors.data, np.float64).tolist()),
        window=told("attention.sliding_window"),
        unknown=unknown,
    )
    tensors = {name: _stored(entry) for name, entry in entries.items()}
    # GGUF's norms hold the factor itself, gemma's too; its llama has the pairs that are rotated together side by side.
    return cls(path, configuration, _GGUF, tensors, kind == "llama")


def _stored(entry: Any) -> Callable[[], Array | Weight]:
    def read() -> Array | Weight:
        kind, data = str(entry.tensor_type.name), np.asarray(entry.data)
        if kind in ("F32", "F16"):
            return data
        if kind == "BF16":
            return np.ascontiguousarray(data).view(np.uint16)
        if kind in BLOCKS:
            return Blocks(kind, np.ascontiguousarray(data).view(np.uint8))
        raise OracleRefused(
            f"The tensor {entry.name} is stored as {kind}; the oracle reads F32, F16, BF16, {', '.join(BLOCKS)}. Convert it."
        )

    return read
