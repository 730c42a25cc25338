"""One operation that takes rows, ready to be called with any number of them; the arrays that it takes, and a linear one's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.errors import ProbeBackendUnusable, ProbeResultUnusable, ProbeTargetInvalid
from detdiff_kernels.rounding import DTYPES, Float32, narrow, rounded
from detdiff_kernels.weights import AFFINE_BITS, Affine

_NAMES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}


class Arrays(Protocol):
    """One array library."""

    name: str

    def make(self, x: Float32, dtype: str) -> Any:
        """A new array of ``dtype`` from float32 values that have it."""

    def laid(self, x: Any, lies: InputLayout) -> Any:
        """The same values of (..., rows, k), in memory as ``lies`` says."""

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

    def laid(self, x: Any, lies: InputLayout) -> Any:
        if lies.transposed:
            return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
        wide = np.zeros((*x.shape[:-1], lies.pitch or x.shape[-1]), x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    def finish(self, y: Any) -> None:
        return None

    def values(self, y: Any) -> Values | None:
        name = _NAMES.get(str(y.dtype)) if isinstance(y, np.ndarray | np.generic) else None
        return None if name is None else Values(np.ascontiguousarray(y).reshape(np.shape(y)), name)


Float64 = NDArray[np.float64]

BLOCK = 4096  # weights that are widened to float64 at a time
CANCELLED = 256


@dataclass(frozen=True)
class Route:
    """The kernel path that rows ``first`` to ``last - 1`` of a call took, by its full name, and the rule."""

    first: int
    last: int
    path: str
    rule: str = ""


@dataclass(frozen=True, eq=False)
class ExactOutputs:
    """An operation's outputs (rows, n) in float64, and sum |x||w| where it is linear."""

    outputs: Float64
    magnitude: Float64 | None


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights (n, k) of a linear operation in float64, ``rows(first, last)`` of them at a time."""

    n: int
    rows: Callable[[int, int], Float64]
    bias: Float64 | None = None

    def exact(self, x: Float64) -> ExactOutputs:
        """``x`` (rows, k) times the weights, plus the bias. Takes a block of weights at a time: a head is large."""
        outputs, magnitude = np.empty((len(x), self.n)), np.empty((len(x), self.n))
        for at in range(0, self.n, BLOCK):
            block = self.rows(at, min(at + BLOCK, self.n))
            outputs[:, at : at + BLOCK] = x @ block.T
            magnitude[:, at : at + BLOCK] = np.abs(x) @ np.abs(block).T
        if self.bias is None:
            return ExactOutputs(outputs, magnitude)
        return ExactOutputs(outputs + self.bias, magnitude + np.abs(self.bias))

    def cancelling(self, x: Float64, start: int) -> Float64:
        """``x`` (k,) without its part along up to ``CANCELLED`` weights, counted from ``start``.

        The products of these outputs cancel, so that a rounding that depends on their order, which a float16 or
        bfloat16 output of ordinary size would hide, reaches the output.
        """
        count = min(self.n, CANCELLED, len(x) // 2)
        first = start % (self.n - count + 1)
        weights = self.rows(first, first + count)
        gram = weights @ weights.T
        # Weights may be linearly dependent, or all zero.
        gram += np.eye(count) * max(np.trace(gram) * 1e-12, np.finfo(np.float64).tiny)
        for _ in range(2):  # the second turn removes what the first one's rounding left
            x = x - weights.T @ np.linalg.solve(gram, weights @ x)
        return x


@dataclass(frozen=True)
class InputLayout:
    """How a model's own call had its rows in memory: ``transposed``, each item's rows side by side instead of each row's items;
    ``pitch`` items from one row to the next, as where rows are a part of wider ones (None: the next row follows)."""

    transposed: bool = False
    pitch: int | None = None

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> InputLayout:
        """From a call's shape (..., rows, k) and its strides in items."""
        if len(shape) < 2 or min(shape[-2:]) < 2:
            return cls()
        if strides[-1] > strides[-2]:
            return cls(transposed=True)
        return cls(pitch=strides[-2] if strides[-1] == 1 and strides[-2] > shape[-1] else None)

    def __str__(self) -> str:
        if self.transposed:
            return "transposed: each item's rows lie side by side"
        return (
            f"parts of wider rows: {self.pitch} items from one to the next"
            if self.pitch
            else "one after the other"
        )


ONE_AFTER_THE_OTHER: Final = InputLayout()


@dataclass(frozen=True, eq=False)
class ProbedOperation:
    """``call`` takes an array of ``dtype`` and returns one whose leading sizes are the rows.

    ``layout`` says how M rows of ``k`` lie: "rows" (M, k), "packed" (1, M, k) or "batch" (M, 1, k). ``weights`` are
    those of a linear operation; ``reference`` takes float64 (rows, k) where there are none; ``routes`` takes the
    number of rows; ``lies`` is how rows lie in memory, where the model's own call was seen.
    """

    k: int
    dtype: str
    arrays: Arrays
    call: Callable[[Any], Any]
    layout: str = "rows"
    weights: Weights | None = None
    reference: Callable[[Float64], ExactOutputs] | None = None
    routes: Callable[[int], tuple[Route, ...]] | None = None
    lies: InputLayout = ONE_AFTER_THE_OTHER

    def exact(self, x: Float64) -> ExactOutputs | None:
        """The outputs for ``x`` (rows, k), or None where they are not known."""
        if self.weights is not None:
            return self.weights.exact(x)
        return None if self.reference is None else self.reference(x)

    def given(self, x: Float32) -> Any:
        """Rows (M, k), values of ``dtype``, as the operation takes them; a new array each time."""
        shape = {"packed": (1, *x.shape), "batch": (len(x), 1, x.shape[1])}.get(self.layout, x.shape)
        made = self.arrays.make(np.ascontiguousarray(x).reshape(shape), self.dtype)
        return made if self.lies == ONE_AFTER_THE_OTHER else self.arrays.laid(made, self.lies)

    def run(self, given: Any) -> Any:
        """The result, computed."""
        result = self.call(given)
        self.arrays.finish(result)
        return result

    def read(self, result: Any, rows: int) -> Values:
        """The result's bits, (rows, n). Raises ProbeResultUnusable for what has no row for each that was given."""
        values = self.arrays.values(result)
        if values is None:
            raise ProbeResultUnusable(
                f"Given {rows} rows of {self.k}, the operation returned a {type(result).__name__}"
                f"{_dtype(result)}; expected one {self.arrays.name} array of numbers with a first size of {rows}. Return "
                "the array, or name its library with --array."
            )
        shape = values.data.shape
        lead = {"packed": (1, rows), "batch": (rows, 1)}.get(self.layout, (rows,))
        if shape[: len(lead)] != lead or not values.data.size:
            raise ProbeResultUnusable(
                f"Given {rows} rows of {self.k}, the operation returned an array of shape {shape}; expected one row for "
                f"each that was given, ({', '.join(map(str, lead))}, ...), and at least one value in it. An operation "
                "that changes the number of rows cannot be probed row by row."
            )
        return Values(values.data.reshape(rows, -1), values.dtype)


def _dtype(result: Any) -> str:
    found = getattr(result, "dtype", None)
    return "" if found is None else f" of {found}"


@runtime_checkable
class ProbeTarget(Protocol):
    """What is probed: makes the operation of each seed."""

    @property
    def name(self) -> str: ...

    @property
    def on(self) -> str: ...

    def operation(self, seed: int) -> ProbedOperation:
        """Operations of one target have the same sizes; weights may be drawn by the seed."""


FORM = "linear:K,N,dtype or linear:K,N,dtype,bits,group_size, such as linear:576,576,float32"
GROUP_SIZES = (32, 64, 128)
LARGEST = 1 << 31  # items of a weight


@dataclass(frozen=True)
class LinearSizes:
    """A linear operation's sizes; ``bits`` and ``group_size`` are None for a dense weight."""

    k: int
    n: int
    dtype: str
    bits: int | None = None
    group_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> LinearSizes:
        """From ``K,N,dtype[,bits[,group_size]]``; raises ProbeTargetInvalid."""
        parts = [part.strip() for part in text.split(",")]
        numbers = [*parts[:2], *parts[3:]]
        if not 3 <= len(parts) <= 5 or not all(p.isascii() and p.isdigit() and len(p) < 10 for p in numbers):
            raise ProbeTargetInvalid(f"The target is 'linear:{text}'; expected {FORM}. Write it so.")
        k, n, *rest = map(int, numbers)
        bits = rest[0] if rest else None
        found = cls(k, n, parts[2], bits, None if bits is None else rest[1] if len(rest) > 1 else 64)
        found._check()
        return found

    def _check(self) -> None:
        problem = None
        if self.dtype not in DTYPES:
            problem = f"the dtype {self.dtype!r}; expected {', '.join(DTYPES)}"
        elif not (self.k and self.n and self.k * self.n <= LARGEST):
            problem = (
                f"sizes of {self.k} and {self.n}; both are at least 1, and a weight has at most 2^31 items"
            )
        elif self.bits is not None and self.bits not in AFFINE_BITS:
            problem = f"{self.bits} bits; expected one of {', '.join(map(str, AFFINE_BITS))}"
        elif self.group_size is not None and self.group_size not in GROUP_SIZES:
            problem = f"groups of {self.group_size}; expected one of {', '.join(map(str, GROUP_SIZES))}"
        elif self.group_size is not None and self.k % self.group_size:
            problem = f"K = {self.k}, which groups of {self.group_size} do not divide"
        if problem is not None:
            raise ProbeTargetInvalid(
                f"The target 'linear:{self}' has {problem}. Correct it; the form is {FORM}."
            )

    def __str__(self) -> str:
        parts = [self.k, self.n, self.dtype, self.bits, self.group_size]
        return ",".join(str(part) for part in parts if part is not None)

    def dense(self, seed: int) -> Float32:
        """A weight (n, k) of normals with variance 1/k, float32 that holds values of the dtype."""
        random = np.random.default_rng([seed, 0])
        weight = random.standard_normal((self.n, self.k), dtype=np.float32)
        weight *= np.float32(1 / np.sqrt(self.k))
        return rounded(weight, self.dtype)

    def affine(self, seed: int) -> Affine:
        """Random codes. Groups of 32 have the bias -scale * 2^(bits - 1), as GGUF's Q4_0 and Q8_0 blocks do."""
        assert self.bits is not None and self.group_size is not None
        random = np.random.default_rng([seed, 0])
        words = (self.n, self.k * self.bits // 32)
        packed: NDArray[np.uint32] = random.integers(0, 1 << 32, words, dtype=np.uint32)
        middle = np.float32(1 << (self.bits - 1))
        groups = (self.n, self.k // self.group_size)
        spread = 1 + random.random(groups, dtype=np.float32)
        scales = rounded((spread / (middle * np.float32(np.sqrt(self.k)))).astype(np.float32), self.dtype)
        biases = -middle * scales
        if self.group_size != 32:
            biases = biases * (np.float32(0.75) + random.random(groups, dtype=np.float32) / 2)
        return Affine(
            packed, scales, rounded(biases.astype(np.float32), self.dtype), self.bits, self.group_size
        )
