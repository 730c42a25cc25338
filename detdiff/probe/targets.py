"""What can be probed by its text: a linear operation with weights drawn by the seed, or a function of the user's own.

``linear:K,N,dtype[,bits[,group_size]]`` on a backend, or ``module:function``. Array libraries are imported when they are used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from detdiff.errors import (
    ProbeBackendUnusable,
    ProbeFunctionFailed,
    ProbeFunctionMissing,
    ProbeResultUnusable,
    ProbeTargetInvalid,
    words_of,
)
from detdiff_kernels.rounding import DTYPES

from .operation import Arrays, ExactOutputs, Float64, LinearSizes, NumpyArrays, ProbedOperation, Weights

LIBRARIES = ("numpy", "mlx", "torch")


def arrays_of(name: str) -> Arrays:
    """The library of that name; raises ProbeBackendUnusable."""
    if name == "torch":
        from detdiff.engines.transformers.linear_sites import TorchArrays

        return TorchArrays()
    if name not in LIBRARIES:
        raise ProbeBackendUnusable(
            f"There is no array library named {name!r} here; expected one of {', '.join(LIBRARIES)}. Correct the name."
        )
    if name == "numpy":
        return NumpyArrays()
    from detdiff.engines.mlx.probe_operations import MlxArrays

    return MlxArrays()


@dataclass(frozen=True)
class LinearTarget:
    """A linear operation on one backend: ``native`` (MLX), ``numpy``, ``torch``, a profile or a kernel path.

    ``layout`` is how rows lie on all but numpy and torch: "packed" [1, M, K] or "batch" [M, 1, K].
    """

    shape: LinearSizes
    on: str = "native"
    layout: str = "packed"

    @property
    def name(self) -> str:
        return f"linear:{self.shape}"

    def operation(self, seed: int) -> ProbedOperation:
        """Raises ProbeBackendUnusable for a backend that is not there or cannot run this shape."""
        if self.on in ("numpy", "torch"):
            return self._plain(seed)
        from detdiff.engines.mlx.probe_operations import linear_module, module_operation

        return module_operation(linear_module(self.shape, seed), self.on, self.layout, self.shape.dtype)

    def _plain(self, seed: int) -> ProbedOperation:
        if self.shape.bits is not None:
            raise ProbeBackendUnusable(
                f"{self.on} has no quantised matmul, and {self.name!r} has {self.shape.bits}-bit weights. Leave the bits "
                "out, or probe it on native, a profile or a kernel."
            )
        arrays = arrays_of(self.on)
        drawn = self.shape.dense(seed)
        weight = arrays.make(drawn, self.shape.dtype).T
        rows = Weights(self.shape.n, lambda first, last: drawn[first:last].astype(np.float64))

        def call(x: Any) -> Any:
            return x @ weight

        return ProbedOperation(self.shape.k, self.shape.dtype, arrays, call, weights=rows)


DEFAULT_K = 576
LARGEST_K = 1 << 24


@dataclass(frozen=True)
class Function:
    """A function that takes an array (rows, k) and returns one (rows, ...).

    ``array`` names the library: numpy, mlx or torch. ``k`` is, in this order, what is given here, the function's
    attribute ``k``, or 576. Its attribute ``dtype`` ("float32" unless it says otherwise) is that of the array; its
    attribute ``reference``, where there is one, takes float64 (rows, k) and returns the exact outputs.
    """

    call: Callable[[Any], Any]
    name: str
    k: int | None = None
    array: str = "numpy"

    @property
    def on(self) -> str:
        return self.array

    @property
    def layout(self) -> str:
        return "rows"

    def operation(self, seed: int) -> ProbedOperation:
        """Raises ProbeTargetInvalid where K or dtype are none, ProbeBackendUnusable without the library."""
        k = self.k if self.k is not None else getattr(self.call, "k", DEFAULT_K)
        dtype = getattr(self.call, "dtype", "float32")
        if not (isinstance(k, int) and 1 <= k <= LARGEST_K) or dtype not in DTYPES:
            raise ProbeTargetInvalid(
                f"{self.name} takes rows of k = {k!r} in {dtype!r}; expected a number from 1 to {LARGEST_K:,} and one of "
                f"{', '.join(DTYPES)}. Correct --shape, or the function's attributes k and dtype."
            )
        return ProbedOperation(k, dtype, arrays_of(self.array), self._guarded, reference=self._reference())

    def _guarded(self, x: Any) -> Any:
        try:
            return self.call(x)
        except Exception as error:
            raise ProbeFunctionFailed(
                f"{self.name} raised {type(error).__name__} ({words_of(error)}) when it was given a {self.array} array of "
                f"{x.dtype} and shape {tuple(x.shape)}. It must take any number of rows; correct the function, or say how wide "
                "its rows are (--shape, shapes=) and which arrays it takes (--array, array=)."
            ) from error

    def _reference(self) -> Callable[[Float64], ExactOutputs] | None:
        reference = getattr(self.call, "reference", None)
        if reference is None:
            return None

        def exact(x: Float64) -> ExactOutputs:
            try:
                outputs = np.asarray(reference(x), dtype=np.float64).reshape(len(x), -1)
            except Exception as error:
                raise ProbeFunctionFailed(
                    f"The attribute reference of {self.name} raised {type(error).__name__} ({words_of(error)}) when it was "
                    f"given a float64 numpy array of shape {x.shape}; expected the exact outputs of these rows. Correct it, "
                    "or remove the attribute."
                ) from error
            return ExactOutputs(outputs, None)

        return exact


def check_reference(exact: ExactOutputs, outputs: int, name: str) -> None:
    """Raises ProbeResultUnusable where a reference has another width than what it stands for."""
    if exact.outputs.shape[1] != outputs:
        raise ProbeResultUnusable(
            f"The attribute reference of {name} returned {exact.outputs.shape[1]} values for a row, and the function "
            f"returns {outputs}. Let both return the same outputs."
        )


def find_function(text: str) -> tuple[Callable[[Any], Any], str]:
    """The function that ``module:function`` names, and that text. The working directory is searched first.

    Raises ProbeFunctionMissing.
    """
    module_name, _, path = text.partition(":")
    if not (
        all(map(str.isidentifier, module_name.split("."))) and all(map(str.isidentifier, path.split(".")))
    ):
        raise ProbeTargetInvalid(
            f"The target {text!r} is neither linear:K,N,dtype nor module:function, such as my_ops:matmul with a file "
            "my_ops.py in the working directory. Correct it."
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may do anything when it is imported
        raise ProbeFunctionMissing(
            f"The module {module_name!r} of the target {text!r} cannot be imported: {type(error).__name__}, {words_of(error)}. "
            "Modules are looked for in the working directory and where Python finds its packages; correct the name or the "
            "module."
        ) from error
    try:
        found = attrgetter(path)(module)
    except AttributeError as error:
        known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ProbeFunctionMissing(
            f"The module {module_name!r} has no {path!r}; what can be called in it is {', '.join(known[:12]) or 'nothing'}. "
            "Correct the name."
        ) from error
    if not callable(found):
        raise ProbeFunctionMissing(
            f"{text} is a {type(found).__name__}, which cannot be called; expected a function of one array. Name another one."
        )
    return found, text
