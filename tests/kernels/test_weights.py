"""Weights as models hold them: codes and floats, and what does not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import mlx.core as mx
import numpy as np
import pytest
from harness import BITS, GROUPS, affine, affine_cases, dense, differing, normals, random_affine
from hypothesis import given
from hypothesis import strategies as st

from detdiff_kernels import Affine, BadOperand, Dense, UnsupportedFormat


@pytest.mark.parametrize("bits", BITS)
@given(n=st.integers(1, 5), groups=st.integers(1, 5), group=st.sampled_from(GROUPS), seed=st.integers(0, 99))
def test_codes_are_those_that_were_packed(bits: int, n: int, groups: int, group: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, groups * group))
    ones = np.ones((n, groups), np.float32)
    weight = affine(codes, ones, ones, bits)
    assert (weight.n, weight.k) == codes.shape
    assert weight.codes().dtype == np.uint8
    assert (weight.codes() == codes).all()
    assert (weight.part(n // 2, n).codes() == codes[n // 2 :]).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_what_mlx_quantises_is_read_as_mlx_reads_it(bits: int, group: int) -> None:
    w = mx.array(normals(7, 256))
    packed, scales, biases = mx.quantize(w, group, bits)
    weight = Affine(np.array(packed), np.array(scales), np.array(biases), bits, group)
    ones, zeros = mx.ones_like(scales), mx.zeros_like(scales)
    codes = np.array(mx.dequantize(packed, ones, zeros, group, bits))
    assert (weight.codes() == codes).all()
    expected = np.array(mx.dequantize(packed, scales, biases, group, bits))
    # MLX's CPU rounds the product first, which moves the sum by no more than half a step of the larger of both.
    limit = np.spacing(np.maximum(np.abs(expected), np.abs(np.repeat(weight.biases, group, axis=1))) * 2)
    assert (np.abs(weight.floats() - expected) <= limit).all()


@given(case=affine_cases())
def test_floats_are_rounded_once(case: harness.Case) -> None:
    weight = case.weight
    assert isinstance(weight, Affine)
    scales, biases = (np.repeat(array, weight.group_size, axis=1) for array in (weight.scales, weight.biases))
    items = zip(weight.codes().flat, scales.flat, biases.flat, strict=True)
    expected = [harness.fma(float(scale), int(code), float(bias)) for code, scale, bias in items]
    assert differing(weight.floats(), np.array(expected, np.float32).reshape(weight.n, weight.k)) == 0


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_a_dense_weight_is_its_values(dtype: str) -> None:
    values = normals(3, 5, dtype=dtype)
    weight = dense(values, dtype)
    assert (weight.n, weight.k, weight.bits, weight.group_size) == (3, 5, None, None)
    assert differing(weight.floats(), values) == 0
    assert differing(weight.part(1, 3).floats(), values[1:3].copy()) == 0


def _bad() -> dict[str, tuple[type[Exception], Callable[[], Any], str]]:
    good = random_affine(2, 64, 4, 32, "float32")
    packed, scales, biases = good.packed, good.scales, good.biases
    return {
        "dense dtype": (BadOperand, lambda: Dense(normals(2, 3), "float16"), "'float16'.*float32"),
        "dense name": (BadOperand, lambda: Dense(normals(2, 3), "float8"), "'float8'"),
        "dense rank": (BadOperand, lambda: Dense(normals(3)), r"\(3,\)"),
        "bits": (UnsupportedFormat, lambda: Affine(packed, scales, biases, 7, 32), "7 bits"),
        "words": (BadOperand, lambda: Affine(packed.view(np.int32), scales, biases, 4, 32), "int32"),
        "group": (BadOperand, lambda: Affine(packed, scales, biases, 4, 64), "groups of 64"),
        "no group": (BadOperand, lambda: Affine(packed, scales, biases, 4, 0), "groups of 0"),
        "biases": (BadOperand, lambda: Affine(packed, scales, biases[:, :1], 4, 32), r"biases \(2, 1\)"),
        "halves": (
            BadOperand,
            lambda: Affine(packed, scales.astype(np.float16), biases, 4, 32),
            "float16",
        ),
        "part words": (BadOperand, lambda: Affine(packed[:, :7], scales, biases, 6, 32), "6-bit"),
    }


@pytest.mark.parametrize("case", _bad())
def test_what_does_not_fit_is_named(case: str) -> None:
    error, call, message = _bad()[case]
    with pytest.raises(error, match=message):
        call()
