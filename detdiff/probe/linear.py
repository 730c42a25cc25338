"""``linear:K,N,dtype[,bits[,group_size]]``: a linear operation with weights drawn by the seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import ProbeBackendUnusable, ProbeTargetInvalid
from detdiff_kernels.rounding import DTYPES, Float32, rounded
from detdiff_kernels.weights import AFFINE_BITS, Affine

from .arrays import arrays_of
from .operation import Float64, Operation, Weights

FORM = "linear:K,N,dtype or linear:K,N,dtype,bits,group_size, such as linear:576,576,float32"
GROUP_SIZES = (32, 64, 128)
LARGEST = 1 << 31  # items of a weight


def exact_affine(weight: Affine) -> Float64:
    """scale * code + bias in float64, (n, k); nothing is rounded to float32."""
    codes = weight.codes().astype(np.float64).reshape(weight.n, -1, weight.group_size)
    wide = codes * weight.scales.astype(np.float64)[:, :, None] + weight.biases.astype(np.float64)[:, :, None]
    return wide.reshape(weight.n, weight.k)


@dataclass(frozen=True)
class Shape:
    """A linear operation's sizes; ``bits`` and ``group_size`` are None for a dense weight."""

    k: int
    n: int
    dtype: str
    bits: int | None = None
    group_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Shape:
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


@dataclass(frozen=True)
class Linear:
    """A linear operation on one backend: ``native`` (MLX), ``numpy``, ``torch``, a profile or a kernel path.

    ``layout`` is how rows lie on all but numpy and torch: "packed" [1, M, K] or "batch" [M, 1, K].
    """

    shape: Shape
    on: str = "native"
    layout: str = "packed"

    @property
    def name(self) -> str:
        return f"linear:{self.shape}"

    def operation(self, seed: int) -> Operation:
        """Raises ProbeBackendUnusable for a backend that is not there or cannot run this shape."""
        if self.on in ("numpy", "torch"):
            return self._plain(seed)
        from .module import linear_module, module_operation

        return module_operation(linear_module(self.shape, seed), self.on, self.layout, self.shape.dtype)

    def _plain(self, seed: int) -> Operation:
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

        return Operation(self.shape.k, self.shape.dtype, arrays, call, weights=rows)
