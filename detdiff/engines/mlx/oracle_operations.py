"""The operation of a site for the float64 oracle: what it was given, as captured, with the parameters of its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff.engines.mlx.taps.kernel_plan import CallSite, operand, plain, weight_of
from detdiff.engines.mlx.taps.operations import Operations
from detdiff.engines.mlx.taps.sites import walk
from detdiff.engines.mlx.taps.tapping import TAPPED
from detdiff.errors import OracleRefused
from detdiff.explain.attention_bounds import AttentionOperation
from detdiff.explain.bounds import Copied, Embedding, Linear, Norm, Rope, Switch, exact_weight, magnitude
from detdiff.explain.oracle import Operation
from detdiff.explain.origins import DRAFT, Captured
from detdiff.explain.roundings import UNIT, Float64, numbers
from detdiff.scenario import KernelPlan
from detdiff.trace import Site
from detdiff_kernels import Affine

from .attention_calls import CalledRow, OwnEntries, operation_as_called
from .model import LoadedModel

Given = Mapping[str, Any]

# Modules of mlx-lm whose RMSNorm multiplies by one more than its weight; read in mlx-lm 0.32.2.
_ONE_MORE = ("gemma", "gemma2", "gemma3_text", "recurrent_gemma", "minimax_m3_vl", "muse_glimmer")
_ROPES = ("RoPE", "Llama3RoPE", "YarnRoPE", "SuScaledRoPE", "ProportionalRoPE")
_NO_SCALE = 1.0


def operation_of(model: Any, site: str, captured: Given) -> Operation:
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


def _get(captured: Given, port: str, site: str) -> Any:
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


def _switch(module: Module, site: str, captured: Given) -> Switch:
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


def _norm(module: Module, site: str, captured: Given) -> Norm:
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


def _rope(module: Module, site: str, captured: Given) -> Rope:
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


def _attention(parent: Module | None, site: str, captured: Given) -> AttentionOperation:
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


def _cached(captured: Given, side: str, site: str) -> tuple[Float64, Float64 | None]:
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


class SiteRows:
    """What rows of one site were given and gave in one run; ``positions`` int64 [rows]."""

    def __init__(
        self,
        model: Any,
        captured: Captured,
        site: Site,
        request: str,
        rows: list[int],
    ) -> None:
        self._model, self._captured, self._site, self._request = model, captured, site, request
        self._rows = rows
        index = captured.trace.row_index()
        self.positions = index.position[rows].astype(np.int64)
        self._forward = int(index.forward[rows[0]])

    def operation(self) -> Operation:
        """The operation with its inputs; raises OracleRefused."""
        kind = self._site.kind
        if kind == "attention":
            return self._attention()
        given: dict[str, Any] = {
            port: self._stack(port) for port in self._site.inputs if port not in ("kv", "written")
        }
        if kind in ("cache_write",):
            return self._of({"expected": np.concatenate([given[port] for port in self._site.inputs], axis=1)})
        if kind == "rope":
            width = self._head_width(given["in"].shape[1])
            given["in"] = given["in"].reshape(len(self._rows), -1, width)
            given["positions"] = self.positions
        if kind == "norm":
            size = self._weight_size(given["in"].shape[1])
            given = {port: array.reshape(len(self._rows), -1, size) for port, array in given.items()}
        if kind == "switch":
            experts = given["experts"]
            shape = self._switch_shape(given["in"].shape[1], experts.shape[1])
            given["in"] = given["in"].reshape(len(self._rows), *shape)
        return self._of(given)

    def _of(self, given: dict[str, Any]) -> Operation:
        return operation_of(self._model, self._site.name.removeprefix(DRAFT), given)

    def _stack(self, port: str) -> Float64:
        return np.stack([self._captured.needed(row, self._site, port).numbers() for row in self._rows])

    def _module(self) -> Module | None:
        model = getattr(self._model, "model", self._model)
        module = model if not isinstance(self._model, Module) else self._model
        name = self._site.name.removeprefix(DRAFT)
        leaves = {found: leaf for found, leaf, _ in walk(module)}
        while name and name not in leaves:
            name = name.rpartition(".")[0]
        return leaves.get(name)

    def _around(self) -> Module | None:
        """The module that the site's own is in."""
        model = getattr(self._model, "model", self._model)
        module = model if not isinstance(self._model, Module) else self._model
        inner = self._module()
        return next((each for _, each in module.named_modules() if inner in each.children().values()), None)

    def _head_width(self, whole: int) -> int:
        """The width of a head: that of the rotated part where a module has one, else as the layer's cache has it, or, where it reads
        another layer's, as its module says."""
        around = self._around()
        width = getattr(around, "qk_rope_head_dim", None)
        try:
            if width is None:
                site = self._captured.write_site(self._site.layer, draft=self._site.name.startswith(DRAFT))
                width = self._captured.needed(self._rows[0], site, "K.0").data.size
        except OracleRefused:
            width = getattr(around, "head_dim", None)
            if width is None:
                raise
        if whole % width:
            raise OracleRefused(
                f"{self._site.name} turns {whole} numbers, which are no whole heads of {width}. Judge the sites around it."
            )
        return width

    def _weight_size(self, whole: int) -> int:
        module = self._module()
        size = int(module["weight"].size) if module is not None and "weight" in module else whole
        return size if whole % size == 0 else whole

    def _switch_shape(self, whole: int, chosen: int) -> tuple[int, ...]:
        module = self._module()
        assert module is not None
        width = int(module["weight"].shape[-1])
        if "scales" in module:
            width = width * 32 // int(module.bits)
        return (whole,) if whole == width else (chosen, whole // chosen)

    def _attention(self) -> Operation:
        """Of one row: its query over its own entries among those that the call let it see."""
        if len(self._rows) != 1:
            raise OracleRefused("Attention is judged row by row, as each row sees other entries.")
        position, number = int(self.positions[0]), self._captured.computed_for(self._rows[0])
        watch = self._captured.watch
        called = None if watch is None else watch.rows.get((self._site.name, number, position, self._forward))
        if called is None:
            raise OracleRefused(
                f"The call of {self._site.name} was not kept, as it is larger than what is kept or its rows are not the forward's. "
                "Judge the sites around it."
            )
        return operation_as_called(called, self._own(range(position + 1), called))

    def _own(self, span: range, called: CalledRow) -> OwnEntries | None:
        """The row's own entries up to its position; None where the layer's writes are not recorded, or were taken over."""
        try:
            written = self._captured.write_site(self._site.layer, draft=self._site.name.startswith(DRAFT))
            if len(called.side("keys")) > 1:
                return self._quantised(written, span, called.call.given["cache"])
            keys, values = (
                self._captured.entries(self._request, written, side, span, self._forward).astype(np.float32)
                for side in "KV"
            )
            return OwnEntries([keys], [values])
        except OracleRefused:
            return None

    def _quantised(self, written: Site, span: range, cache: Any) -> OwnEntries:
        """Keys and values as codes: what was written, quantised as mlx-lm does it, entry by entry."""
        heads = sum(port.startswith("K.") for port in written.outputs)
        found = []
        for side in "kv":
            exact = self._captured.written(self._request, written, side, span, self._forward)
            entries = exact.reshape(len(span), heads, -1).swapaxes(0, 1)
            dtype = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[self._dtype(written, side)]
            array = mx.array(entries.astype(np.float32)).astype(dtype)
            packed, *rest = mx.quantize(array, group_size=int(cache.group_size), bits=int(cache.bits))
            found.append([np.array(packed), *(np.array(part.astype(mx.float32)) for part in rest)])
        return OwnEntries(*found)

    def _dtype(self, written: Site, port: str) -> str:
        return self._captured.needed(self._rows[0], written, port).dtype


def called_again(
    loaded: LoadedModel, site: Site, x: NDArray[Any], dtype: str, shape: tuple[int, int], plan: KernelPlan
) -> NDArray[Any]:
    """The output (rows, n) of a linear site for inputs (rows, k) in storage form, as the model calls it under ``plan``.

    Raises OracleRefused for another site.
    """
    leaves = {name: (leaf, kind) for name, leaf, kind in walk(loaded.model)}
    name, leaf, kind = _find(site.name.removeprefix(DRAFT), leaves)
    if leaf is None or kind not in ("linear", "as_linear"):
        raise OracleRefused(f"The site {site.name} cannot be called on its own. Judge the sites around it.")
    method = "as_linear" if kind == "as_linear" else "__call__"
    held = mx.array(np.ascontiguousarray(x))
    given = (held.view(mx.bfloat16) if dtype == "BF16" else held).reshape(*shape, -1)
    native: Callable[[mx.array], mx.array] = getattr(leaf, method)
    operations = Operations(plan, loaded.staged)
    place = CallSite(site.name, site.kind, "decode")
    y = native(given) if operations.native else operations.linear.run(place, native, leaf, given, method)[0]
    return plain(y).reshape(len(x), -1)
