"""What holds for every linear kernel, whatever its order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import numpy as np
import pytest
from harness import DTYPES, Float32, dense, differing, linear, normals, random_affine, rounded, unaligned
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiers import examples, some_now

from detdiff_kernels import (
    Affine,
    BadOperand,
    Dense,
    UnknownKernel,
    UnsupportedFormat,
    Weight,
    kernel,
    kernel_names,
)
from detdiff_kernels.threads import share

ROOT = Path(__file__).resolve().parents[2]
LINEAR = tuple(name for name in kernel_names() if kernel(name).op == "linear")


def quantised(n: int, k: int, seed: int = 0) -> Affine:
    """4-bit codes at random, in groups of 32 that are Q4_0 blocks as well."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, (n, k // 8), dtype=np.uint32)
    scales = rounded(rng.uniform(0.01, 0.1, (n, k // 32)).astype(np.float32), "float16")
    return Affine(words, scales, -8 * scales, 4, 32)


def makers() -> list[tuple[str, str]]:
    """Every kernel with every format that it takes."""
    found = []
    for name in LINEAR:
        for form, weight in (("dense", dense(normals(2, 128), "float32")), ("affine", quantised(2, 128))):
            try:
                linear(name).order_for(weight, "float32", 2)
            except UnsupportedFormat:
                continue
            found.append((name, form))
    return found


MAKERS = makers()


def weight_of(form: str, n: int, k: int, seed: int = 1) -> Weight:
    return dense(normals(n, k, seed=seed), "float32") if form == "dense" else quantised(n, k, seed)


def product(name: str, x: Float32, weight: Weight | Float32) -> Float32:
    return linear(name)(x, linear(name).stage(weight))


def test_every_kernel_takes_something() -> None:
    assert {name for name, _ in MAKERS} == set(LINEAR)


@pytest.mark.parametrize(("name", "form"), MAKERS)
@settings(max_examples=examples(30))
@given(above=st.integers(0, 9), below=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_row_does_not_depend_on_its_neighbours(
    name: str, form: str, above: int, below: int, seed: int
) -> None:
    """How many they are may matter, which is what profiles are about, but not what is in them."""
    row, weight = normals(1, 128, seed=seed), weight_of(form, 37, 128)
    noise = np.full((above + below, 128), np.nan, np.float32)
    noise[1::2] = 1e30
    crowd = np.concatenate([noise[:above], row, noise[above:]])
    alike = np.repeat(row, above + 1 + below, axis=0)
    found, expected = product(name, crowd, weight), product(name, alike, weight)
    assert differing(found[above], expected[above]) == 0


@pytest.mark.parametrize(("name", "form"), some_now(MAKERS, *range(0, len(MAKERS), 3)))
@pytest.mark.parametrize("rows", some_now([1, 5], 1))
def test_an_output_does_not_depend_on_where_it_stands(name: str, form: str, rows: int) -> None:
    """The product is split over threads and over panels; outputs that swap their places must not notice."""
    k = 128 if name.endswith("qmv_quad") else 1024
    n = (1 << 22) // k + 77
    weight = weight_of(form, n, k)
    order = np.random.default_rng(0).permutation(n)
    if isinstance(weight, Affine):
        arrays = (weight.packed[order], weight.scales[order], weight.biases[order])
        moved: Weight = Affine(*arrays, weight.bits, weight.group_size)
    else:
        assert isinstance(weight, Dense)
        moved = Dense(weight.data[order], weight.dtype)
    x = normals(rows, k)
    assert differing(product(name, x, moved), product(name, x, weight)[:, order]) == 0


@pytest.mark.parametrize(("name", "form"), MAKERS)
@pytest.mark.parametrize("dtype", some_now(DTYPES, 0))
def test_outputs_are_values_of_the_dtype(name: str, form: str, dtype: str) -> None:
    x = normals(5, 128, dtype=dtype)
    weight = dense(normals(33, 128, dtype=dtype), dtype) if form == "dense" else quantised(33, 128)
    found = linear(name)(x, linear(name).stage(weight, dtype))
    assert differing(found, rounded(found, dtype)) == 0


def followed(array: NDArray[Any]) -> NDArray[Any]:
    """The same values, with what is no number behind them in memory."""
    held = np.full(array.size + 128, 0xFFFFFFFF, np.uint32).view(array.dtype)
    held[: array.size] = array.ravel()
    return held[: array.size].reshape(array.shape)


@pytest.mark.parametrize(("name", "form"), MAKERS)
def test_memory_behind_the_operands_is_not_touched(name: str, form: str) -> None:
    x, weight = normals(6, 128), weight_of(form, 35, 128)
    wide = [np.full(size + 128, np.nan, np.float32) for size in (6 * 128, 6 * 35)]
    wide[0][: 6 * 128] = x.ravel()
    expected = product(name, x, weight)
    if isinstance(weight, Affine):
        arrays = [followed(array) for array in (weight.packed, weight.scales, weight.biases)]
        weight = Affine(arrays[0], arrays[1], arrays[2], weight.bits, weight.group_size)
    elif isinstance(weight, Dense):
        weight = Dense(followed(weight.data))
    out = wide[1][: 6 * 35].reshape(6, 35)
    linear(name)(wide[0][: 6 * 128].reshape(6, 128), linear(name).stage(weight), out)
    assert differing(out, expected) == 0
    assert all(np.isnan(array[-128:]).all() for array in wide)


@pytest.mark.parametrize("name", [name for name, form in MAKERS if form == "dense"])
def test_read_only_strided_and_unaligned_weights_and_given_outputs_are_taken(name: str) -> None:
    x, w = normals(2, 128), normals(40, 128, seed=1)
    expected = product(name, x, w)
    strided = np.repeat(w, 2, axis=1)[:, ::2]
    x.setflags(write=False)
    w.setflags(write=False)
    out = np.empty_like(expected)
    assert linear(name)(x, linear(name).stage(w), out) is out
    assert differing(out, expected) == 0
    for weight in (strided, unaligned(w), np.asfortranarray(w)):
        assert differing(product(name, x, weight), expected) == 0


@pytest.mark.parametrize("name", [name for name, form in MAKERS if form == "affine"])
def test_strided_and_unaligned_quantised_weights_are_taken(name: str) -> None:
    x, weight = normals(2, 128), quantised(40, 128)
    expected = product(name, x, weight)
    words = unaligned(weight.packed.view(np.float32)).view(np.uint32)
    scales, biases = (np.repeat(array, 2, axis=1)[:, ::2] for array in (weight.scales, weight.biases))
    other = Affine(words, scales, biases, weight.bits, weight.group_size)
    assert differing(product(name, x, other), expected) == 0


def _bad_calls() -> dict[str, tuple[Callable[[], Any], str]]:
    mv, mm = linear("candle-metal/mv"), linear("candle-metal/mm")
    x, w = normals(2, 8), normals(3, 8)
    frozen = np.empty((2, 3), np.float32)
    frozen.setflags(write=False)
    return {
        "weight dtype": (lambda: mv.stage(w.astype(np.float64)), "float64"),
        "weight rank": (lambda: mv.stage(w[0]), r"\(8,\)"),
        "empty weight": (lambda: mv.stage(w[:0]), r"\(0, 8\)"),
        "activations": (lambda: mv.stage(w, "bfloat1"), "'bfloat1'.*did you mean bfloat16"),
        "x columns": (lambda: mv(normals(2, 7), mv.stage(w)), r"\(2, 7\).*\(2, 8\)"),
        "x rank": (lambda: mv(x[0], mv.stage(w)), r"\(8,\)"),
        "x dtype": (lambda: mv(x.astype(np.float16), mv.stage(w)), "float16"),
        "x order": (lambda: mv(np.asfortranarray(x), mv.stage(w)), "not C-contiguous"),
        "x alignment": (lambda: mv(unaligned(x), mv.stage(w)), "not aligned"),
        "out shape": (lambda: mv(x, mv.stage(w), np.empty((3, 2), np.float32)), r"out .*\(3, 2\)"),
        "out read-only": (lambda: mv(x, mv.stage(w), frozen), "read-only"),
        "other staging": (lambda: mv(x, mm.stage(w)), "candle-metal/mv .*staged for candle-metal/mm"),
    }


@pytest.mark.parametrize("case", _bad_calls())
def test_a_bad_operand_is_named(case: str) -> None:
    call, message = _bad_calls()[case]
    with pytest.raises(BadOperand, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("mlx-metal/qmv", dense(normals(2, 64), "float32"), r"mlx-metal/qmv was given a dense .*\(2, 64\)"),
        ("mlx-metal/gemv", random_affine(2, 64, 6, 32, "float32"), "mlx-metal/gemv was given a 6-bit affine"),
        ("mlx-metal/qmv_quad", random_affine(2, 96, 4, 32, "float32"), "4-bit affine"),
        ("mlx-metal/qmv_quad", random_affine(2, 64, 3, 32, "float32"), "3-bit affine"),
        ("mlx-metal/gemv_wide", dense(normals(2, 66), "float32"), "dense"),
    ],
)
def test_a_weight_that_the_real_kernel_does_not_take_is_named(
    name: str, weight: Weight, message: str
) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        linear(name).stage(weight)


def test_an_unknown_kernel_names_the_nearest() -> None:
    with pytest.raises(UnknownKernel, match="'candle-metal/mw'.*did you mean candle-metal/m"):
        kernel("candle-metal/mw")


@pytest.mark.parametrize(("name", "form"), MAKERS)
def test_no_rows_give_no_rows(name: str, form: str) -> None:
    assert product(name, np.empty((0, 128), np.float32), weight_of(form, 3, 128)).shape == (0, 3)


@given(st.integers(1, 300))
def test_shared_work_is_done_once(count: int) -> None:
    done = np.zeros(count, np.int64)

    def work(first: int, last: int) -> None:
        done[first:last] += 1

    share(work, count, cost=1 << 40)
    assert (done == 1).all()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cannot tell the number of cores")
def test_two_threads_share_work() -> None:
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core has no helpers")
    second = Event()
    seen: list[str] = []

    def work(first: int, last: int) -> None:
        seen.append(current_thread().name)
        if len(seen) == 1:
            assert second.wait(60)
        second.set()

    share(work, 8, cost=1 << 40)
    assert len(set(seen)) > 1


def test_choosing_needs_neither_numba_nor_mlx_nor_detdiff() -> None:
    code = (
        "import sys, detdiff_kernels as k; k.profile('candle-metal'); k.kernel('candle-metal/mv').stage;"
        "print(sorted({'numba', 'llvmlite', 'mlx', 'detdiff'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_page_of_kernels_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "tools/kernel_docs.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run `python tools/kernel_docs.py`"
