"""The array libraries that an operation may take and return: numpy, mlx, torch. Each is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.errors import ProbeBackendUnusable
from detdiff_kernels.rounding import Float32, narrow

LIBRARIES = ("numpy", "mlx", "torch")

_NAMES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}
DTYPES = {name: word for word, name in _NAMES.items()} | {"BF16": "bfloat16"}


class Arrays(Protocol):
    """One array library."""

    name: str

    def make(self, x: Float32, dtype: str) -> Any:
        """A new array of ``dtype`` from float32 values that have it."""

    def finish(self, y: Any) -> None:
        """Returns when ``y`` is computed."""

    def values(self, y: Any) -> Values | None:
        """Its bits; None for what is no array of numbers."""


class NumpyArrays:
    name = "numpy"

    def make(self, x: Float32, dtype: str) -> Any:
        if dtype == "bfloat16":
            raise ProbeBackendUnusable(
                "NumPy has no bfloat16, and the operation takes it. Probe it on native, torch or a profile, or take "
                "float32 or float16."
            )
        return narrow(x, dtype).copy()

    def finish(self, y: Any) -> None:
        return None

    def values(self, y: Any) -> Values | None:
        name = _NAMES.get(str(y.dtype)) if isinstance(y, np.ndarray | np.generic) else None
        return None if name is None else Values(np.ascontiguousarray(y).reshape(np.shape(y)), name)


class MlxArrays:
    name = "mlx"

    def make(self, x: Float32, dtype: str) -> Any:
        import mlx.core as mx

        made = mx.array(x).astype(getattr(mx, dtype))
        mx.eval(made)
        return made

    def finish(self, y: Any) -> None:
        import mlx.core as mx

        mx.eval(y)

    def values(self, y: Any) -> Values | None:
        import mlx.core as mx

        if not isinstance(y, mx.array):
            return None
        if y.dtype == mx.bfloat16:
            return Values(np.array(y.view(mx.uint16)), "BF16")
        return NumpyArrays().values(np.array(y))


class TorchArrays:
    """Raises ProbeBackendUnusable where torch is not installed."""

    name = "torch"

    def __init__(self) -> None:
        try:
            self._torch: Any = import_module("torch")
        except ImportError as error:
            raise ProbeBackendUnusable(
                f"torch was asked for and cannot be imported here ({' '.join(str(error).split())}). Install it, or probe "
                "on native or numpy."
            ) from error

    def make(self, x: Float32, dtype: str) -> Any:
        return self._torch.from_numpy(x.copy()).to(getattr(self._torch, dtype))

    def finish(self, y: Any) -> None:
        if getattr(y, "is_cuda", False):
            self._torch.cuda.synchronize()
        elif getattr(y, "is_mps", False):
            self._torch.mps.synchronize()

    def values(self, y: Any) -> Values | None:
        if not isinstance(y, self._torch.Tensor):
            return None
        y = y.detach().cpu().contiguous()
        if y.dtype == self._torch.bfloat16:
            bits: NDArray[Any] = y.view(self._torch.int16).numpy().view(np.uint16)
            return Values(bits, "BF16")
        return NumpyArrays().values(y.numpy())


def arrays_of(name: str) -> Arrays:
    """The library of that name; raises ProbeBackendUnusable."""
    if name == "torch":
        return TorchArrays()
    if name not in LIBRARIES:
        raise ProbeBackendUnusable(
            f"There is no array library named {name!r} here; expected one of {', '.join(LIBRARIES)}. Correct the name."
        )
    return NumpyArrays() if name == "numpy" else MlxArrays()
