"""Forced native paths: what the backend's own operation is called with, and what comes back."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from detdiff_kernels import forced


def normals(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


class Spy:
    """An operation x @ w.T plus the number of rows it was called with, so that a path shows in the values."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.inputs: list[Any] = []

    def __call__(self, x: Any) -> Any:
        self.inputs.append(x)
        return x @ self.weight.T + float(math.prod(x.shape[:-1]))


BACKENDS = [pytest.param((np, np.array), id="numpy"), pytest.param((mx, mx.array), id="mlx")]
SHAPES = [(5, 6), (1, 5, 6), (5, 1, 6), (1, 2, 3, 6), (6,)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_calls_the_operation_on_each_row_alone(backend: tuple[Any, Any], shape: tuple[int, ...]) -> None:
    xp, array = backend
    x, spy = array(normals(*shape)), Spy(array(normals(4, 6, seed=1)))
    got = forced.rows(spy, x, xp)
    flat = np.array(x).reshape(-1, 6)
    assert [tuple(part.shape) for part in spy.inputs] == [(1, 1, 6)] * len(flat)
    alone = [np.array(Spy(spy.weight)(array(row.reshape(1, 1, 6))))[0, 0] for row in flat]
    assert tuple(got.shape) == (*shape[:-1], 4)
    assert same_bits(np.array(got).reshape(-1, 4), np.stack(alone))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_padded_calls_the_operation_once_on_n_rows(backend: tuple[Any, Any], shape: tuple[int, ...]) -> None:
    xp, array = backend
    x, spy = array(normals(*shape)), Spy(array(normals(4, 6, seed=1)))
    got = forced.padded(spy, x, 8, xp)
    flat = np.array(x).reshape(-1, 6)
    (seen,) = (np.array(part) for part in spy.inputs)
    assert seen.shape == (1, 8, 6)
    assert same_bits(seen[0, : len(flat)], flat) and not seen[0, len(flat) :].any()
    assert tuple(got.shape) == (*shape[:-1], 4)
    expected = np.array(Spy(spy.weight)(array(seen)))[0, : len(flat)]
    assert same_bits(np.array(got).reshape(-1, 4), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [4, 5])
def test_padded_leaves_enough_rows_unchanged(backend: tuple[Any, Any], rows: int) -> None:
    xp, array = backend
    x, spy = array(normals(rows, 1, 6)), Spy(array(normals(4, 6, seed=1)))
    assert tuple(forced.padded(spy, x, 4, xp).shape) == (rows, 1, 4)
    assert spy.inputs[0] is x


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_forced_paths_keep_the_dtype(dtype: Any) -> None:
    x = mx.array(normals(3, 1, 6)).astype(dtype)
    for got in (forced.rows(lambda part: part, x, mx), forced.padded(lambda part: part, x, 8, mx)):
        assert got.dtype == dtype and mx.array_equal(got, x).item()
