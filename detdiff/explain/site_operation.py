"""The operation of a site: what it was given, as captured, with the parameters of the model's module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff.engines.mlx.instrument.sites import walk
from detdiff.engines.mlx.instrument.taps import TAPPED
from detdiff.engines.mlx.instrument.weights import operand, weight_of
from detdiff.errors import OracleRefused
from detdiff_kernels import Affine

from .attention_bound import AttentionOperation
from .bounds import Copied, Embedding, Linear, Switch, exact_weight, magnitude
from .oracle import Operation
from .roundoff import UNIT, Float64, numbers
from .row_bounds import Norm, Rope

Captured = Mapping[str, Any]

# Modules of mlx-lm whose RMSNorm multiplies by one more than its weight; read in mlx-lm 0.32.2.
_ONE_MORE = ("gemma", "gemma2", "gemma3_text", "recurrent_gemma", "minimax_m3_vl", "muse_glimmer")
_ROPES = ("RoPE", "Llama3RoPE", "YarnRoPE", "SuScaledRoPE", "ProportionalRoPE")
_NO_SCALE = 1.0


def operation_of(model: Any, site: str, captured: Captured) -> Operation:
    """The operation of ``site`` of a model, or of a loaded model, with the inputs ``captured``.

    Values are arrays of numbers, widened, or recorded ``Values``; rows come first:

    - linear, head: ``in`` (rows, K); switch: ``in`` (rows, K), or (rows, experts, K), and ``experts`` (rows, experts)
    - embedding: ``in`` ids (rows,); norm: ``in`` (rows, ..., n), for gated ones ``in.2``
    - rope: ``in`` (rows, heads, D) and ``positions`` (rows,)
    - attention: ``in`` queries (rows, heads, D), ``k`` and ``v`` (kv heads, keys, D) or, quantised, triples of packed codes,
      scales and biases with ``bits`` and ``group_size``; ``mask``: None, "causal" (the last row attends all keys), or an array
      (rows, keys) or (heads, rows, keys), bool or added; ``scale`` and ``sinks`` where they are not the module's own
    - cache_write, cache_read, state: ``expected``

    Raises OracleRefused for a composite, a missing capture, and a module that computes in a way that is not known.
    """
    module = getattr(model, "model", model) if not isinstance(model, Module) else model
    leaves = {name: (leaf, kind) for name, leaf, kind in walk(module)}
    name, leaf, kind = _find(site, leaves)
    if kind in ("cache", "state"):
        return Copied(numbers(_get(captured, "expected", site)))
    if kind == "attention":
        return _attention(leaf, site, captured)
    assert leaf is not None
    if kind == "as_linear" or kind == "linear":
        method = "as_linear" if kind == "as_linear" else "__call__"
        return _linear(leaf, site, numbers(_get(captured, "in", site)), method)
    if kind == "switch":
        return _switch(leaf, site, captured)
    if kind == "embedding":
        ids = numbers(_get(captured, "in", site)).astype(np.int64).reshape(-1)
        return Embedding(ids, weight_of(leaf), "scales" in leaf)
    if kind == "norm":
        return _norm(leaf, site, captured)
    return _rope(leaf, site, captured)


def _find(site: str, leaves: dict[str, tuple[Module, str]]) -> tuple[str, Module | None, str]:
    """The module behind a site name, and the kind of operation; later calls of a module have a number at the end."""
    base = site
    while base:
        parent, _, last = base.rpartition(".")
        if base in leaves:
            module, kind = leaves[base]
            if kind == "composite":
                break
            return base, module, kind
        if last == "as_linear" and parent in leaves:
            return base, leaves[parent][0], "as_linear"
        if last in ("write", "read") and parent.endswith(".cache"):
            return base, None, "cache"
        if last == "state":
            return base, None, "state"
        if last == "attention":
            return base, leaves[parent][0] if parent in leaves else None, "attention"
        if not (last in ("q", "k") or last.rstrip("x").isdigit()):
            break
        base = parent
    if site in leaves or base in leaves:
        raise OracleRefused(
            f"The site {site} is a composite, whose error has no bound of one operation. Ask its leaves: the first of them "
            "whose output differs on equal inputs."
        )
    raise OracleRefused(
        f"The model has no site {site!r} that computes something, or its logits are those of the head. Name a leaf, such as "
        f"{next((n for n, (_, k) in leaves.items() if k != 'composite'), 'lm_head')}."
    )


def _get(captured: Captured, port: str, site: str) -> Any:
    if port not in captured:
        raise OracleRefused(
            f"The capture of {site} has {', '.join(sorted(captured)) or 'nothing'}; the oracle needs {port!r} there. Record "
            "the site's values with full capture."
        )
    return captured[port]


def _known(module: Module, site: str, method: str = "__call__") -> None:
    problem = operand(module, mx.zeros((1, 1)), method).problem
    if problem and "computes in its own way" in problem:
        raise OracleRefused(
            f"The site {site} cannot be judged: {problem} Judge the sites before and after it."
        )


def _linear(module: Module, site: str, x: Float64, method: str) -> Linear:
    _known(module, site, method)
    bias = numbers(module["bias"].astype(mx.float32)) if "bias" in module and method != "as_linear" else None
    return Linear(x.reshape(-1, x.shape[-1]), weight_of(module), bias, "scales" in module)


def _switch(module: Module, site: str, captured: Captured) -> Switch:
    _known(module, site)
    x = numbers(_get(captured, "in", site))
    experts = numbers(_get(captured, "experts", site)).astype(np.int64)
    width = x.shape[-1]
    rows = experts.reshape(len(experts), -1)
    spread = np.broadcast_to(x.reshape(len(experts), -1, width), (*rows.shape, width))
    count = int(module["weight"].shape[0])
    biases: tuple[Float64 | None, ...] = (None,) * count
    if "bias" in module:
        biases = tuple(numbers(module["bias"][i].astype(mx.float32)) for i in range(count))
    weights = tuple(weight_of(module, i) for i in range(count))
    return Switch(spread.reshape(-1, width), rows.reshape(-1), weights, biases, "scales" in module)


def _class_of(module: Module) -> type:
    """The module's own class, taps aside."""
    return next(cls for cls in type(module).__mro__ if TAPPED not in vars(cls))


def _norm(module: Module, site: str, captured: Captured) -> Norm:
    x = numbers(_get(captured, "in", site))
    cls = _class_of(module)
    name, home = cls.__name__, cls.__module__.rpartition(".")[2]
    eps = float(np.float32(getattr(module, "eps", 0.0)))
    weight = numbers(module["weight"].astype(mx.float32)) if "weight" in module else None
    if name == "LayerNorm" and cls.__module__.startswith("mlx.nn"):
        bias = numbers(module["bias"].astype(mx.float32)) if "bias" in module else None
        return Norm(x, eps, "layer", weight, bias)
    if name == "RMSNorm" and cls.__module__.startswith("mlx.nn"):
        return Norm(x, eps, "rms", weight)
    if name == "RMSNorm" and home in _ONE_MORE and weight is not None:
        dtype = str(module["weight"].dtype).rpartition(".")[2]
        return Norm(x, eps, "rms", 1.0 + weight, weight_unit=UNIT[dtype])
    if name == "Qwen3NextRMSNormGated" and weight is not None:
        gate = numbers(captured["in.2"]) if "in.2" in captured else None
        return Norm(x, eps, "rms", weight, gate=gate)
    raise OracleRefused(
        f"The site {site} is a {name} of {cls.__module__}, whose roundings are not known; known are the RMSNorm and LayerNorm "
        "of mlx, gemma's and qwen3_next's. Judge the sites before and after it."
    )


def _rope(module: Module, site: str, captured: Captured) -> Rope:
    x = numbers(_get(captured, "in", site))
    positions = numbers(_get(captured, "positions", site)).reshape(-1)
    cls = _class_of(module)
    name = cls.__name__
    if name not in _ROPES or not cls.__module__.endswith(("positional_encoding", "rope_utils")):
        raise OracleRefused(
            f"The site {site} is a {name} of {cls.__module__}, whose angles are not known; known are {', '.join(_ROPES)}. Judge "
            "the sites before and after it."
        )
    dims = int(getattr(module, "dims", None) or module.dim)
    traditional = bool(getattr(module, "traditional", False))
    if name == "RoPE":
        base, scale = float(module.base), float(module.scale)
        return Rope(x, positions, dims, traditional, base=base, scale=scale)
    held = numbers(module._freqs.astype(mx.float32))
    multiplier = float(getattr(module, "mscale", getattr(module, "_scale", _NO_SCALE)))
    return Rope(x, positions, dims, traditional, frequencies=held, multiplier=multiplier)


def _attention(parent: Module | None, site: str, captured: Captured) -> AttentionOperation:
    q = numbers(_get(captured, "in", site))
    keys, key_size = _cached(captured, "k", site)
    values, value_size = _cached(captured, "v", site)
    rows, heads, _ = q.shape
    scale = captured.get("scale", getattr(parent, "scale", None))
    if scale is None:
        raise OracleRefused(
            f"The scale of {site} is neither in the capture nor an attribute of its module. Add `scale` to the capture."
        )
    sinks = captured.get("sinks")
    bias = _bias(captured.get("mask"), rows, keys.shape[1])
    if bias.shape[1:] != (rows, keys.shape[1]) or len(bias) not in (1, heads) or heads % len(keys):
        raise OracleRefused(
            f"The capture of {site} has queries {q.shape}, keys {keys.shape} and a mask {bias.shape}; expected (rows, heads, D), "
            "(kv heads, keys, D) with heads a multiple of kv heads, and (rows, keys) or (heads, rows, keys). Capture one "
            "request's rows."
        )
    return AttentionOperation(
        q, keys, values, float(scale), bias, None if sinks is None else numbers(sinks), key_size, value_size
    )


def _cached(captured: Captured, side: str, site: str) -> tuple[Float64, Float64 | None]:
    """Keys or values (kv heads, keys, D), and for codes |scale| code + |bias|."""
    held = _get(captured, side, site)
    if not isinstance(held, tuple | list):
        return numbers(held), None
    packed, scales, biases = (np.asarray(array) for array in held)
    shape = packed.shape[:2]
    each = [array.reshape(-1, array.shape[-1]) for array in (packed, scales, biases)]
    bits, group_size = int(_get(captured, "bits", site)), int(_get(captured, "group_size", site))
    codes = Affine(each[0], each[1].astype(np.float32), each[2].astype(np.float32), bits, group_size)
    return exact_weight(codes).reshape(*shape, -1), magnitude(codes).reshape(*shape, -1)


def _bias(mask: Any, rows: int, keys: int) -> NDArray[np.float64]:
    """What is added to scores, (1 or heads, rows, keys)."""
    if mask is None:
        return np.zeros((1, rows, keys))
    if isinstance(mask, str):
        seen = np.arange(keys) <= np.arange(keys - rows, keys)[:, None]
        return np.where(seen, 0.0, -np.inf)[None]
    array = np.asarray(mask)
    added = np.where(array, 0.0, -np.inf) if array.dtype == np.bool_ else numbers(mask)
    return added[None] if added.ndim == 2 else added
