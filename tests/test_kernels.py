"""The reference kernels against a scalar statement of their order.

Equality is of bits, except that a NaN equals a NaN: which payload an FMA passes on is not part of an order.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import detdiff_kernels
from detdiff_kernels import BadOperand, Kernel, Order, UnknownKernel, kernel, kernel_names
from detdiff_kernels.threads import share

Float32 = NDArray[np.float32]

_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.restype = ctypes.c_float
_fmaf.argtypes = [ctypes.c_float] * 3


@dataclass(frozen=True)
class Statement:
    """An order, said one multiply-add at a time."""

    lanes: int
    values: int
    half_weights: bool
    halving: bool = True
    ascending: bool = True

    def one(self, x: list[float], w: list[float]) -> np.float32:
        if self.half_weights:
            w = [to_half(weight) for weight in w]
        if self.lanes > 1:
            missing = -len(x) % (self.lanes * self.values)
            x, w = x + [0.0] * missing, w + [0.0] * missing
        totals = [0.0] * self.lanes
        for i in range(len(x)) if self.ascending else reversed(range(len(x))):
            lane = i // self.values % self.lanes
            totals[lane] = _fmaf(x[i], w[i], totals[lane])
        sums = [np.float32(total) for total in totals]
        if not self.halving:
            return np.float32(np.add.accumulate(np.array(sums, np.float32))[-1])
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [low + high for low, high in zip(sums[:half], sums[half:], strict=True)]
        return sums[0]

    def __call__(self, x: Float32, w: Float32) -> Float32:
        with np.errstate(all="ignore"):
            return np.array([[self.one(a, b) for b in w.tolist()] for a in x.tolist()], np.float32)


def to_half(value: float) -> float:
    try:
        return float(struct.unpack("e", struct.pack("e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


STATEMENTS = {
    "candle-metal/mv": Statement(lanes=32, values=4, half_weights=False),
    "candle-metal/mm": Statement(lanes=1, values=1, half_weights=True),
}
# Where halves, floats and sums change their behaviour: zeros, smallest and largest numbers, ties.
EDGES = [
    0.0,
    1.0,
    1.5,
    2.0**-149,
    2.0**-126,
    3.4028235e38,
    65504.0,
    65519.0,
    65520.0,
    1e5,
    2.0**-24,
    2.0**-25,
    1 + 2.0**-11,
]
SPECIALS = [math.inf, math.nan]


@st.composite
def operands(draw: st.DrawFn) -> tuple[Float32, Float32]:
    """x (m, k) and w (n, k): random normals with edges, or specials, or cancelling pairs among them."""
    m = draw(st.integers(1, 9))
    k = draw(st.integers(1, 300))
    n = draw(st.integers(1, max(1, min(70, 3000 // (m * k)))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    palette = np.array(EDGES + draw(st.sampled_from([[], SPECIALS])), np.float32)
    share_of_edges = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))

    def some(rows: int) -> Float32:
        values = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-12, 12, (rows, k)))
        signs = rng.choice(np.array([-1, 1], np.float32), (rows, k))
        edges = palette[rng.integers(0, len(palette), (rows, k))] * signs
        chosen = np.where(rng.random((rows, k)) < share_of_edges, edges, values.astype(np.float32))
        return np.ascontiguousarray(chosen, np.float32)

    x, w = some(m), some(n)
    if draw(st.booleans()):
        w[:, k // 2 : k // 2 * 2] = w[:, : k // 2]
        x[:, k // 2 : k // 2 * 2] = -x[:, : k // 2]
    return x, w


def normals(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def unaligned(array: Float32) -> Float32:
    """The same values at an odd address, as a mapped file may have them."""
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw.view(np.float32).reshape(array.shape)


def product(name: str, x: Float32, w: Float32) -> Float32:
    return kernel(name)(x, kernel(name).stage(w))


def differing(a: Float32, b: Float32) -> int:
    """How many elements differ in bits, NaN against NaN not counted."""
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return int(((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))).sum())


def test_every_kernel_has_a_statement() -> None:
    assert set(STATEMENTS) == set(kernel_names())


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(finite, finite, finite)
def test_the_scalar_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = np.float32(_fmaf(a, b, c))
    if not np.isfinite(got):
        assert abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103
        return
    error = abs(Fraction(float(got)) - exact)
    for direction in (-np.inf, np.inf):
        with np.errstate(over="ignore"):
            beside = np.nextafter(got, np.float32(direction))
        further = abs(Fraction(float(beside)) - exact) if np.isfinite(beside) else error + 1
        assert error < further or (error == further and not got.view(np.uint32) & 1)


@pytest.mark.parametrize("name", STATEMENTS)
@given(pair=operands())
def test_a_kernel_computes_what_its_statement_says(name: str, pair: tuple[Float32, Float32]) -> None:
    x, w = pair
    assert differing(product(name, x, w), STATEMENTS[name](x, w)) == 0


OTHERS = [
    (Order(16, 3, "float16"), Statement(16, 3, half_weights=True)),
    (Order(1, 1, "float32"), Statement(1, 1, half_weights=False)),
]


@pytest.mark.parametrize(("order", "statement"), OTHERS)
@given(pair=operands())
def test_an_order_is_all_that_a_kernel_needs(
    order: Order, statement: Statement, pair: tuple[Float32, Float32]
) -> None:
    x, w = pair
    other = Kernel("test/other", order, "made up", "inferred")
    assert differing(other(x, other.stage(w)), statement(x, w)) == 0


MUTATIONS = [
    ("candle-metal/mv", {"lanes": 16}),
    ("candle-metal/mv", {"values": 1}),
    ("candle-metal/mv", {"halving": False}),
    ("candle-metal/mv", {"ascending": False}),
    ("candle-metal/mv", {"half_weights": True}),
    ("candle-metal/mm", {"half_weights": False}),
    ("candle-metal/mm", {"ascending": False}),
    ("candle-metal/mm", {"lanes": 32}),
]


@pytest.mark.parametrize(("name", "change"), MUTATIONS)
def test_a_statement_of_another_order_is_told_apart(name: str, change: dict[str, Any]) -> None:
    x, w = normals(3, 600), normals(5, 600, seed=1)
    assert differing(product(name, x, w), STATEMENTS[name](x, w)) == 0
    assert differing(product(name, x, w), replace(STATEMENTS[name], **change)(x, w)) > 0


def test_the_two_kernels_differ() -> None:
    x = normals(4, 576)
    w = normals(64, 576, seed=1).astype(np.float16).astype(np.float32)
    assert differing(product("candle-metal/mv", x, w), product("candle-metal/mm", x, w)) > 128


@pytest.mark.parametrize("name", STATEMENTS)
@given(pair=operands(), above=st.integers(0, 9), below=st.integers(0, 9))
def test_a_row_does_not_depend_on_its_neighbours(
    name: str, pair: tuple[Float32, Float32], above: int, below: int
) -> None:
    x, w = pair
    row = x[:1]
    noise = np.full((above + below, x.shape[1]), np.nan, np.float32)
    noise[1::2] = 1e30
    crowd = np.concatenate([noise[:above], row, noise[above:]])
    assert differing(product(name, crowd, w)[above : above + 1], product(name, row, w)) == 0


@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_output_does_not_depend_on_how_many_there_are(name: str, rows: int) -> None:
    """The large product is split over threads; its columns must be those of small ones."""
    x, w = normals(rows, 1030), normals(4200, 1030, seed=1)
    whole = product(name, x, w)
    for first in (0, 1, 2097, 4193):
        part = product(name, x, w[first : first + 7])
        assert differing(whole[:, first : first + 7], part) == 0


def test_half_weights_overflow_to_infinity_and_keep_subnormals() -> None:
    w = np.array([[65519.0], [65520.0], [2.0**-24], [2.0**-25], [-1e30]], np.float32)
    expected = np.array([[65504.0, np.inf, 2.0**-24, 0.0, -np.inf]], np.float32)
    assert differing(product("candle-metal/mm", np.ones((1, 1), np.float32), w), expected) == 0


@pytest.mark.parametrize(("k", "sign"), [(128, True), (127, False), (256, True), (255, False)])
def test_a_missing_item_turns_a_negative_zero_positive(k: int, sign: bool) -> None:
    """Every product underflows to -0.0; where a lane's last item is missing, its +0.0 shows in the sum."""
    x, w = np.full((1, k), -(2.0**-100), np.float32), np.full((1, k), 2.0**-100, np.float32)
    assert np.signbit(product("candle-metal/mv", x, w)[0, 0]) == sign
    assert differing(product("candle-metal/mv", x, w), STATEMENTS["candle-metal/mv"](x, w)) == 0


def test_memory_behind_the_operands_is_not_touched() -> None:
    for name in kernel_names():
        x, w, out = (np.full(size, np.nan, np.float32) for size in (2 * 5 + 128, 3 * 5 + 128, 2 * 3 + 128))
        x[:10], w[:15] = 1, 2
        stage = kernel(name).stage(w[:15].reshape(3, 5))
        kernel(name)(x[:10].reshape(2, 5), stage, out[:6].reshape(2, 3))
        assert (out[:6] == 10).all() and np.isnan(out[6:]).all()


def test_staging_for_lanes_copies_nothing() -> None:
    w = normals(6, 130)
    assert np.shares_memory(kernel("candle-metal/mv").stage(w).data, w)


@pytest.mark.parametrize("name", STATEMENTS)
def test_read_only_strided_and_unaligned_weights_and_given_outputs_are_taken(name: str) -> None:
    x, w = normals(2, 70), normals(40, 70, seed=1)
    expected = product(name, x, w)
    strided = np.repeat(w, 2, axis=1)[:, ::2]
    x.setflags(write=False)
    w.setflags(write=False)
    out = np.empty_like(expected)
    assert kernel(name)(x, kernel(name).stage(w), out) is out
    assert differing(out, expected) == 0
    for weight in (strided, unaligned(w), np.asfortranarray(w)):
        assert differing(product(name, x, weight), expected) == 0


def _bad_calls() -> dict[str, tuple[Callable[[], Any], str]]:
    mv, mm = kernel("candle-metal/mv"), kernel("candle-metal/mm")
    x, w = normals(2, 8), normals(3, 8)
    frozen = np.empty((2, 3), np.float32)
    frozen.setflags(write=False)
    return {
        "weight dtype": (lambda: mv.stage(w.astype(np.float64)), "float64"),
        "weight rank": (lambda: mv.stage(w[0]), r"\(8,\)"),
        "empty weight": (lambda: mv.stage(w[:0]), r"\(0, 8\)"),
        "x columns": (lambda: mv(normals(2, 7), mv.stage(w)), r"\(2, 7\).*\(2, 8\)"),
        "x rank": (lambda: mv(x[0], mv.stage(w)), r"\(8,\)"),
        "x dtype": (lambda: mv(x.astype(np.float16), mv.stage(w)), "float16"),
        "x order": (lambda: mv(np.asfortranarray(x), mv.stage(w)), "not C-contiguous"),
        "x alignment": (lambda: mv(unaligned(x), mv.stage(w)), "not aligned"),
        "out shape": (lambda: mv(x, mv.stage(w), np.empty((3, 2), np.float32)), r"out .*\(3, 2\)"),
        "out read-only": (lambda: mv(x, mv.stage(w), frozen), "read-only"),
        "other staging": (lambda: mv(x, mm.stage(w)), "staged"),
    }


@pytest.mark.parametrize("case", _bad_calls())
def test_a_bad_operand_is_named(case: str) -> None:
    call, message = _bad_calls()[case]
    with pytest.raises(BadOperand, match=message):
        call()


def test_an_unknown_kernel_names_the_nearest() -> None:
    with pytest.raises(UnknownKernel, match="'candle-metal/mw'.*did you mean candle-metal/m"):
        kernel("candle-metal/mw")


def test_no_rows_give_no_rows() -> None:
    for name in kernel_names():
        assert product(name, np.empty((0, 4), np.float32), normals(3, 4)).shape == (0, 3)


@given(st.integers(1, 300))
def test_shared_work_is_done_once(count: int) -> None:
    done = np.zeros(count, np.int64)

    def work(first: int, last: int) -> None:
        done[first:last] += 1

    share(work, count, cost=1 << 40)
    assert (done == 1).all()


@pytest.mark.skipif(
    not hasattr(__import__("os"), "sched_getaffinity"), reason="cannot tell the number of cores"
)
def test_two_threads_share_work() -> None:
    import os

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


def test_changed_vector_operations_are_compiled_anew(tmp_path: Path) -> None:
    """numba's own check looks only at the file of the loop, and would go on running the old operations."""
    copy = tmp_path / "detdiff_kernels"
    shutil.copytree(Path(detdiff_kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from detdiff_kernels import loops; print(len(loops.turn_loop(32, 4).stats.cache_misses))"

    def misses() -> str:
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    assert [misses(), misses()] == ["1", "0"]
    with (copy / "simd.py").open("a") as source:
        source.write("# changed\n")
    assert [misses(), misses()] == ["1", "0"]
