"""Linear modules of MLX as operations: native, on forced native paths, on a profile, on a reference kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from detdiff.engines.mlx.taps.kernel_plan import NATIVE, Place
from detdiff.engines.mlx.taps.operations import Operations
from detdiff.errors import KernelPlanError, ProbeBackendUnusable, ScenarioRangeError
from detdiff.scenario import KernelPlan, PathRule
from detdiff.trace import Site
from detdiff_kernels import kernel_names, profile_names
from detdiff_kernels.rounding import Float32
from detdiff_kernels.weights import Affine

from .arrays import MlxArrays
from .linear import Shape, exact_affine
from .operation import Float64, Operation, Route, Weights

Op = Literal["linear", "head"]
PLACE = "probe"


def linear_module(shape: Shape, seed: int) -> Module:
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
    module: Module, on: str, layout: str, dtype: str, *, op: Op = "linear", method: str = "__call__"
) -> Operation:
    """A linear module as an operation; ``method`` is what is called of it."""
    operations = operations_on(on, op)
    place = Place(PLACE, op, "decode")
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
    return Operation(k, dtype, MlxArrays(), call, layout, weights=weights_of(module), routes=routes)
