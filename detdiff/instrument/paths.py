"""The kernel plan at work: which path a linear site takes in a forward, and running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff.errors import KernelPlanError
from detdiff.scenario import KernelPlan, PathRule
from detdiff_kernels import Call, Kernel, Profile, Staged, forced, kernel, kernel_names, profile

NATIVE = "native"

StagedWeights = dict[tuple[int, str], tuple[Module, Staged]]  # by (id of the module, kernel)


@dataclass(frozen=True)
class Path:
    """A kernel path by its full name (native, forced/…, reference/…), and the rule that chose it."""

    name: str
    rule: str


class PathRunner:
    """Chooses and runs the kernel path of every linear call under one plan.

    Raises KernelPlanError for a path or profile that does not exist.
    """

    def __init__(self, plan: KernelPlan, staged: StagedWeights | None = None) -> None:
        """``staged`` keeps what kernels make of weights from one runner of a model to the next."""
        self._plan = plan
        self._profile: Profile | None = _profile(plan.profile) if plan.profile else None
        self._staged: StagedWeights = {} if staged is None else staged
        self._kernels: dict[str, Kernel] = {}
        for rule in plan.rules:
            self._check(rule)

    @property
    def native(self) -> bool:
        """True when every call runs as the backend would run it."""
        return self._profile is None and not self._plan.rules and self._plan.split_rows is None

    def _check(self, rule: PathRule) -> None:
        path = rule.path
        if path in (NATIVE, "rows") or path.startswith("pad:"):
            return
        if path not in kernel_names():
            raise KernelPlanError(
                f"A rule for {rule.site!r} names the kernel path {path!r}; expected native, rows, pad:N or one of "
                f"{', '.join(kernel_names())}. Correct the path."
            )

    def choose(self, site: str, phase: str, call: Call) -> Path:
        """The path of one call at ``site`` in a forward of this ``phase`` (prefill, decode or mixed)."""
        for rule in self._plan.rules:
            if (
                fnmatchcase(site, rule.site)
                and rule.phase in ("any", phase)
                and rule.holds(call.rows, call.second_last)
            ):
                text = f"rule: site {rule.site}, phase {rule.phase}, rows {rule.rows} -> {rule.path}"
                return Path(_full_name(rule.path), text)
        split = self._plan.split_rows
        if self._profile is not None:
            choice = self._profile.choose(call, split_rows=split)
            return Path(_full_name(choice.kernel), choice.rule)
        if split is not None and 1 < call.rows <= split:
            return Path("forced/rows", f"split_rows {split}: {call.rows} rows <= {split} -> row by row")
        return Path(NATIVE, "")

    def run(self, path: Path, native: Callable[..., Any], module: Module, x: mx.array) -> mx.array:
        """The output of ``module`` for ``x`` [..., K], computed on ``path``."""
        family, _, rest = path.name.partition("/")
        y: mx.array
        if family == NATIVE:
            y = native(x)
            return y
        if family == "forced":
            if rest == "rows":
                y = forced.rows(native, x, mx)
            else:
                y = forced.padded(native, x, int(rest.removeprefix("pad:")), mx)
            return y
        return self._reference(rest, module, x)

    def _reference(self, name: str, module: Module, x: mx.array) -> mx.array:
        staged = self._stage(name, module)
        flat = np.asarray(mx.contiguous(x.astype(mx.float32))).reshape(-1, x.shape[-1])
        y = mx.array(self._kernel(name)(flat, staged)).reshape(*x.shape[:-1], -1).astype(x.dtype)
        return y + module["bias"] if "bias" in module else y

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = kernel(name)
        return self._kernels[name]

    def _stage(self, name: str, module: Module) -> Staged:
        found = self._staged.get((id(module), name))
        if found is None:
            # The module is kept beside its staged weight so that its id cannot be given to another one.
            staged = self._kernel(name).stage(dense_weight(module))
            found = self._staged[id(module), name] = (module, staged)
        return found[1]


def _profile(name: str) -> Profile:
    try:
        return profile(name)
    except ValueError as error:
        raise KernelPlanError(f"{error}") from error


def _full_name(path: str) -> str:
    if path == NATIVE:
        return path
    if path == "rows" or path.startswith("pad:"):
        return f"forced/{path}"
    return f"reference/{path}"


def dense_weight(module: Module) -> NDArray[np.float32]:
    """The weight of a linear, quantised linear or embedding module as float32 [N, K]."""
    weight = module["weight"]
    if "scales" in module:
        biases = module.get("biases")
        weight = mx.dequantize(
            weight,
            module["scales"].astype(mx.float32) if module.mode == "affine" else module["scales"],
            biases.astype(mx.float32) if biases is not None else None,
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
    return np.asarray(mx.contiguous(weight.astype(mx.float32)))


def call_of(x: mx.array, module: Module, op: Literal["linear", "head"], outputs: int) -> Call:
    """The dispatch facts of a linear call: rows M, second-to-last dimension, K, N, dtype, bits."""
    width = x.shape[-1]
    second_last = x.shape[-2] if x.ndim > 1 else 1
    dtype = str(x.dtype).rpartition(".")[2]
    bits = int(module.bits) if "scales" in module else None
    return Call(op, x.size // width, second_last, width, outputs, dtype, bits)
