"""MLX's CUDA matmul kernels against scalar statements of what their sources compute, bit for bit.

Read from https://github.com/ml-explore/mlx, mlx/backend/cuda: quantized/qmm/qmv.cu (dequant_fma, qmv_kernel_impl) and
gemms/gemv.cu (gemv_impl). Taken for granted: ``cg::reduce`` adds by halving, and what cuBLAS and tensor cores do is
a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest
from harness import (
    DTYPES,
    ROUND,
    Case,
    add,
    affine_cases,
    dense,
    dense_cases,
    fma,
    fma_in,
    normals,
    random_affine,
    tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from statements import DenseStatement, Packed, Shape, Statement, agree, chain, in_order, told_apart
from tiers import examples

from detdiff_kernels import kernel, kernel_names

PREFIX = "mlx-cuda/"


def dequantised(w: Packed, count: int, dtype: str) -> list[float]:
    """The code times the scale, plus the bias; two roundings, but one FMA in float32."""
    narrow = ROUND[dtype]
    codes = int.from_bytes(w.octets, "little")
    found = []
    for item in range(count):
        code = codes >> item * w.bits & ((1 << w.bits) - 1)
        scale, bias = w.scales[item // w.group], w.biases[item // w.group]
        if dtype == "float32":
            found.append(float(fma(code, scale, bias)))
        else:
            found.append(narrow(narrow(code * scale) + bias))
    return found


@dataclass(frozen=True)
class QMV:
    """A thread keeps a sum for each item of a step that it takes; in the dtype for codes of less than 8 bits."""

    sums_in_dtype: bool = True
    slots: bool = True
    values: Callable[[str, int], int] = lambda dtype, bits: 16 if dtype != "float32" and bits <= 4 else 8
    join: Callable[[list[float]], float] = tree

    def weights(self, row: Packed, shape: Shape) -> tuple[list[float], int]:
        return dequantised(row, shape.k, shape.dtype), row.bits

    def total(self, x: list[float], w: tuple[list[float], int], shape: Shape) -> float:
        weights, bits = w
        values = self.values(shape.dtype, bits)
        kind = shape.dtype if self.sums_in_dtype and bits < 8 else "float32"
        threads = []
        for thread in range(32):
            sums = [0.0] * (values if self.slots else 1)
            for step in range(thread * values, shape.k, 32 * values):
                for i in range(values):
                    slot = i % len(sums)
                    sums[slot] = fma_in(x[step + i], weights[step + i], sums[slot], kind)
            threads.append(reduce(add, sums, 0.0))
        return self.join(threads)


@dataclass(frozen=True)
class QMM:
    dtype_of_weights: bool = True
    ascending: bool = True

    def weights(self, row: Packed, shape: Shape) -> list[float]:
        return dequantised(row, shape.k, shape.dtype if self.dtype_of_weights else "float32")

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        items = range(shape.k)
        return chain(x, w, items if self.ascending else items[::-1])


@dataclass(frozen=True)
class GEMV(DenseStatement):
    values: Callable[[int], int] = lambda k: 4 if k % 128 == 0 else 2 if k % 64 == 0 else 1
    threads: int = 32
    join: Callable[[list[float]], float] = tree

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        values = self.values(shape.k)
        sums = [0.0] * self.threads
        for thread in range(self.threads):
            for column in range(values * thread, shape.k, self.threads * values):
                for i in range(column, column + values):
                    sums[thread] = fma(w[i], x[i], sums[thread])
        return self.join(sums)


@dataclass(frozen=True)
class GEMM(DenseStatement):
    ascending: bool = True
    pairs: bool = False

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        items = range(shape.k)
        if self.pairs:
            return add(chain(x, w, items[::2]), chain(x, w, items[1::2]))
        return chain(x, w, items if self.ascending else items[::-1])


STATEMENTS: dict[str, Statement] = {"qmv": QMV(), "qmm": QMM(), "gemv": GEMV(), "gemm": GEMM()}
CASES = {
    "qmv": affine_cases(),
    "qmm": affine_cases(),
    "gemv": dense_cases(st.integers(1, 34).map(lambda warps: 32 * warps)),
    "gemm": dense_cases(),
}


def sample(name: str, dtype: str, k: int = 1088, bits: int = 4) -> Case:
    x = normals(3, k, dtype=dtype)
    if name in ("gemv", "gemm"):
        return Case(x, dense(normals(20, k, seed=1, dtype=dtype), dtype), dtype)
    return Case(x, random_affine(20, k, bits, 32, dtype, seed=1), dtype)


@pytest.mark.parametrize("name", STATEMENTS)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_kernel_computes_what_its_statement_says(name: str, data: st.DataObject) -> None:
    agree(PREFIX + name, STATEMENTS[name], data.draw(CASES[name]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STATEMENTS)
def test_long_rows(name: str, dtype: str) -> None:
    agree(PREFIX + name, STATEMENTS[name], sample(name, dtype))


FLOAT16, BFLOAT16, FLOAT32 = ({"dtype": dtype} for dtype in ("float16", "bfloat16", "float32"))
MUTATIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qmv", {"sums_in_dtype": False}, FLOAT16),
    ("qmv", {"sums_in_dtype": False}, BFLOAT16),
    ("qmv", {"slots": False}, FLOAT32),
    ("qmv", {"slots": False}, FLOAT16),
    ("qmv", {"values": lambda dtype, bits: 8}, FLOAT16),
    ("qmv", {"values": lambda dtype, bits: 16}, {**FLOAT16, "bits": 5}),
    ("qmv", {"values": lambda dtype, bits: 16}, FLOAT32),
    ("qmv", {"join": in_order}, FLOAT32),
    ("qmm", {"dtype_of_weights": False}, FLOAT16),
    ("qmm", {"ascending": False}, FLOAT32),
    ("gemv", {"values": lambda k: 1}, FLOAT32),
    ("gemv", {"values": lambda k: 1}, {**FLOAT32, "k": 1024}),
    ("gemv", {"threads": 16}, FLOAT32),
    ("gemv", {"join": in_order}, FLOAT32),
    ("gemm", {"ascending": False}, FLOAT32),
    ("gemm", {"pairs": True}, FLOAT32),
]


@pytest.mark.parametrize(("name", "change", "shows"), MUTATIONS)
def test_a_statement_of_another_order_is_told_apart(
    name: str, change: dict[str, Any], shows: dict[str, Any]
) -> None:
    told_apart(PREFIX + name, STATEMENTS[name], change, sample(name, **shows))


def test_every_kernel_has_a_statement_and_mutations() -> None:
    names = {name for name in kernel_names() if name.startswith(PREFIX) and kernel(name).op == "linear"}
    assert names == {PREFIX + name for name in STATEMENTS}
    for name in STATEMENTS:
        assert sum(other == name for other, _, _ in MUTATIONS) >= 2
