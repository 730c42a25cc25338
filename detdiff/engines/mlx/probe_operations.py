"""Linear modules of MLX, and a model's linear sites, as operations to probe: native, on forced paths, on a profile, on a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache

from detdiff.compare.metrics import Values
from detdiff.engines.mlx.taps.forward import memory
from detdiff.engines.mlx.taps.kernel_plan import NATIVE, CallSite
from detdiff.engines.mlx.taps.operations import Operations
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.mlx.taps.sites import walk
from detdiff.engines.mlx.taps.tapping import Untouched, tapped
from detdiff.errors import KernelPlanError, ProbeBackendUnusable, ProbeSiteUnknown, ScenarioRangeError
from detdiff.probe.operation import (
    ONE_AFTER_THE_OTHER,
    Float64,
    InputLayout,
    LinearSizes,
    NumpyArrays,
    ProbedOperation,
    Route,
    Weights,
)
from detdiff.scenario import KernelPlan, PathRule
from detdiff.trace import Site
from detdiff_kernels import kernel_names, profile_names
from detdiff_kernels.rounding import Float32
from detdiff_kernels.weights import Affine

from .model import LoadedModel

Op = Literal["linear", "head"]
PLACE = "probe"


class MlxArrays:
    """Arrays of mlx."""

    name = "mlx"

    def make(self, x: Float32, dtype: str) -> Any:
        made = mx.array(x).astype(getattr(mx, dtype))
        mx.eval(made)
        return made

    def laid(self, x: Any, lies: InputLayout) -> Any:
        if lies.transposed:
            turned = mx.contiguous(x.swapaxes(-1, -2))
            mx.eval(turned)
            return turned.swapaxes(-1, -2)
        width = x.shape[-1]
        wide = mx.concatenate([x, mx.zeros((*x.shape[:-1], (lies.pitch or width) - width), x.dtype)], axis=-1)
        mx.eval(wide)
        return wide[..., :width]

    def finish(self, y: Any) -> None:
        mx.eval(y)

    def values(self, y: Any) -> Values | None:
        if not isinstance(y, mx.array):
            return None
        if y.dtype == mx.bfloat16:
            return Values(np.array(y.view(mx.uint16)), "BF16")
        return NumpyArrays().values(np.array(y))


def exact_affine(weight: Affine) -> Float64:
    """scale * code + bias in float64, (n, k); nothing is rounded to float32."""
    codes = weight.codes().astype(np.float64).reshape(weight.n, -1, weight.group_size)
    wide = codes * weight.scales.astype(np.float64)[:, :, None] + weight.biases.astype(np.float64)[:, :, None]
    return wide.reshape(weight.n, weight.k)


def linear_module(shape: LinearSizes, seed: int) -> Module:
    """A Linear or QuantizedLinear without bias, its weights drawn by the seed."""
    dtype = getattr(mx, shape.dtype)
    if shape.bits is None:
        dense = Linear(1, 1, bias=False)
        dense.weight = mx.array(shape.dense(seed)).astype(dtype)
        mx.eval(dense.parameters())
        return dense
    drawn = shape.affine(seed)
    module = QuantizedLinear(drawn.group_size, 1, bias=False, group_size=drawn.group_size, bits=drawn.bits)
    module.weight = mx.array(drawn.packed)
    module.scales, module.biases = mx.array(drawn.scales).astype(dtype), mx.array(drawn.biases).astype(dtype)
    mx.eval(module.parameters())
    return module


def operations_on(on: str, op: Op) -> Operations:
    """What runs linear calls on one backend: native, rows, pad:N, a reference kernel or a dispatch profile.

    Raises ProbeBackendUnusable for another one, and for a kernel that is not for linear calls.
    """
    try:
        plan = KernelPlan(rules=(PathRule(path=on),)) if _is_path(on) else KernelPlan(profile=on)
        found = Operations(plan)
        found.chooser.check_sites([Site(PLACE, op, None, ("in",), ("out",))])
        return found
    except (KernelPlanError, ScenarioRangeError) as error:
        raise ProbeBackendUnusable(
            f"{error} A probe runs on native, numpy, torch, rows, pad:N, one of the profiles {', '.join(profile_names())}, "
            "or a reference kernel for linear operations."
        ) from error


def _is_path(on: str) -> bool:
    """A kernel path by its own name; else ``on`` is a profile or native."""
    return on == "rows" or on.startswith("pad:") or on in kernel_names()


def width_of(module: Module) -> int:
    """The inputs K of a linear, quantised linear or embedding module."""
    columns = int(module["weight"].shape[-1])
    return columns * 32 // int(module.bits) if "scales" in module else columns


def weights_of(module: Module) -> Weights:
    """The weights of a linear module in float64, as they are stored: nothing is rounded to float32."""

    def rows(first: int, last: int) -> Float64:
        weight = module["weight"][first:last]
        if "scales" not in module:
            return _wide(weight)
        scales, biases = module["scales"][first:last], module.get("biases")
        if module.mode == "affine" and biases is not None:
            held = Affine(
                np.array(weight),
                _floats(scales),
                _floats(biases[first:last]),
                int(module.bits),
                int(module.group_size),
            )
            return exact_affine(held)
        # Other modes have scales that are powers of two, or codes of a few bits: float32 holds the products.
        return _wide(
            mx.dequantize(weight, scales, group_size=module.group_size, bits=module.bits, mode=module.mode)
        )

    bias = _wide(module["bias"]) if "bias" in module else None
    return Weights(int(module["weight"].shape[0]), rows, bias)


def _floats(array: mx.array) -> Float32:
    return np.array(array.astype(mx.float32))


def _wide(array: mx.array) -> Float64:
    return _floats(array).astype(np.float64)


def module_operation(
    module: Module,
    on: str,
    layout: str,
    dtype: str,
    *,
    op: Op = "linear",
    method: str = "__call__",
    lies: InputLayout = ONE_AFTER_THE_OTHER,
) -> ProbedOperation:
    """A linear module as an operation; ``method`` is what is called of it, and rows lie in memory as ``lies`` says."""
    operations = operations_on(on, op)
    place = CallSite(PLACE, op, "decode")
    native: Callable[[mx.array], mx.array] = getattr(module, method)
    k = width_of(module)

    def call(x: mx.array) -> mx.array:
        if operations.native:
            return native(x)
        return operations.linear.run(place, native, module, x, method)[0]

    def routes(rows: int) -> tuple[Route, ...]:
        if operations.native:
            return (Route(0, rows, NATIVE),)
        x = mx.zeros((rows, 1, k) if layout == "batch" else (1, rows, k), getattr(mx, dtype))
        taken = operations.linear.paths(place, module, x, method)
        spans = [(one.at or range(rows), one) for one in taken]
        # Where a path was asked for by its name, the rule that chose it says nothing.
        return tuple(
            Route(at.start, at.stop, one.path, "" if _is_path(on) else one.rule) for at, one in spans
        )

    try:
        routes(1)
    except KernelPlanError as error:
        # What the kernel itself said; around it, a plan speaks of a scenario's rule, and nobody wrote one.
        raise ProbeBackendUnusable(f"{on} cannot run this operation: {error.__context__ or error}") from error
    return ProbedOperation(
        k, dtype, MlxArrays(), call, layout, weights=weights_of(module), routes=routes, lies=lies
    )


AS_LINEAR = ".as_linear"


@dataclass(frozen=True, eq=False)
class ModelSite:
    """A linear, head or norm site of a model, with the model's own weights; only the rows are drawn by the seed.

    ``called`` is how its rows lie in memory, and their dtype, in the model's own call.
    """

    model: str
    site: str
    kind: str
    module: Module
    on: str = "native"
    layout: str = "packed"
    called: tuple[InputLayout, str | None] = (ONE_AFTER_THE_OTHER, None)

    @property
    def name(self) -> str:
        return f"{self.model} {self.site}"

    @property
    def shape(self) -> LinearSizes:
        """K, N, activation dtype and width of a linear site."""
        quantised = "scales" in self.module
        bits, group = (int(self.module.bits), int(self.module.group_size)) if quantised else (None, None)
        return LinearSizes(
            width_of(self.module), int(self.module["weight"].shape[0]), self.dtype, bits, group
        )

    @property
    def dtype(self) -> str:
        """Of the activations: that of the model's own call, else of a dense weight, or of the scales."""
        if self.called[1] is not None:
            return self.called[1]
        kept = self.module["scales"] if "scales" in self.module else self.module["weight"]
        name = str(kept.dtype).rpartition(".")[2]
        return name if name in ("float32", "float16", "bfloat16") else "bfloat16"

    def operation(self, seed: int) -> ProbedOperation:
        """Raises ProbeBackendUnusable for a backend that cannot run it, and ProbeSiteUnknown for a norm on one."""
        if self.kind == "norm":
            return self._norm()
        op: Op = "head" if self.kind == "head" else "linear"
        method = "as_linear" if self.site.endswith(AS_LINEAR) else "__call__"
        return module_operation(
            self.module, self.on, self.layout, self.dtype, op=op, method=method, lies=self.called[0]
        )

    def _norm(self) -> ProbedOperation:
        if self.on != "native":
            raise ProbeSiteUnknown(
                f"The site {self.site!r} is a norm, which profiles and reference kernels leave native. Leave --on out."
            )
        return ProbedOperation(
            int(self.module["weight"].shape[0]), self.dtype, MlxArrays(), self.module, self.layout
        )


@dataclass(frozen=True, eq=False)
class ShapeSites:
    """A linear shape and the sites that have it; ``first`` stands for all of them."""

    shape: LinearSizes
    op: Op
    first: ModelSite
    sites: tuple[str, ...]


def sites_of(loaded: LoadedModel, on: str = "native", layout: str = "packed") -> Iterator[ModelSite]:
    """Every linear, head and norm site with a weight, in execution order."""
    modules = {name: module for name, module, _ in walk(loaded.model)}
    found = Session(loaded.model).sites
    name = str(loaded.identity.get("name", "model"))
    called = _inputs(loaded.model)
    for key, place in found.index.items():
        site = found.sites[place]
        module = modules.get(key.partition("#")[0].removesuffix(AS_LINEAR))
        if site.kind in ("linear", "head", "norm") and module is not None and "weight" in module:
            own = called.get(key.partition("#")[0], (ONE_AFTER_THE_OTHER, None))
            yield ModelSite(name, site.name, site.kind, module, on, layout, own)


class _Inputs(Untouched):
    """Taps that only see how the inputs of modules lie in memory."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[InputLayout, str | None]] = {}

    def leaf(
        self, name: str, kind: str, native: Callable[..., Any], module: Module, args: Any, kw: Any
    ) -> Any:
        if kind in ("linear", "as_linear") and isinstance(args[0], mx.array):
            where = memory(args[0])
            strides = [stride // where.itemsize for stride in where.strides]
            dtype = str(args[0].dtype).rpartition(".")[2]
            known = dtype if dtype in ("float32", "float16", "bfloat16") else None
            self.found.setdefault(name, (InputLayout.of(where.shape, strides), known))
        return native(*args, **kw)


def _inputs(model: Module) -> dict[str, tuple[InputLayout, str | None]]:
    """How the inputs of linear modules lie in memory, and their dtype, in a forward of a few tokens; by name."""
    seen = _Inputs()
    with tapped(model, seen):
        model(mx.zeros((1, 5), mx.int32), cache=make_prompt_cache(model))
    return seen.found


def find_site(loaded: LoadedModel, site: str, on: str = "native", layout: str = "packed") -> ModelSite:
    """The site of that name; raises ProbeSiteUnknown."""
    found = {one.site: one for one in sites_of(loaded, on, layout)}
    if site in found:
        return found[site]
    near = get_close_matches(site, found, n=3, cutoff=0.4) or list(found)[:3]
    raise ProbeSiteUnknown(
        f"The model {loaded.identity.get('name', 'model')!r} has no site {site!r} that works on rows alone (linear, head or "
        f"norm); the nearest of {len(found)} are {', '.join(near)}. `detdiff show TRACE --sites` lists a model's sites."
    )


def shapes_of(loaded: LoadedModel, on: str = "native", layout: str = "packed") -> list[ShapeSites]:
    """The distinct shapes (K, N, dtype, bits, group size, head or not, layout in memory) in the order of their first sites.

    Raises ProbeSiteUnknown for a model without a linear site.
    """
    groups: dict[tuple[LinearSizes, str, InputLayout], list[ModelSite]] = {}
    for site in sites_of(loaded, on, layout):
        if site.kind != "norm":
            groups.setdefault((site.shape, site.kind, site.called[0]), []).append(site)
    if not groups:
        raise ProbeSiteUnknown(
            f"The model {loaded.identity.get('name', 'model')!r} has no linear site. Probe a function of your own instead."
        )
    return [
        ShapeSites(shape, "head" if kind == "head" else "linear", sites[0], tuple(one.site for one in sites))
        for (shape, kind, _), sites in groups.items()
    ]
