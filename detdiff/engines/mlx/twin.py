"""A random-weight twin: a model directory that is a config.json with a seed in it, from which its weights are made.

What parts two runs is often in the shapes and kernels of a model and not in what it has learnt. Then a twin shows it too, and a
reproduction needs no weights at all.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.model_directory import LAYER_KEYS, RANDOM, read_config, recipe
from detdiff.errors import ModelConfigInvalid, ModelError, TokenizerMissing

DTYPES = ("float32", "float16", "bfloat16")


class TokenIds:
    """Stands for the tokenizer of a model that has none: a token's text is its id in brackets, and no text can be encoded."""

    has_chat_template = False

    def __init__(self, stops: Any) -> None:
        """``stops`` is the configuration's ``eos_token_id``: an id, several, or None."""
        ids = stops if isinstance(stops, list | tuple) else [] if stops is None else [stops]
        self.eos_token_ids: frozenset[int] = frozenset(int(token) for token in ids)

    def decode(self, ids: list[int]) -> str:
        return "".join(f"[{token}]" for token in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Raises TokenizerMissing."""
        raise TokenizerMissing(
            f"The model has random weights and no tokenizer, and there is a prompt that is text, {text[:40]!r}. Give the "
            "prompt as token ids, with `tokens` in the place of `prompt`."
        )


def twin_of(source: Any, folder: Path | str, seed: int = 0, layers: int | None = None) -> Path:
    """Write the twin of ``source`` into the directory ``folder``, which is made, and return it.

    ``source`` is a LoadedModel. The twin has its configuration, dtype and quantisation, the first ``layers`` of its layers
    (None: all) and weights of ``seed``. Raises ModelConfigInvalid where the configuration does not say how many layers there
    are or has fewer.
    """
    config = _plain(source.config if source.config else read_config(source.path))
    config[RANDOM] = {"seed": seed, "dtype": _dtype(source.model)}
    config.pop("model_file", None)
    if isinstance(config.get("quantization"), dict):
        # What the loader's own rule would quantise and the source does not.
        config.pop("quantization_config", None)
        config["quantization"] |= {path: False for path in _dense(source.model)}
    if layers is not None:
        config = with_layers(config, layers)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=1, sort_keys=True, allow_nan=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return folder


def layers_of(config: Mapping[str, Any]) -> int | None:
    """The number of layers that a configuration, or its text part, states; None where it does not say."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            for name in LAYER_KEYS:
                if isinstance(part.get(name), int):
                    return int(part[name])
    return None


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A configuration of the first ``layers`` layers; lists with an entry for each layer are cut as well.

    Raises ModelConfigInvalid where it states no number of layers, or fewer.
    """
    before = layers_of(config)
    if before is None or not 1 <= layers <= before:
        raise ModelConfigInvalid(
            f"The configuration states {'no number' if before is None else before} of layers and {layers} are asked for. Ask "
            "for at least 1 and no more than it has."
        )
    made = _plain(config)
    for part in (made, made.get("text_config")):
        if isinstance(part, dict):
            for name, value in part.items():
                if name in LAYER_KEYS:
                    part[name] = layers
                elif isinstance(value, list) and len(value) == before and before > 1:
                    part[name] = value[:layers]
    return made


def build(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The mlx-lm module that a twin's configuration describes, weights filled and evaluated, and the configuration.

    Every parameter is drawn by its own name, so layers that are left out change nothing in the others. Raises
    ModelConfigInvalid for a recipe that is none, and ModelError for quantisation that mlx cannot make.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.utils import _get_classes

    seed, dtype = recipe(config)
    made = _plain(config)
    model_class, arguments = _get_classes(config=made)
    model = model_class(arguments.from_dict(made))
    shapes: Any = tree_flatten(model.parameters())
    cast = getattr(model, "cast_predicate", lambda name: True)
    filled = []
    for name, array in shapes:
        values = mx.array(draw(seed, name, tuple(array.shape)))
        filled.append((name, values.astype(getattr(mx, dtype)) if cast(name) else values))
        mx.eval(filled[-1][1])
    model.update(tree_unflatten(filled))
    _quantise(nn, model, made.get("quantization"))
    model.eval()
    mx.eval(model.parameters())
    return model, made


def draw(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The values of the parameter ``name``, float32 of ``shape``; the same on every machine and with every numpy.

    Raw words of a PCG64 stream that is keyed by seed and name, their upper 24 bits as a number in [-1, 1). Matrices have the
    standard deviation 1/sqrt(fan-in), so that activations keep their size from layer to layer; biases 0.1; decay rates
    (``A_log``) are logarithms of 1 to 16; scales of norms are 1.
    """
    last = name.rpartition(".")[2]
    values = _uniform(seed, name, shape)
    if last == "A_log":
        values += np.float32(1)
        values *= np.float32(math.log(16) / 2)
    elif len(shape) >= 2:
        fan_in = int(np.prod(shape[1:])) if "conv" in name else shape[-1]
        values *= np.float32(math.sqrt(3 / fan_in))
    elif "bias" in last and last != "dt_bias":
        values *= np.float32(math.sqrt(0.03))
    else:
        values.fill(1)
    return values


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest(), "little")
    size = int(np.prod(shape, dtype=np.int64))
    words = np.random.PCG64(key).random_raw((size + 1) // 2).astype("<u8").view("<u4")[:size]
    whole: NDArray[np.float32] = (words >> 8).astype(np.float32)
    whole *= np.float32(2**-23)
    whole -= np.float32(1)
    return whole.reshape(shape)


def _quantise(nn: Any, model: Any, asked: Any) -> None:
    if not isinstance(asked, dict) or "bits" not in asked:
        return
    own = getattr(model, "quant_predicate", None)

    def chosen(path: str, module: Any) -> Any:
        if path in asked:
            return asked[path]
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % asked["group_size"]:
            return False
        return own is None or bool(own(path, module))

    try:
        nn.quantize(
            model,
            group_size=asked["group_size"],
            bits=asked["bits"],
            mode=asked.get("mode", "affine"),
            class_predicate=chosen,
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise ModelError(
            f"The random weights cannot be quantised as config.json says: {' '.join(str(error).split())}. Correct its "
            "`quantization`, or leave it out for dense weights."
        ) from error


def _dense(model: Any) -> Iterator[str]:
    """Modules that could be quantised and are not."""
    for path, module in model.named_modules():
        if path and hasattr(module, "to_quantized") and "scales" not in module:
            yield path


def _dtype(model: Any) -> str:
    """The dtype of most of a model's floating-point numbers; of a quantised matrix its scales."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    counts: Counter[str] = Counter()
    arrays: Any = tree_flatten(model.parameters())
    for _, array in arrays:
        if mx.issubdtype(array.dtype, mx.floating):
            counts[str(array.dtype).rpartition(".")[2]] += array.size
    common = [dtype for dtype, _ in counts.most_common() if dtype in DTYPES]
    return common[0] if common else "float32"


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(config))
