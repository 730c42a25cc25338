"""The layers of a model that an adapter changes, as its files say it, and whether two models are alike beside them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten

from detdiff.engines.mlx.taps.kernel_plan import weight_of
from detdiff.engines.mlx.taps.sites import site_name
from detdiff.explain.adapted import AdaptedLinear, PlainLinear
from detdiff.explain.bounds import exact_weight
from detdiff.explain.control import CannotRun
from detdiff.explain.roundings import Float64

from .adapters import FILES
from .model import LoadedModel

_DTYPES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def adapted_layers(loaded: LoadedModel) -> dict[str, AdaptedLinear]:
    """By site name, from the adapter's own files: what the modules make of them is what is judged. Raises CannotRun."""
    if loaded.adapter is None:
        raise CannotRun("the adapter's files are not at hand")
    config = json.loads((loaded.adapter / FILES[0]).read_text(encoding="utf-8"))
    if config.get("fine_tune_type", "lora") not in ("lora", "dora"):
        raise CannotRun(f"the adapter is of the type {config['fine_tune_type']}, which replaces weights")
    files: Any = mx.load(str(loaded.adapter / FILES[1]))
    modules = dict(loaded.model.named_modules())
    found = {}
    for name in files:
        path, _, leaf = name.rpartition(".")
        module = modules.get(path)
        if leaf != "lora_a" or module is None or files[name].ndim != 2:
            continue
        base = getattr(module, "linear", module)
        if isinstance(base, Linear | QuantizedLinear):
            length = files.get(f"{path}.m")
            found[site_name(path)] = AdaptedLinear(
                _plain(base),
                _exact(files[name]),
                _exact(files[f"{path}.lora_b"]),
                float(config["lora_parameters"]["scale"]),
                None if length is None else _exact(length),
            )
    if not found:
        raise CannotRun("the adapter changes no linear layer that is recorded")
    return found


def fused_at(loaded: LoadedModel, site: str) -> PlainLinear | None:
    """The layer of a site whose adapter, if it has one, is in its weights; None where it runs beside them."""
    module = next((m for path, m in loaded.model.named_modules() if site_name(path) == site), None)
    return _plain(module) if isinstance(module, Linear | QuantizedLinear) else None


def weights_beside(one: LoadedModel, other: LoadedModel, sites: Collection[str]) -> str:
    """The first weights, by name, in which two models differ beside these layers; empty where there are none."""
    parameters = [_beside(loaded, sites) for loaded in (one, other)]
    names = list(dict.fromkeys((*parameters[0], *parameters[1])))
    differing = [
        name
        for name in names
        if not all(name in each for each in parameters)
        or not mx.array_equal(parameters[0][name], parameters[1][name]).item()
    ]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{differing[0]}{more}" if differing else ""


def _beside(loaded: LoadedModel, sites: Collection[str]) -> dict[str, mx.array]:
    flat: Any = tree_flatten(loaded.model.parameters())
    found = {site_name(name): value for name, value in flat}
    return {name: v for name, v in found.items() if not any(name.startswith(f"{site}.") for site in sites)}


def _plain(module: Module) -> PlainLinear:
    bias = _exact(module["bias"]) if "bias" in module else None
    quantised = "scales" in module
    dtype = _DTYPES[(module["scales"] if quantised else module["weight"]).dtype]
    weight, step, ends = weight_of(module), None, None
    if quantised:
        if getattr(module, "mode", "affine") != "affine":
            raise CannotRun(f"weights are quantised in the mode {module.mode}, whose steps are not known")
        scales, biases = (
            np.repeat(_exact(module[name]), int(module.group_size), axis=1) for name in ("scales", "biases")
        )
        step = np.abs(scales)
        codes = np.rint((exact_weight(weight) - biases) / np.where(scales == 0, 1.0, scales))
        ends = (codes <= 0) | (codes >= 2 ** int(module.bits) - 1)
    return PlainLinear(weight, dtype, bias, step, ends)


def _exact(array: mx.array) -> Float64:
    return np.asarray(array.astype(mx.float32), np.float64)
