"""Statements: what a kernel computes, said one multiply-add at a time in plain Python, and calls of them.

Every field of a statement is a choice that a test can make otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol

import numpy as np
from harness import ROUND, Case, Float32, add, differing, fma, linear

from detdiff_kernels import Affine, Dense


@dataclass(frozen=True)
class Shape:
    """Rows, outputs and inputs of a call, and its dtype."""

    m: int
    n: int
    k: int
    dtype: str


@dataclass(frozen=True)
class Packed:
    """One output's quantised weights: the bytes of its codes, a scale and a bias per group."""

    octets: bytes
    scales: list[float]
    biases: list[float]
    bits: int
    group: int


class Statement(Protocol):
    def weights(self, row: Any, shape: Shape) -> Any:
        """What is made of one output's weights: Packed, or a list of floats."""

    def total(self, x: list[float], w: Any, shape: Shape) -> float:
        """One output of one row, before it is rounded to the dtype."""


def stated(statement: Statement, case: Case) -> Float32:
    """What a statement says about a call, (m, n)."""
    weight = case.weight
    shape = Shape(len(case.x), weight.n, weight.k, case.dtype)
    out = np.empty((shape.m, shape.n), np.float32)
    for j, row in enumerate(_weight_rows(case)):
        w = statement.weights(row, shape)
        for i, x in enumerate(case.x.tolist()):
            out[i, j] = ROUND[case.dtype](statement.total(x, w, shape))
    return out


def _weight_rows(case: Case) -> list[Any]:
    weight = case.weight
    if isinstance(weight, Affine):
        return [
            Packed(weight.packed[j].tobytes(), scales, biases, weight.bits, weight.group_size)
            for j, (scales, biases) in enumerate(
                zip(weight.scales.tolist(), weight.biases.tolist(), strict=True)
            )
        ]
    assert isinstance(weight, Dense)
    return [row.tolist() for row in weight.floats()]


def in_order(sums: list[float]) -> float:
    return reduce(add, sums)


def chain(x: list[float], w: list[float], items: range) -> float:
    total = 0.0
    for i in items:
        total = fma(x[i], w[i], total)
    return total


class DenseStatement:
    """A statement about dense weights, which are taken as they are."""

    def weights(self, row: list[float], shape: Shape) -> list[float]:
        return row


def product(name: str, case: Case) -> Float32:
    """What the library's kernel of that name makes of a case."""
    chosen = linear(name)
    return chosen(case.x, chosen.stage(case.weight, case.dtype))


def agree(name: str, statement: Statement, case: Case) -> None:
    """Fails unless a kernel and a statement give the same bits."""
    assert differing(product(name, case), stated(statement, case)) == 0


def told_apart(name: str, statement: Any, change: dict[str, Any], case: Case) -> None:
    """Fails unless the kernel agrees with its statement, and not with a changed one."""
    found = product(name, case)
    assert differing(found, stated(statement, case)) == 0
    assert differing(found, stated(replace(statement, **change), case)) > 0
