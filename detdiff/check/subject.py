"""What is checked: a model by its name or as an object, or an engine of the user's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detdiff.engines.mlx.model import BUILTIN, LoadedModel, load
from detdiff.engines.mlx.model_directory import config_value
from detdiff.errors import CheckSubjectInvalid


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that is ready to run.

    ``name`` stands for it in scenarios. ``again`` says that the name alone loads it, so that a kept scenario can be run
    from the command line. ``key`` tells it from every other one of this session.
    """

    loaded: LoadedModel
    name: str
    again: bool
    key: object = field(repr=False)

    @property
    def label(self) -> str:
        """What it is called in what is said, without the folder that it lies in."""
        return str(self.loaded.identity.get("name") or self.name)


class Subjects:
    """The models of a session: those with a name are loaded once, those that are objects belong to who made them."""

    def __init__(self) -> None:
        self._named: dict[str, Subject] = {}
        self._objects: dict[int, tuple[weakref.ref[Any], object]] = {}

    def of(self, model: Any) -> Subject:
        """The subject for a path, hub id or ``builtin``, a LoadedModel, or the pair that ``mlx_lm.load`` gives.

        Raises CheckSubjectInvalid for anything else, and what loading raises.
        """
        if isinstance(model, str | Path):
            return self._by_name(str(model))
        if isinstance(model, LoadedModel):
            name = str(model.identity.get("name") or model.path.name or "model")
            # Whoever owns an object may have changed its weights, and what kernels made of them before would hide that.
            return Subject(replace(model, staged={}), name, False, self._known(model.model))
        if isinstance(model, tuple | list) and len(model) in (2, 3) and _is_module(model[0]):
            return self._pair(model[0], model[1])
        what = "an mlx module without its tokenizer" if _is_module(model) else f"a {type(model).__name__}"
        raise CheckSubjectInvalid(
            f"{what[0].upper()}{what[1:]} cannot be checked; expected a model's path or hub id, 'builtin', what `mlx_lm.load` "
            "gives (model and tokenizer), a LoadedModel, or an object that fulfils detdiff.check.engine.Engine. Give one of "
            "them."
        )

    def _by_name(self, name: str) -> Subject:
        path = Path(name).expanduser()
        # A path of its own in every scenario: one that is kept is run from another folder.
        place = str(path.resolve()) if path.is_dir() and name not in BUILTIN else name
        if place not in self._named:
            self._named[place] = Subject(load(place), place, True, object())
        return self._named[place]

    def _pair(self, module: Any, tokenizer: Any) -> Subject:
        if not hasattr(tokenizer, "eos_token_ids"):
            from mlx_lm.tokenizer_utils import TokenizerWrapper

            tokenizer = TokenizerWrapper(tokenizer)
        config = dict(vars(module.args)) if hasattr(getattr(module, "args", None), "__dict__") else {}
        kind = str(getattr(module, "model_type", None) or type(module).__module__.rpartition(".")[2])
        identity = {"name": kind, "model_type": kind, "vocab_size": config_value(config, "vocab_size")}
        loaded = LoadedModel(module, tokenizer, Path(kind), identity, config)
        return Subject(loaded, kind, False, self._known(module))

    def _known(self, module: Any) -> object:
        """An object's key, which goes when the object does."""
        found = self._objects.get(id(module))
        if found is None or found[0]() is not module:
            found = (weakref.ref(module, _forget(self._objects, id(module))), object())
            self._objects[id(module)] = found
        return found[1]


def _forget(objects: dict[int, Any], id_: int) -> Callable[[Any], None]:
    def gone(ref: Any) -> None:
        if id_ in objects and objects[id_][0] is ref:
            del objects[id_]

    return gone


def _is_module(model: Any) -> bool:
    from mlx.nn.layers.base import Module

    return isinstance(model, Module)
