"""A module's weight as the kernel library takes it, without a copy where MLX holds it in that form already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

from detdiff_kernels import Affine, Dense, Kernel, Staged, Weight, kernel
from detdiff_kernels.attention import Attention

from .taps import TAPPED

StagedWeights = dict[tuple[int, str, str, int], tuple[Module, Staged]]
"""By id of the module, kernel, dtype and expert (-1: none)."""

_KNOWN = (
    "Linear",
    "QuantizedLinear",
    "Embedding",
    "QuantizedEmbedding",
    "SwitchLinear",
    "QuantizedSwitchLinear",
)
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class Operand(NamedTuple):
    """What a call with a module's weight [..., N, K] is like: the dtype it runs in, and how the weight is held.

    ``problem`` is a sentence where a reference kernel cannot stand for the module, else empty.
    """

    dtype: mx.Dtype
    n: int
    format: str
    bits: int | None
    group_size: int | None
    problem: str = ""


def operand(module: Module, x: mx.array, method: str = "__call__") -> Operand:
    """The facts of ``module`` called with ``x``; ``method`` is the one that is called."""
    weight = module["weight"]
    n = int(weight.shape[-2])
    owner = _owner(module, method)
    problem = "" if owner in _KNOWN else f"the module's class {owner} computes in its own way."
    if "scales" not in module:
        if weight.dtype not in _FLOATS:
            held = str(weight.dtype).rpartition(".")[2]
            return Operand(
                x.dtype, n, "dense", None, None, problem or f"the module holds its weight as {held}."
            )
        return Operand(mx.result_type(x, weight), n, "dense", None, None, problem)
    affine = module.mode == "affine"
    dtype = mx.result_type(x, module["scales"]) if affine else x.dtype
    return Operand(dtype, n, module.mode, int(module.bits), int(module.group_size), problem)


def _owner(module: Module, method: str) -> str:
    """The class that defines what is called, taps aside."""
    classes = (cls for cls in type(module).__mro__ if method in vars(cls) and TAPPED not in vars(cls))
    return next((cls.__name__ for cls in classes), type(module).__name__)


def plain(array: mx.array) -> NDArray[Any]:
    """The values of an array, copied only where they do not lie in rows; bfloat16 as the uint16 of its bits."""
    whole = mx.contiguous(array)
    return np.asarray(whole.view(mx.uint16) if array.dtype == mx.bfloat16 else whole)


def floats(array: mx.array) -> NDArray[np.float32]:
    """The values of an array as float32; those of a float32 array are not copied."""
    return np.asarray(array if array.dtype == mx.float32 else array.astype(mx.float32))


def weight_of(module: Module, expert: int | None = None) -> Weight:
    """The weight [N, K] of a linear, quantised linear or embedding module, or of one expert of a switch module.

    Modes other than affine are unpacked to float32. Raises UnsupportedFormat for bits that no kernel knows.
    """

    def part(name: str) -> mx.array:
        array: mx.array = module[name]
        return array if expert is None else array[expert]

    if "scales" not in module:
        weight = module["weight"]
        data = plain(weight)
        return Dense(data if expert is None else data[expert], name_of(weight.dtype))
    if module.mode == "affine":
        packed = plain(module["weight"])
        scales, biases = (floats(mx.contiguous(part(name))) for name in ("scales", "biases"))
        return Affine(
            packed if expert is None else packed[expert], scales, biases, module.bits, module.group_size
        )
    whole = module.get("global_scale")
    values = mx.dequantize(
        part("weight"),
        part("scales"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=None if whole is None else part("global_scale"),
        dtype=mx.float32,
    )
    return Dense(plain(values), "float32")


def name_of(dtype: mx.Dtype) -> str:
    """A dtype's name without its module, such as float32."""
    return str(dtype).rpartition(".")[2]


@dataclass(frozen=True)
class Prepared:
    """A linear reference kernel with the weight of one module, or of one of its experts, staged for it."""

    kernel: Kernel
    staged: Staged

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """``x`` [rows, K] times the weight: [rows, N]."""
        return self.kernel(x, self.staged)


class Kernels:
    """Reference kernels by name, and the weights that are staged for them."""

    def __init__(self, staged: StagedWeights | None = None) -> None:
        """``staged`` keeps what kernels make of weights from one session of a model to the next."""
        self._staged: StagedWeights = {} if staged is None else staged

    def attention(self, name: str) -> Attention:
        """The attention kernel of that name."""
        found = kernel(name)
        assert isinstance(found, Attention)
        return found

    def linear(
        self, name: str, module: Module, dtype: str, *, rows: int, expert: int | None = None
    ) -> Prepared:
        """The linear kernel of that name with the module's weight, for ``rows`` rows of activations of ``dtype``.

        Raises UnsupportedFormat and BadOperand for a weight that it does not take.
        """
        found = kernel(name)
        assert isinstance(found, Kernel)
        key = (id(module), name, dtype, -1 if expert is None else expert)
        entry = self._staged.get(key)
        if entry is None:
            # The module is kept beside its staged weight so that its id cannot be given to another one.
            entry = self._staged[key] = (module, found.stage(weight_of(module, expert), dtype))
        found.order_for(entry[1].weight, dtype, rows)
        return Prepared(found, entry[1])
