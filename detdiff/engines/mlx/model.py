"""Load an mlx-lm model: built-in, a directory or a hub id. mlx is not imported before `load` is called."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from detdiff.engines.mlx.model_directory import RANDOM, check_directory, code_file, config_value, identity
from detdiff.errors import (
    ChatTemplateUnusable,
    ModelCodeRefused,
    ModelConfigInvalid,
    ModelError,
    ModelTypeUnknown,
    ModelUnreachable,
    ModelWeightsMismatch,
    PromptWithoutTokens,
    TokenizerInvalid,
    words_of,
)

from .adapters import load_adapter
from .model_directory import TokenIds, build

__all__ = [
    "BUILTIN",
    "LoadedModel",
    "builtin_path",
    "context_limit",
    "encode",
    "identity",
    "load",
    "load_tokenizer",
    "load_weights",
    "locate",
]

BUILTIN = ("builtin", "builtin-draft")
BUILTIN_FOLDER = Path(__file__).parent / "builtin"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    model: the mlx-lm ``nn.Module``, weights evaluated. tokenizer: mlx-lm's ``TokenizerWrapper``. path: the
    directory that both came from. identity: see `detdiff.engines.mlx.model_directory.identity`. config: config.json, plus
    what mlx-lm adds. staged: what reference kernels have made of its weights, kept from run to run. apart: the profiles
    (None: no profile) under which the packed layout was seen to keep its requests apart. adapter: the directory of the
    adapter that it was loaded with. share: what this process has of a model that several run (``sharded.shares.ModelShare``).
    """

    model: Any
    tokenizer: Any
    path: Path
    identity: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    staged: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    apart: set[str | None] = field(default_factory=set, compare=False, repr=False)
    adapter: Path | None = None
    share: Any = field(default=None, compare=False, repr=False)

    @property
    def reads_text(self) -> bool:
        """Whether its tokenizer makes tokens of text; that of random weights knows token ids alone."""
        return not isinstance(self.tokenizer, TokenIds)


def load(spec: str, adapter: str | None = None, *, custom_code: bool = False) -> LoadedModel:
    """Load the model that `spec` names: ``builtin`` or ``builtin-draft``, a directory, or a hub id; with the adapter of a
    directory, if one is given.

    ``custom_code`` lets a model's own Python file run, where its config.json names one as ``model_file``.

    Raises:
        ModelCodeRefused: there is such a file and it was not allowed, or it is not there.
        AdapterInvalid: the adapter's directory is not one of this model.
        ModelError: another subclass per broken rule of a model directory.
        ModelUnreachable: a hub id is neither in the local cache nor within reach.
    """
    path = locate(spec)
    known = identity(path)
    model, config = load_weights(path, custom_code=custom_code)
    if adapter is not None:
        known = load_adapter(model, adapter, known)
    folder = None if adapter is None else Path(adapter).expanduser()
    return LoadedModel(model, load_tokenizer(path, config), path, known, config, adapter=folder)


def locate(spec: str) -> Path:
    """The directory that `spec` names; a hub id is fetched unless the local cache has it.

    A spec is a path when something of that name exists or when it is written like one (``./x``, ``~/x``,
    ``a/b/c``).
    """
    if spec in BUILTIN:
        return builtin_path(spec)
    path = Path(spec).expanduser()
    if path.exists() or not HUB_ID.fullmatch(spec):
        return path
    return _fetch(spec)


def builtin_path(name: str = "builtin") -> Path:
    """The directory of a built-in model: small, trained, and an ordinary mlx-lm directory.

    Raises ModelError for an unknown name and for an installation that lacks the model's files.
    """
    if name not in BUILTIN:
        raise ModelError(
            f"There is no built-in model {name!r}; the built-in models are {' and '.join(BUILTIN)}. "
            "Give one of these names, or the path of a model directory."
        )
    path = BUILTIN_FOLDER / name
    if not (path / "model.safetensors").is_file():
        raise ModelError(
            f"The built-in model {name!r} is missing from this installation: {path} holds no "
            "model.safetensors. Install detdiff again, or give the path of a model directory."
        )
    return path


def load_weights(path: Path, *, lazy: bool = False, custom_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """The mlx-lm module and configuration of the model directory `path`; with `lazy` no weight is read yet.

    ``custom_code``: see `load`.

    Raises:
        ModelCodeRefused: the model has a file of its own, which was not allowed.
        ModelTypeUnknown: mlx-lm has no such model type.
        ModelConfigInvalid: the configuration lacks what the model type needs.
        ModelWeightsMismatch: arrays are missing, superfluous or of another shape.
        ModelError: the directory breaks another rule, or mlx-lm refuses the model for a reason of its own.
    """
    described = check_directory(path)
    file = code_file(path, described)
    if file is None:
        _check_type(described["model_type"])
    elif not custom_code:
        raise ModelCodeRefused(
            f"The model {path.name!r} has code of its own: its config.json names {file.name!r} as model_file (sha256 "
            f"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}), and code that came with a model may do anything. Read it, and "
            "allow it with the engine's setting custom_code: `--both engine.custom_code=true`, in a file `engine = { name = "
            '"mlx", custom_code = true }`, for `probe` --custom-code, in Python `load(PATH, custom_code=True)`.'
        )
    from mlx_lm.utils import _get_classes, load_model

    try:
        classes = _get_classes if file is None else lambda config: _own_classes(file)
        if RANDOM in described:
            return build(described, classes)
        # Without the name of its file mlx-lm asks for the classes, and these are of a module that taps can find.
        own = {} if file is None else {"model_config": {"model_file": None}, "get_model_classes": classes}
        model, config = load_model(path, lazy=lazy, **own)
        if file is not None:
            config["model_file"] = described["model_file"]
    except ModelError:
        raise
    except (ValueError, KeyError) as error:
        # ValueError is how mlx complains of names and shapes, KeyError how a sanitizer misses an array.
        if isinstance(error, KeyError) or re.search(r"parameters|[Ee]xpected shape", str(error)):
            raise ModelWeightsMismatch(
                f"The weight files in {str(path)!r} are not those that its config.json describes: "
                f"{_words(error)}. Some weight files are missing, or the two come from different models; "
                f"fetch the directory again."
            ) from error
        raise _refused(path, error) from error
    except (TypeError, ZeroDivisionError) as error:
        raise ModelConfigInvalid(
            f"mlx-lm cannot build a model from {str(path / 'config.json')!r}: {_words(error)}. A value is "
            f"missing or of the wrong kind; copy the whole config.json of the model that the weights come "
            f"from."
        ) from error
    except Exception as error:  # a model's own file may do anything with weights it was not written for
        raise _refused(path, error) from error
    return model, config


def _own_classes(file: Path) -> tuple[Any, Any]:
    """The Model and ModelArgs of a model's own file, imported under a name by its contents, so that twins share it."""
    source = file.read_bytes()
    name = f"model_file_{hashlib.sha256(source).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    found = sys.modules[name]
    return found.Model, found.ModelArgs


def load_tokenizer(path: Path, config: Mapping[str, Any]) -> Any:
    """mlx-lm's ``TokenizerWrapper`` of the model directory `path`, with the stop tokens that `config` names.

    A model of random weights has no tokenizer; what stands for it knows token ids alone.

    Raises:
        TokenizerInvalid: the tokenizer files do not load.
    """
    if RANDOM in config:
        return TokenIds(config.get("eos_token_id"))
    from mlx_lm.utils import load_tokenizer as load_wrapper

    # To find the tokenizer's class transformers reads the configuration of a model of its own, for which it imports torch.
    # The built-in models' files name the class.
    named = {"config": SimpleNamespace(model_type=None)} if path.parent == BUILTIN_FOLDER else None
    try:
        # mlx-lm refuses some configurations of its own accord, so its message is the reason to show.
        return load_wrapper(path, named, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # the tokenizer libraries raise bare Exception for a damaged file
        raise TokenizerInvalid(
            f"The tokenizer in {str(path)!r} does not load: {_words(error)}. Fetch tokenizer.json, "
            f"tokenizer_config.json and what else belongs to the tokenizer again."
        ) from error


def encode(
    loaded: LoadedModel, text: str, chat: bool, arguments: Mapping[str, Any] = MappingProxyType({})
) -> list[int]:
    """Token ids of `text`; with `chat`, as one user message through the chat template, which is given `arguments`, ready for
    the answer.

    Raises:
        ChatTemplateUnusable: `chat` and the tokenizer has no template, or the template refuses the message.
        PromptWithoutTokens: not one token came out.
        TokenizerInvalid: an id is outside the model's vocabulary.
    """
    if chat:
        tokens = encode_messages(loaded, [{"role": "user", "content": text}], arguments=arguments)
    else:
        tokens = [int(token) for token in loaded.tokenizer.encode(text)]
    name = loaded.path.name
    if not tokens:
        raise PromptWithoutTokens(
            f"The prompt {text[:40]!r} becomes no token at all with the tokenizer of {name!r}, and a request "
            f"needs at least one. Give a prompt with text in it."
        )
    size = config_value(loaded.config, "vocab_size")
    if size is not None and max(tokens) >= size:
        raise TokenizerInvalid(
            f"The tokenizer of {name!r} gives the token id {max(tokens)} and the model has {size} of them (0 "
            f"to {size - 1}). The tokenizer belongs to another model; copy the one that belongs to the "
            f"weights."
        )
    return tokens


def encode_messages(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    answers: bool = True,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Token ids of a chat through the template, which is given ``arguments``; ``answers``: ready for the answer.

    Raises ChatTemplateUnusable where the tokenizer has no template, or the template refuses the messages.
    """
    name = loaded.path.name
    if not loaded.tokenizer.has_chat_template:
        raise ChatTemplateUnusable(
            f"The tokenizer of {name!r} has no chat template, so a chat prompt cannot be laid out. Set "
            f"`chat = false` to give the text as it is, or add a chat_template.jinja to the model "
            f"directory."
        )
    turns = [dict(message) for message in messages]
    try:
        tokens = loaded.tokenizer.apply_chat_template(
            turns, **{"add_generation_prompt": answers, **arguments}
        )
    except Exception as error:  # a template is a program; it may fail in any way
        what = "a single user message" if len(turns) == 1 else f"a chat of {len(turns)} messages"
        raise ChatTemplateUnusable(
            f"The chat template of {name!r} refuses {what}: {_words(error)}. Set `chat = "
            f"false` and write the turns out in the prompt."
        ) from error
    return [int(token) for token in tokens]


def context_limit(loaded: LoadedModel) -> int | None:
    """The number of positions that the model was made for, or None where its configuration does not say."""
    return config_value(loaded.config, *CONTEXT_KEYS)


def _fetch(hub_id: str) -> Path:
    # mlx-lm's own two steps, so that a model which mlx-lm has fetched is found and its file patterns hold.
    from mlx_lm.utils import _download, hf_repo_to_path

    try:
        try:
            return Path(hf_repo_to_path(hub_id))
        except (OSError, ValueError):  # not in the local cache
            return Path(_download(hub_id))
    except Exception as error:  # network, permission or spelling: the hub library has a class for each
        raise ModelUnreachable(
            f"There is no directory {hub_id!r} here, and as a hub id it is not in the local cache and could "
            f"not be fetched: {_words(error)}. Check the spelling and the network, or give the path of a "
            f"model directory."
        ) from error


def _check_type(model_type: str) -> None:
    from mlx_lm import models
    from mlx_lm.utils import MODEL_REMAPPING

    module = MODEL_REMAPPING.get(model_type, model_type)
    if re.fullmatch(r"[\w-]+", module) and importlib.util.find_spec(f"mlx_lm.models.{module}"):
        return
    folder = Path(models.__path__[0])
    known = {info.name for info in pkgutil.iter_modules(models.__path__)}
    known = {name for name in known if "class ModelArgs" in (folder / f"{name}.py").read_text("utf-8")}
    near = difflib.get_close_matches(model_type, sorted(known | set(MODEL_REMAPPING)), n=1, cutoff=0.0)
    raise ModelTypeUnknown(
        f"config.json names the model type {model_type!r}, and the installed mlx-lm has {len(known)} types, "
        f"none of that name; the nearest is {near[0]!r}. Correct the name, or install an mlx-lm that has "
        f"this type."
    )


def _refused(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"mlx-lm does not load the model directory {str(path)!r}: {_words(error)}. Expected is a directory "
        f"that `mlx_lm.generate --model DIR` runs; convert the model with `mlx_lm.convert`."
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}, {words_of(error)}"
