"""Adapters of mlx-lm (LoRA, DoRA, full): loaded into a model, and named in its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from detdiff.errors import AdapterInvalid, words_of

FILES: Final = ("adapter_config.json", "adapters.safetensors")


def load_adapter(model: Any, folder: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Put the adapter of a directory into ``model``, as ``mlx_lm.load`` does; the identity ``known`` with the adapter's.

    ``adapter`` has its name, type, scale and rank, the sha256 of its files and the one of the model's own weights;
    ``weights_sha256`` is of both. Raises AdapterInvalid.
    """
    from mlx_lm.tuner.utils import load_adapters

    path = Path(folder).expanduser()
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        raise AdapterInvalid(
            f"The adapter directory {str(path)!r} has no {' and no '.join(missing)}; expected what mlx_lm.lora writes: "
            f"{' and '.join(FILES)}. Correct adapter_path."
        )
    try:
        config = json.loads((path / FILES[0]).read_text(encoding="utf-8"))
        load_adapters(model, str(path))
    except (
        Exception
    ) as error:  # a wrong file shows as a key, a shape or a name that is missing somewhere in mlx-lm
        raise AdapterInvalid(
            f"mlx-lm does not load the adapter in {str(path)!r} ({type(error).__name__}: {words_of(error)}); expected one that was "
            "made for this model. Name the model that it was trained on, or another adapter."
        ) from error
    _make_switchable(model)
    model.eval()
    total = hashlib.sha256()
    for name in FILES:
        total.update(name.encode() + b"\0" + hashlib.sha256((path / name).read_bytes()).digest())
    adapter = total.hexdigest()
    parameters = config.get("lora_parameters", {})
    return {
        **known,
        "weights_sha256": hashlib.sha256(f"{known['weights_sha256']}{adapter}".encode()).hexdigest(),
        "adapter": {
            "name": path.resolve().name,
            "type": config.get("fine_tune_type", "lora"),
            "scale": parameters.get("scale"),
            "rank": parameters.get("rank"),
            "sha256": adapter,
            "base_weights_sha256": known["weights_sha256"],
        },
    }


_BY_CLASS: dict[type, type] = {}
"""What stands for each class of layers with an adapter."""


def _make_switchable(model: Any) -> None:
    """Let every layer with an adapter compute as its base alone, where it is told so. Its class keeps its name."""
    for _, module in model.named_modules():
        if hasattr(module, "lora_a") and hasattr(module, "linear"):
            module.__class__ = _switchable(type(module))


def _switchable(cls: type) -> type:
    from mlx_lm.tuner.dora import DoRALinear

    def call(self: Any, *args: Any, **kw: Any) -> Any:
        if self.adapter_off:
            return self.linear(*args, **kw)
        if issubclass(cls, DoRALinear):
            # It takes the base's weights and never calls it, so that there would be no site to tell an adapter that is left on by.
            # MLX computes this only where it is recorded.
            self.linear(*args, **kw)
        return cls.__call__(self, *args, **kw)

    if cls not in _BY_CLASS:
        members = {"__module__": cls.__module__, "__call__": call, "adapter_off": False}
        _BY_CLASS[cls] = type(cls.__name__, (cls,), members)
    return _BY_CLASS[cls]


def switch_adapter(model: Any, on: bool) -> None:
    """Let the adapter of a model compute from now on, or not. Raises AdapterInvalid where a layer has one that cannot be left out."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_a"):
            if not hasattr(module, "adapter_off"):
                raise AdapterInvalid(
                    f"The layer {name} ({type(module).__name__}) has an adapter that cannot be left out of a turn; expected one of "
                    "linear layers, from adapter_path. Leave use_adapter out."
                )
            module.adapter_off = not on
