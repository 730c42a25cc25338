"""Adapters for tests: written as mlx-lm writes them, and fused as ``mlx_lm.fuse`` fuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from detdiff.engines.mlx.adapters import load_adapter
from detdiff.engines.mlx.model import LoadedModel

PARAMETERS: dict[str, Any] = {"rank": 4, "scale": 8.0, "dropout": 0.0}


def write_adapter(
    of: LoadedModel, folder: Path, *, dora: bool = False, layers: int = -1, seed: int = 5
) -> Path:
    """An adapter of random weights for ``of``, which is changed; give a model of its own."""
    mx.random.seed(seed)
    linear_to_lora_layers(of.model, layers, PARAMETERS, use_dora=dora)
    weights = {
        name: mx.random.normal(value.shape) * (0.05 if name.endswith("lora_b") else 1.0)
        if not name.endswith(".m")
        else value
        for name, value in tree_flatten(of.model.parameters())
        if name.rpartition(".")[2] in ("lora_a", "lora_b", "m")
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": layers,
        "lora_parameters": PARAMETERS,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapted(of: LoadedModel, folder: Path) -> LoadedModel:
    """``of``, which is changed, with the adapter of a directory."""
    known = {"weights_sha256": of.identity.get("weights", "none"), **of.identity}
    identity = load_adapter(of.model, str(folder), known)
    return LoadedModel(of.model, of.tokenizer, of.path, identity, of.config, adapter=folder)


def fused(of: LoadedModel, name: str = "fused") -> LoadedModel:
    """``of``, which is changed, with its adapter in the weights, as ``mlx_lm.fuse`` does it."""
    layers = [(name, m.fuse()) for name, m in of.model.named_modules() if hasattr(m, "fuse")]
    of.model.update_modules(tree_unflatten(layers))
    mx.eval(of.model.parameters())
    identity = {k: v for k, v in of.identity.items() if k != "adapter"}
    return LoadedModel(of.model, of.tokenizer, of.path, {**identity, "weights_sha256": name}, of.config)
