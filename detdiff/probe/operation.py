"""One operation that takes rows, ready to be called with any number of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.errors import ProbeResultUnusable
from detdiff_kernels.rounding import Float32

from .arrays import Arrays

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
class Exact:
    """An operation's outputs (rows, n) in float64, and sum |x||w| where it is linear."""

    outputs: Float64
    magnitude: Float64 | None


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights (n, k) of a linear operation in float64, ``rows(first, last)`` of them at a time."""

    n: int
    rows: Callable[[int, int], Float64]
    bias: Float64 | None = None

    def exact(self, x: Float64) -> Exact:
        """``x`` (rows, k) times the weights, plus the bias. Takes a block of weights at a time: a head is large."""
        outputs, magnitude = np.empty((len(x), self.n)), np.empty((len(x), self.n))
        for at in range(0, self.n, BLOCK):
            block = self.rows(at, min(at + BLOCK, self.n))
            outputs[:, at : at + BLOCK] = x @ block.T
            magnitude[:, at : at + BLOCK] = np.abs(x) @ np.abs(block).T
        if self.bias is None:
            return Exact(outputs, magnitude)
        return Exact(outputs + self.bias, magnitude + np.abs(self.bias))

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


@dataclass(frozen=True, eq=False)
class Operation:
    """``call`` takes an array of ``dtype`` and returns one whose leading sizes are the rows.

    ``layout`` says how M rows of ``k`` lie: "rows" (M, k), "packed" (1, M, k) or "batch" (M, 1, k). ``weights`` are
    those of a linear operation; ``reference`` takes float64 (rows, k) where there are none; ``routes`` takes the
    number of rows.
    """

    k: int
    dtype: str
    arrays: Arrays
    call: Callable[[Any], Any]
    layout: str = "rows"
    weights: Weights | None = None
    reference: Callable[[Float64], Exact] | None = None
    routes: Callable[[int], tuple[Route, ...]] | None = None

    def exact(self, x: Float64) -> Exact | None:
        """The outputs for ``x`` (rows, k), or None where they are not known."""
        if self.weights is not None:
            return self.weights.exact(x)
        return None if self.reference is None else self.reference(x)

    def given(self, x: Float32) -> Any:
        """Rows (M, k), values of ``dtype``, as the operation takes them; a new array each time."""
        shape = {"packed": (1, *x.shape), "batch": (len(x), 1, x.shape[1])}.get(self.layout, x.shape)
        return self.arrays.make(np.ascontiguousarray(x).reshape(shape), self.dtype)

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
class Target(Protocol):
    """What is probed: makes the operation of each seed."""

    @property
    def name(self) -> str: ...

    @property
    def on(self) -> str: ...

    def operation(self, seed: int) -> Operation:
        """Operations of one target have the same sizes; weights may be drawn by the seed."""
