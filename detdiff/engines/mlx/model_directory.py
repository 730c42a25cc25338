"""What a model directory must hold, checked before anything loads it, its identity, and its random-weight twin. Needs no mlx.

A twin is a directory that is a config.json with a seed in it, from which its weights are made. What makes two runs diverge is often in the
shapes and kernels of a model and not in what it has learnt. Then a twin shows it too, and a reproduction needs no weights at all.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import (
    ModelCodeRefused,
    ModelConfigInvalid,
    ModelConfigMissing,
    ModelError,
    ModelNotADirectory,
    ModelNotFound,
    ModelShardMissing,
    ModelWeightsCorrupt,
    ModelWeightsMissing,
    TokenizerMissing,
    words_of,
)

WEIGHTS_INDEX = "model.safetensors.index.json"
RANDOM = "detdiff_random"
"""The key of a config.json whose model has random weights, with ``seed`` and ``dtype``; `detdiff.engines.mlx.model_directory` makes them."""
LAYER_KEYS = ("num_hidden_layers", "n_layers", "n_layer")
TOKENIZER_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# One of these holds a vocabulary; the other tokenizer files only add to one.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tiktoken.model",
)


def check_directory(path: Path) -> dict[str, Any]:
    """Check that `path` holds a whole model and return its configuration.

    Checked: the configuration is a JSON object with a model type; every weight file's header fits its file;
    every file that an index names is there; there is a tokenizer. Array names and shapes are the loader's to
    check. A model of random weights needs its configuration alone.

    Raises:
        ModelNotFound, ModelNotADirectory, ModelConfigMissing, ModelConfigInvalid, ModelWeightsMissing,
        ModelShardMissing, ModelWeightsCorrupt, TokenizerMissing: the rule that `path` breaks.
    """
    if not path.exists():
        raise ModelNotFound(
            f"There is no model directory {str(path)!r}. A model is `builtin`, a directory in the form that "
            f"mlx-lm reads (config.json, model*.safetensors, tokenizer files), or a hub id such as "
            f"`org/name`.{_similar(path)}"
        )
    if not path.is_dir():
        advice = (
            "Turn a GGUF file into such a directory with `detdiff import-gguf FILE DIR`."
            if path.suffix.lower() == ".gguf"
            else "Give the directory that holds it."
        )
        raise ModelNotADirectory(
            f"{str(path)!r} is a file, and a model is a directory with config.json, model*.safetensors and "
            f"tokenizer files. {advice}"
        )
    config = read_config(path)
    if RANDOM in config:
        recipe(config)
        if weight_files(path):
            raise ModelConfigInvalid(
                f"{str(path / 'config.json')!r} asks for random weights ({RANDOM}), and there are weight files beside it. "
                "Remove one of the two."
            )
        return config
    check_weight_files(path)
    if not _matching(path, VOCABULARIES):
        raise TokenizerMissing(
            f"The model directory {str(path)!r} has no tokenizer: none of {', '.join(VOCABULARIES)} is in "
            f"it. Copy the tokenizer files of the model that the weights come from into it."
        )
    return config


def read_config(path: Path) -> dict[str, Any]:
    """The parsed config.json of the model directory `path`.

    Raises:
        ModelConfigMissing: there is none.
        ModelConfigInvalid: it is not a JSON object or names no model type.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelConfigMissing(
            f"The model directory {str(path)!r} has no config.json. Copy the one that belongs to the weights "
            f"into it, or give a directory in the form that mlx-lm reads."
        )
    config = _read_object(file)
    if not isinstance(config.get("model_type"), str):
        raise ModelConfigInvalid(
            f"{str(file)!r} has no `model_type`, so nothing says which architecture the weights are for. "
            f"Copy the whole config.json of the model that they come from."
        )
    return config


def recipe(config: Mapping[str, Any]) -> tuple[int, str]:
    """Seed and dtype of a configuration that asks for random weights. Raises ModelConfigInvalid for others."""
    asked = config.get(RANDOM)
    seed = asked.get("seed") if isinstance(asked, dict) else None
    dtype = asked.get("dtype") if isinstance(asked, dict) else None
    if type(seed) is not int or seed < 0 or dtype not in ("float32", "float16", "bfloat16"):
        raise ModelConfigInvalid(
            f"config.json has {RANDOM} {asked!r}; expected a seed, 0 or more, and a dtype, such as "
            f'{{"seed": 0, "dtype": "bfloat16"}}. Correct it there.'
        )
    return seed, dtype


def weight_files(path: Path) -> list[Path]:
    """The weight files of the directory that mlx-lm reads, sorted by name."""
    return sorted(path.glob("model*.safetensors"))


def check_weight_files(path: Path) -> None:
    """Check that the weight files of `path` are there and whole; only headers and lengths are read."""
    files = weight_files(path)
    index = path / WEIGHTS_INDEX
    if index.is_file():
        shards = _read_object(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelWeightsCorrupt(
                f"{str(index)!r} has no `weight_map` from array names to file names. Copy the index again, "
                f"or delete it: the weights load without one."
            )
        missing = sorted({name for name in shards.values() if not (path / name).is_file()})
        if missing:
            raise ModelShardMissing(
                f"{str(index)!r} names {len(set(shards.values()))} weight files and {len(missing)} of them "
                f"{'is' if len(missing) == 1 else 'are'} not there: {_some(missing)}. Fetch the missing "
                f"files again."
            )
    if not files:
        others = sorted(
            p.name for p in _matching(path, ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz"))
        )
        found = f"It holds {_some(others)}, which mlx-lm does not read. " if others else ""
        raise ModelWeightsMissing(
            f"The model directory {str(path)!r} has no model*.safetensors file, so it has no weights. "
            f"{found}Fetch the weights again, convert them with `mlx_lm.convert`, or import a GGUF file with "
            f"`detdiff import-gguf`."
        )
    for file in files:
        _array_dtypes(file)


def code_file(path: Path, config: Mapping[str, Any]) -> Path | None:
    """The Python file in the model directory that config.json names as ``model_file``; None where it names none.

    Raises ModelCodeRefused where it is not a file of the directory.
    """
    name = config.get("model_file")
    if name is None:
        return None
    file = path / str(name)
    if isinstance(name, str) and file.is_file() and file.resolve().is_relative_to(path.resolve()):
        return file
    raise ModelCodeRefused(
        f"{str(path / 'config.json')!r} names {name!r} as model_file, and there is no such file in the directory; expected the "
        "Python file with the model's classes. Copy it there, or leave the key out to run mlx-lm's own class."
    )


def identity(path: Path) -> dict[str, Any]:
    """What tells this model from another, for the header of a trace; the same on every machine.

    Returns:
        ``name`` (last part of the path, no more of it), ``model_type``, ``config_sha256`` (of config.json's
        content, whatever its spacing), ``weights_sha256`` (names and bytes of the weight files, in name
        order), ``tokenizer_sha256`` (names and bytes of the tokenizer files, in name order), ``dtypes``
        (number of arrays per safetensors dtype), ``quantization`` (in words, None where dense), ``layers``
        and ``vocab_size`` (None where the configuration does not say). Random weights follow from the
        configuration and their recipe, so ``weights_sha256`` is that of the recipe, and ``tokenizer_sha256`` is None. A
        model with code of its own also has ``model_file``, its name, and ``model_file_sha256``.

    Raises:
        ModelError: the directory breaks a rule of `check_directory`.
    """
    config = check_directory(path)
    files = weight_files(path)
    drawn = RANDOM in config
    dtypes: Counter[str] = sum((_array_dtypes(file) for file in files), Counter())
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return {
        "name": path.resolve().name,
        "model_type": config["model_type"],
        "config_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
        "weights_sha256": _hash_recipe(config) if drawn else _hash_files(files),
        "tokenizer_sha256": None
        if drawn
        else _hash_files(sorted(_matching(path, (*TOKENIZER_FILES, "*.tiktoken")))),
        "dtypes": {} if drawn else dict(sorted(dtypes.items())),
        "quantization": _quantization(config),
        "layers": layers_of(config),
        "vocab_size": config_value(config, "vocab_size"),
        **_code(path, config),
    }


def _code(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = code_file(path, config)
    if file is None:
        return {}
    return {"model_file": file.name, "model_file_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def config_value(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of `names` that the configuration, or its text part, sets to a whole number."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            for name in names:
                if isinstance(part.get(name), int):
                    return int(part[name])
    return None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelConfigInvalid(
            f"{str(file)!r} cannot be read as JSON ({error}). Fetch the file again, or correct it there."
        ) from error
    if not isinstance(content, dict):
        raise ModelConfigInvalid(
            f"{str(file)!r} holds a JSON {type(content).__name__}, and an object was expected. Fetch the "
            f"file again."
        )
    return content


def _array_dtypes(file: Path) -> Counter[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as arrays:
            return Counter(arrays.get_slice(name).get_dtype() for name in arrays.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelWeightsCorrupt(
            f"The weight file {str(file)!r} ({file.stat().st_size} bytes) is cut short or damaged: its "
            f"header does not describe it ({words_of(error)}). Fetch the file again."
        ) from error


def _hash_files(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        # Name and content each end up with one reading: a fixed-length digest after a terminated name.
        total.update(file.name.encode() + b"\0" + content)
    return total.hexdigest()


def _hash_recipe(config: dict[str, Any]) -> str:
    # The version of the recipe: to be raised when `detdiff.engines.mlx.model_directory` draws otherwise.
    seed, dtype = recipe(config)
    return hashlib.sha256(f"{RANDOM}/1:{seed}:{dtype}".encode()).hexdigest()


def _quantization(config: dict[str, Any]) -> str | None:
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    if "bits" not in quantization:
        return str(quantization.get("quant_method", "unknown"))

    def words(entry: Any) -> str:
        if not isinstance(entry, dict):
            return "unquantised"
        return f"{entry.get('mode', 'affine')} {entry.get('bits')}-bit group {entry.get('group_size')}"

    default = words(quantization)
    others = Counter(
        words(entry) for entry in quantization.values() if isinstance(entry, dict) or entry is False
    )
    others.pop(default, None)
    return default + "".join(f"; {count} module(s) {name}" for name, count in sorted(others.items()))


def _matching(path: Path, patterns: Iterable[str]) -> set[Path]:
    return {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}


def _similar(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" Its parent directory {str(parent)!r} does not exist either."
    near = difflib.get_close_matches(path.name, [p.name for p in parent.iterdir() if p.is_dir()], n=1)
    return f" Did you mean {str(parent / near[0])!r}?" if near else ""


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


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
    code = code_file(source.path, config)
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
    if code is not None:
        shutil.copyfile(code, folder / code.name)
    return folder


def layers_of(config: Mapping[str, Any]) -> int | None:
    """The number of layers that a configuration, or its text part, states; None where it does not say."""
    return config_value(config, *LAYER_KEYS)


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


def build(config: Mapping[str, Any], classes: Any = None) -> tuple[Any, dict[str, Any]]:
    """The mlx-lm module that a twin's configuration describes, weights filled and evaluated, and the configuration.

    ``classes`` gives the classes of the model and of its arguments for a configuration; None: mlx-lm's own. Every parameter is drawn by its own name, so layers that are left out change nothing in the others. Raises
    ModelConfigInvalid for a recipe that is none, and ModelError for quantisation that mlx cannot make.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.utils import _get_classes

    seed, dtype = recipe(config)
    made = _plain(config)
    model_class, arguments = (classes or _get_classes)(config=made)
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
            f"The random weights cannot be quantised as config.json says: {words_of(error)}. Correct its "
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
