"""Functions of rows under the check: what is found, at which M, and the text of a failure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray
from torch_models import torch_or_skip

from detdiff.check.op import RowsDiffer, check_op, examine_op, library_of
from detdiff.errors import (
    CheckSettingInvalid,
    CheckSubjectInvalid,
    DetdiffError,
    NothingToCheck,
    ProbeFunctionFailed,
    ProbeResultUnusable,
    ProbeRowsInvalid,
)

Rows = NDArray[np.float32]


def doubled(x: Rows) -> Rows:
    return 2 * x


def next_up_from(m: int) -> Callable[[Rows], Rows]:
    """The right numbers for fewer than ``m`` rows; from there on element 5 of every row is one ULP higher."""

    def operation(x: Rows) -> Rows:
        y = 2 * x
        if len(x) >= m:
            element = y.reshape(len(x), -1)[:, 5]
            element[:] = np.nextafter(element, np.float32(np.inf))
        return y

    return operation


def leaks(x: Rows) -> Rows:
    """Row 3 gets a part of row 0, where there is one."""
    y = 2 * x
    if len(x) > 3:
        y[3, 1] += y[0, 1] * np.float32(0.001)
    return y


def corrupts_from_row_one(x: Rows) -> Rows:
    y = 2 * x
    y[1:, 0] += 1
    return y


def test_a_function_of_rows_alone_passes_and_says_what_was_compared() -> None:
    found = check_op(doubled, shapes=16)
    assert found.invariant and found.array == "numpy"
    assert found.text().splitlines() == [
        "doubled is invariant to the batch (numpy arrays):",
        "  rows of (16,), float32:",
        "    nothing changes a row's bits: M = 1-8, 3 seeds, 48 outputs of row 0",
    ]
    with pytest.raises(TypeError, match="ask .invariant"):
        bool(found)


def test_the_m_at_which_bits_change_and_the_element_are_named() -> None:
    with pytest.raises(RowsDiffer) as caught:
        check_op(next_up_from(5), shapes=[8, (2, 4)], seeds=2)
    found = caught.value.found
    assert [each.probe.bits_change_at for each in found.shapes] == [(5,), (5,)]
    (element,) = found.shapes[0].differences
    assert (element.kind, element.rows, element.position, element.element) == ("rows", 5, 0, 5)
    assert (element.ulp, element.differing, element.outputs, element.seed) == (1, 1, 8, 0)
    text = str(caught.value)
    assert "depends on the batch, for 2 of 2 shapes of rows (numpy arrays)" in text
    assert "rows of (2, 4), float32:" in text
    assert (
        "M matters: row 0's bits change at M = 5 (alike: 1-4 | 5-8; M = 1-8, 2 seeds; other than alone with seeds 0-1); first at "
        "M = 5, position 0, element 5:" in text
    )
    assert "1 ULP apart (1 of 8 elements differ)" in text


def test_a_leak_is_found_at_its_position_and_by_its_neighbour() -> None:
    found = examine_op(leaks, shapes=4, seeds=2).shapes[0]
    assert found.probe.bits_change_at == ()
    assert [each.positions for each in found.probe.neighbours] == [(3,)] * 5
    kinds = {each.kind: each for each in found.differences}
    assert set(kinds) == {"position", "neighbours"}
    assert (kinds["neighbours"].rows, kinds["neighbours"].position, kinds["neighbours"].element) == (4, 3, 1)
    text = examine_op(leaks, shapes=4, seeds=2).text()
    assert "what is in other rows matters: M = 4, position 3, seed 0-1; M = 5, position 3, seed 0-1;" in text
    assert "and at 2 more M; first at M = 4, position 3, element 1:" in text


def test_a_position_is_found_without_a_neighbour() -> None:
    found = examine_op(corrupts_from_row_one, shapes=4, seeds=2).shapes[0]
    assert [each.kind for each in found.differences] == ["position"]
    assert found.probe.position[0].positions == (1,) and found.probe.neighbours == ()
    assert (found.differences[0].rows, found.differences[0].element) == (2, 0)


def test_a_function_that_is_never_the_same_is_said_to_be() -> None:
    draw = np.random.default_rng(0)
    text = examine_op(lambda x: x + draw.random(dtype=np.float32), shapes=4, rows="1..3", seeds=2).text()
    assert "the same call again differs" in text and "look for a race first" in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_modules_and_functions_of_mlx_are_given_its_arrays(dtype: str) -> None:
    layer = nn.Linear(32, 8)
    layer.set_dtype(getattr(mx, dtype))
    found = examine_op(layer, shapes=32, dtype=dtype, seeds=2)
    assert found.array == "mlx" and found.shapes[0].probe.output_dtype == {
        "float32": "F32",
        "float16": "F16",
    }.get(dtype, "BF16")
    assert found.invariant

    def mixed(x: mx.array) -> mx.array:
        return mx.concatenate([x[:1], x[1:] + x[:1]])

    wrong = examine_op(mixed, shapes=32, dtype=dtype, seeds=2)
    assert wrong.array == "mlx" and not wrong.invariant
    assert {each.kind for each in wrong.shapes[0].differences} == {"position", "neighbours"}


def test_the_library_is_what_a_function_refers_to() -> None:
    weight = mx.ones((4, 4))
    assert library_of(lambda x: x @ weight) == "mlx"
    assert library_of(partial(mx.matmul, weight)) == "mlx"
    assert library_of(nn.RMSNorm(4).__call__) == "mlx"
    assert library_of(doubled) == library_of(np.tanh) == "numpy"

    def outer(x: Any) -> Any:
        return inner(x)

    def inner(x: Any) -> Any:
        return mx.tanh(x)

    assert library_of(outer) == "mlx"


def test_torch_modules_and_functions_are_given_its_arrays() -> None:
    torch = torch_or_skip()
    layer = torch.nn.RMSNorm(16)
    found = check_op(layer, shapes=[16, (3, 16)], rows="1..4", seeds=2)
    assert found.array == "torch"

    def injected(x: Any) -> Any:
        return torch.where(torch.tensor(x.shape[0] > 2), x * (1 + 2**-23), x)

    wrong = examine_op(injected, shapes=16, rows="1..4", seeds=2)
    assert wrong.array == "torch" and wrong.shapes[0].probe.bits_change_at == (3,)
    assert wrong.shapes[0].differences[0].ulp in (1, 2)

    def both(x: Any) -> Any:
        return torch.tensor(mx.array(x))

    with pytest.raises(CheckSettingInvalid, match="refers to mlx and to torch"):
        check_op(both, shapes=4)


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"shapes": []}, NothingToCheck, "There are no shapes"),
        ({"rows": []}, NothingToCheck, "There are no rows"),
        ({"rows": "1"}, ProbeRowsInvalid, "takes 2 to 256"),
        ({"seeds": 1}, ProbeRowsInvalid, "Ask for 2 or more"),
        ({"seeds": [1, 2]}, CheckSettingInvalid, r"seeds is \[1, 2\]; expected how many"),
        ({"rows": 5}, CheckSettingInvalid, "rows are 5; expected text"),
        ({"shapes": 0}, CheckSettingInvalid, "A shape of a row is 0"),
        ({"shapes": [(2, 0)]}, CheckSettingInvalid, r"A shape of a row is \(2, 0\)"),
        ({"dtype": "int8"}, CheckSettingInvalid, "dtype is 'int8'"),
        ({"fn": 3}, CheckSubjectInvalid, "A int cannot be called"),
        ({"fn": lambda x: x[:, :0]}, ProbeResultUnusable, "at least one value"),
        ({"fn": lambda x: x.sum()}, ProbeResultUnusable, "one row for each"),
        ({"fn": lambda x: x.nothing}, ProbeFunctionFailed, "AttributeError"),
    ],
)
def test_nothing_compared_is_never_a_pass(
    asked: dict[str, Any], error: type[DetdiffError], says: str
) -> None:
    given: dict[str, Any] = {"fn": doubled, "shapes": 4, **asked}
    with pytest.raises(error, match=says):
        check_op(given.pop("fn"), **given)
