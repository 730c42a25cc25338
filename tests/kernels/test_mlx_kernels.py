"""MLX's Metal matmul kernels against scalar statements of what their sources compute, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import (
    BITS,
    DTYPES,
    Case,
    affine,
    affine_cases,
    dense,
    dense_cases,
    differing,
    normals,
    random_affine,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_statements import (
    GEMV,
    QMV,
    NaxSplit,
    QuadQMV,
    SplitTile,
    Steel,
    SteelSplit,
    Tile,
    WideGEMV,
    WideQMV,
)
from statements import Statement, agree, in_order, product, told_apart
from tiers import examples, first_of_each, some_now

from detdiff_kernels import kernel, kernel_names

PREFIX = "mlx-metal/"
FAST = {2: 16, 3: 16, 4: 16, 5: 16, 6: 8, 8: 8}
SAFE = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}
STATEMENTS: dict[str, Statement] = {
    "qmv_fast": QMV(FAST),
    "qmv": QMV(SAFE),
    "qmv_quad": QuadQMV({}),
    "qmv_wide": WideQMV(),
    "qmm_t": Tile(),
    "qmm_splitk": SplitTile(),
    "qmm_t-0.32.0": Tile(old=True),
    "qmm_splitk-0.32.0": SplitTile(old=True),
    "gemv": GEMV(),
    "gemv_wide": WideGEMV(),
    "splitk": SteelSplit(),
    "splitk-0.30.0": SteelSplit(old=True),
    "splitk_nax": NaxSplit(),
    "steel": Steel(),
}
DENSE = {"gemv", "gemv_wide", "splitk", "splitk-0.30.0", "splitk_nax", "steel"}
FOURS = st.integers(1, 330).map(lambda blocks: 4 * blocks)
WIDTHS: dict[str, st.SearchStrategy[int]] = {
    "qmv_quad": st.sampled_from([64, 128]),
    "gemv_wide": FOURS,
    "splitk_nax": st.integers(2, 300) | st.integers(1000, 1100) | st.integers(2040, 2060),
}


def operands(name: str) -> st.SearchStrategy[Case]:
    if name in DENSE:
        return dense_cases(WIDTHS.get(name))
    return affine_cases(WIDTHS.get(name), bits=(2, 4, 8) if name == "qmv_quad" else BITS)


def test_every_kernel_has_a_statement_and_mutations() -> None:
    names = {name.removeprefix(PREFIX) for name in kernel_names() if name.startswith(PREFIX)}
    linear = {name for name in names if kernel(PREFIX + name).op == "linear"}
    assert linear == set(STATEMENTS)
    for name in linear:
        assert sum(other == name for other, _, _ in MUTATIONS) >= 2


@pytest.mark.parametrize("name", some_now(STATEMENTS, 0, 3, 4, 8, 10, 13))
@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_kernel_computes_what_its_statement_says(name: str, data: st.DataObject) -> None:
    agree(PREFIX + name, STATEMENTS[name], data.draw(operands(name)))


def sample(
    name: str, dtype: str, k: int = 0, m: int = 2, n: int = 5, bits: int = 4, size: float = 1.0
) -> Case:
    """Ordinary numbers, long enough that a lane takes more than one step."""
    if name in DENSE:
        k = k or 1100
        return Case(normals(m, k, dtype=dtype), dense(normals(n, k, seed=1, dtype=dtype), dtype), dtype)
    k = k or (128 if name == "qmv_quad" else 1088)
    return Case(normals(m, k, dtype=dtype), random_affine(n, k, bits, 32, dtype, 1, size), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STATEMENTS)
def test_long_rows(name: str, dtype: str) -> None:
    agree(PREFIX + name, STATEMENTS[name], sample(name, dtype))


FLOAT16, FLOAT32 = {"dtype": "float16"}, {"dtype": "float32"}
# How a statement is made wrong, and what shows it.
MUTATIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *[
        (name, change, shows)
        for name in ("qmv", "qmv_fast")
        for change, shows in (
            ({"lanes": 16}, FLOAT32),
            ({"lanes": 64}, FLOAT32),
            ({"join": in_order}, FLOAT32),
            ({"groups": False}, FLOAT32),
            ({"groups": False}, {**FLOAT32, "bits": 2}),
            ({"sums_in_dtype": False}, FLOAT16),
            ({"sums_in_dtype": False}, {**FLOAT16, "bits": 6}),
            ({"shift_last": False}, FLOAT32),
        )
    ],
    ("qmv", {"values": FAST}, FLOAT32),
    ("qmv", {"values": FAST}, {**FLOAT32, "bits": 6}),
    ("qmv_fast", {"values": SAFE}, FLOAT32),
    ("qmv_fast", {"values": SAFE}, {**FLOAT32, "bits": 3}),
    ("qmv_quad", {"join": in_order}, FLOAT32),
    ("qmv_quad", {"groups": False}, FLOAT32),
    ("qmv_quad", {"sums_in_dtype": False}, FLOAT16),
    ("qmv_wide", {"lanes": 16}, FLOAT32),
    ("qmv_wide", {"chunk": 4}, FLOAT32),
    ("qmv_wide", {"chunk": 32}, FLOAT32),
    ("qmv_wide", {"join": in_order}, FLOAT32),
    ("qmv_wide", {"narrowed": True}, FLOAT16),
    ("qmm_t", {"ascending": False}, FLOAT32),
    ("qmm_t", {"narrowed": False}, FLOAT16),
    ("qmm_t", {"old": True}, FLOAT16),
    ("qmm_t-0.32.0", {"old": False}, FLOAT16),
    ("qmm_t-0.32.0", {"in_place": False}, {**FLOAT16, "size": 2.0**-7}),
    ("qmm_t-0.32.0", {"ascending": False}, FLOAT32),
    ("qmm_splitk", {"old": True}, FLOAT16),
    ("qmm_splitk", {"partials_in_dtype": False}, FLOAT16),
    ("qmm_splitk", {"other_splits": lambda splits: splits - 1}, FLOAT32),
    ("qmm_splitk", {"other_splits": lambda splits: 1}, FLOAT32),
    ("qmm_splitk", {"rows": 1}, {**FLOAT32, "k": 384}),
    ("qmm_splitk", {"rows": 12}, {**FLOAT32, "k": 384}),
    ("qmm_splitk", {"tree_of_many": False}, {**FLOAT32, "k": 1280}),
    ("qmm_splitk", {"tree_in_dtype": True}, {**FLOAT16, "k": 1280}),
    ("qmm_splitk-0.32.0", {"old": False}, FLOAT16),
    ("qmm_splitk-0.32.0", {"rows": 1}, {**FLOAT32, "k": 384}),
    ("gemv", {"lanes": 16}, {**FLOAT32, "n": 70}),
    ("gemv", {"simdgroups": 1}, FLOAT32),
    ("gemv", {"simdgroups": 4}, FLOAT32),
    ("gemv", {"narrow_lanes": 32}, {**FLOAT32, "k": 64}),
    ("gemv", {"four": 1}, FLOAT32),
    ("gemv", {"join": in_order}, {**FLOAT32, "n": 70}),
    ("gemv", {"single_output": False}, {**FLOAT32, "k": 140, "m": 9, "n": 1}),
    ("gemv_wide", {"unroll": 1}, {**FLOAT32, "k": 2080}),
    ("gemv_wide", {"loose_tail": False}, {**FLOAT32, "k": 1536}),
    ("gemv_wide", {"join": in_order}, FLOAT32),
    ("gemv_wide", {"lanes": lambda lanes: 16}, FLOAT32),
    ("gemv_wide", {"lanes": lambda lanes: 32}, {**FLOAT32, "m": 6, "n": 70}),
    ("splitk", {"other_splits": lambda splits: splits // 2}, FLOAT32),
    ("splitk", {"other_splits": lambda splits: splits - 1}, FLOAT32),
    ("splitk", {"own_tail": True}, FLOAT32),
    ("splitk", {"tile": 1}, FLOAT32),
    ("splitk", {"old": True}, FLOAT32),
    ("splitk-0.30.0", {"old": False}, FLOAT32),
    ("splitk-0.30.0", {"own_tail": True}, FLOAT32),
    *[
        ("splitk-0.30.0", {"other_splits": lambda splits: splits // 2}, {**FLOAT32, "k": k})
        for k in (255, 511, 1023, 1024)
    ],
    ("splitk_nax", {"other_size": lambda size: size // 2}, FLOAT32),
    ("splitk_nax", {"other_size": lambda size: size - 1}, FLOAT32),
    ("splitk_nax", {"other_size": lambda size: 2 * size}, FLOAT32),
    ("steel", {"tail_first": False}, FLOAT32),
    ("steel", {"ascending": False}, FLOAT32),
]


@pytest.mark.parametrize(
    ("name", "change", "shows"), some_now(MUTATIONS, *first_of_each(name for name, _, _ in MUTATIONS))
)
def test_a_statement_of_another_order_is_told_apart(
    name: str, change: dict[str, Any], shows: dict[str, Any]
) -> None:
    told_apart(PREFIX + name, STATEMENTS[name], change, sample(name, **{"m": 3, "n": 20, **shows}))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["qmv", "qmv_fast"])
def test_inputs_that_are_too_small_to_be_divided_lose_bits(name: str, bits: int) -> None:
    """A masked code lies up to 12 bits too high, and its input is divided by as much."""
    x = normals(2, 1024) * np.float32(2.0**-140)
    case = Case(x, random_affine(5, 1024, bits, 32, "float32", size=2.0**100), "float32")
    agree(PREFIX + name, STATEMENTS[name], case)
    whole = Case(x * np.float32(2.0**60), case.weight, "float32")
    lost = product(PREFIX + name, whole) * np.float32(2.0**-60)
    assert (differing(lost, product(PREFIX + name, case)) > 0) == (bits != 8)


@pytest.mark.parametrize(
    ("name", "negative"), [("gemv", True), ("steel", True), ("splitk", False), ("splitk_nax", False)]
)
def test_sums_of_partials_start_at_zero(name: str, negative: bool) -> None:
    """Every product underflows to -0.0, and so does every chain of them; a sum that starts at +0.0 is +0.0."""
    x, w = np.full((1, 1024), -(2.0**-100), np.float32), np.full((3, 1024), 2.0**-100, np.float32)
    case = Case(x, dense(w, "float32"), "float32")
    agree(PREFIX + name, STATEMENTS[name], case)
    assert (np.signbit(product(PREFIX + name, case)) == negative).all()


@pytest.mark.parametrize("group_size", [32, 64])
def test_partials_that_round_to_negative_zero_leave_positive_zero(group_size: int) -> None:
    """Ranges whose sums are too small for float16; 32 partials and 16 of them are added in different ways."""
    x = np.full((1, 1024), -(2.0**-14), np.float32)
    scales = np.full((3, 1024 // group_size), 2.0**-18, np.float32)
    case = Case(x, affine(np.ones((3, 1024), np.int64), scales, scales, 4), "float16")
    agree(PREFIX + "qmm_splitk", STATEMENTS["qmm_splitk"], case)
    assert not np.signbit(product(PREFIX + "qmm_splitk", case)).any()
