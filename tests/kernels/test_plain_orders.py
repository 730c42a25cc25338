"""Orders that one sentence tells: Candle's dense kernels, the batch-invariant control, and made-up ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness import (
    DTYPES,
    Case,
    add,
    affine_cases,
    dense,
    dense_cases,
    differing,
    f16,
    fma,
    normals,
    random_affine,
    rounded,
    tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_statements import Tile
from statements import DenseStatement, Shape, Statement, agree, chain, in_order, product, stated, told_apart
from tiers import examples

from detdiff_kernels import Affine, Kernel, Order, Walk
from detdiff_kernels.order import lanes_of


@dataclass(frozen=True)
class Lanes(DenseStatement):
    """Each lane takes so many neighbours of a step; what is missing in the last one is zero."""

    lanes: int = 32
    values: int = 4
    half_weights: bool = False
    halving: bool = True
    ascending: bool = True

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        if self.half_weights:
            w = [f16(weight) for weight in w]
        missing = -shape.k % (self.lanes * self.values)
        x, w = x + [0.0] * missing, w + [0.0] * missing
        totals = [0.0] * self.lanes
        for i in range(len(x)) if self.ascending else reversed(range(len(x))):
            lane = i // self.values % self.lanes
            totals[lane] = fma(x[i], w[i], totals[lane])
        return tree(totals) if self.halving else in_order(totals)


@dataclass(frozen=True)
class Tiles:
    """Tiles of K, each a chain that starts at zero; they are added in order. Quantised weights become the dtype's."""

    size: int = 0
    summed: bool = True
    ascending: bool = True

    def weights(self, row: Any, shape: Shape) -> list[float]:
        return row if isinstance(row, list) else Tile().weights(row, shape)

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        size = self.size or (32 if shape.dtype == "float32" else 64)
        tiles = [range(start, min(start + size, shape.k)) for start in range(0, shape.k, size)]
        total = 0.0
        for tile in tiles if self.ascending else tiles[::-1]:
            if self.summed:
                total = add(total, chain(x, w, tile))
            else:
                for i in tile:
                    total = fma(x[i], w[i], total)
        return total


STATEMENTS: dict[str, Statement] = {
    "candle-metal/mv": Lanes(),
    "candle-metal/mm": Lanes(1, 1, half_weights=True),
    "batch-invariant/mm": Tiles(),
}
CASES = {name: dense_cases() for name in STATEMENTS}
CASES["batch-invariant/mm"] |= affine_cases()


def sample(dtype: str) -> Case:
    return Case(normals(3, 600, dtype=dtype), dense(normals(20, 600, seed=1, dtype=dtype), dtype), dtype)


@pytest.mark.parametrize("name", STATEMENTS)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_kernel_computes_what_its_statement_says(name: str, data: st.DataObject) -> None:
    agree(name, STATEMENTS[name], data.draw(CASES[name]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STATEMENTS)
def test_long_rows(name: str, dtype: str) -> None:
    agree(name, STATEMENTS[name], sample(dtype))


MUTATIONS = [
    ("candle-metal/mv", {"lanes": 16}, "float32"),
    ("candle-metal/mv", {"values": 1}, "float32"),
    ("candle-metal/mv", {"halving": False}, "float32"),
    ("candle-metal/mv", {"ascending": False}, "float32"),
    ("candle-metal/mv", {"half_weights": True}, "float32"),
    ("candle-metal/mm", {"half_weights": False}, "float32"),
    ("candle-metal/mm", {"ascending": False}, "float32"),
    ("candle-metal/mm", {"lanes": 32}, "float32"),
    ("batch-invariant/mm", {"size": 64}, "float32"),
    ("batch-invariant/mm", {"summed": False}, "float32"),
    ("batch-invariant/mm", {"ascending": False}, "float32"),
    ("batch-invariant/mm", {"size": 600}, "float32"),
]


@pytest.mark.parametrize(("name", "change", "dtype"), MUTATIONS)
def test_a_statement_of_another_order_is_told_apart(name: str, change: dict[str, Any], dtype: str) -> None:
    told_apart(name, STATEMENTS[name], change, sample(dtype))


def test_halves_are_tiled_by_64() -> None:
    """Float16 outputs hide nearly all of it; pairs that cancel leave only what was rounded on the way."""
    x, w = normals(8, 600, dtype="float16"), normals(40, 600, seed=1, dtype="float16")
    x[:, 300:], w[:, 300:] = -x[:, :300], w[:, :300]
    told_apart("batch-invariant/mm", Tiles(), {"size": 32}, Case(x, dense(w, "float16"), "float16"))


OTHERS: list[tuple[Order, Statement]] = [
    (Order(lanes_of(16, 3), weight="float16", halve=16), Lanes(16, 3, half_weights=True)),
    (Order(Walk((1, 1))), Lanes(1, 1)),
    (Order(lanes_of(8, 2), fold=8), Lanes(8, 2, halving=False)),
]


@pytest.mark.parametrize(("order", "statement"), OTHERS)
@settings(max_examples=examples(30))
@given(case=dense_cases())
def test_an_order_is_all_that_a_kernel_needs(order: Order, statement: Statement, case: Case) -> None:
    other = Kernel("test/other", lambda shape: order, "made up", "inferred")
    assert differing(other(case.x, other.stage(case.weight, case.dtype)), stated(statement, case)) == 0


def test_the_two_candle_kernels_differ() -> None:
    case = Case(normals(4, 576), dense(rounded(normals(64, 576, seed=1), "float16"), "float32"), "float32")
    assert differing(product("candle-metal/mv", case), product("candle-metal/mm", case)) > 128


def test_half_weights_overflow_to_infinity_and_keep_subnormals() -> None:
    w = np.array([[65519.0], [65520.0], [2.0**-24], [2.0**-25], [-1e30]], np.float32)
    expected = np.array([[65504.0, np.inf, 2.0**-24, 0.0, -np.inf]], np.float32)
    case = Case(np.ones((1, 1), np.float32), dense(w, "float32"), "float32")
    assert differing(product("candle-metal/mm", case), expected) == 0


@pytest.mark.parametrize(("k", "sign"), [(128, True), (127, False), (256, True), (255, False)])
def test_a_missing_item_turns_a_negative_zero_positive(k: int, sign: bool) -> None:
    """Every product underflows to -0.0; where a lane's last item is missing, its +0.0 shows in the sum."""
    x, w = np.full((1, k), -(2.0**-100), np.float32), np.full((1, k), 2.0**-100, np.float32)
    case = Case(x, dense(w, "float32"), "float32")
    assert np.signbit(product("candle-metal/mv", case)[0, 0]) == sign
    agree("candle-metal/mv", STATEMENTS["candle-metal/mv"], case)


def test_the_control_does_not_feel_how_many_rows_there_are() -> None:
    weight = random_affine(70, 1024, 4, 64, "bfloat16")
    x = normals(40, 1024, dtype="bfloat16")
    whole = product("batch-invariant/mm", Case(x, weight, "bfloat16"))
    assert isinstance(weight, Affine)
    for rows in (1, 2, 15, 33):
        part = product("batch-invariant/mm", Case(x[:rows].copy(), weight, "bfloat16"))
        assert differing(part, whole[:rows].copy()) == 0
