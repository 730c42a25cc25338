"""An override takes rows of a call onto other paths, and onto those of a call of another number of rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.switch_layers import SwitchLinear, _gather_sort

from detdiff.engines.mlx.taps.experts import ExpertOrder
from detdiff.engines.mlx.taps.kernel_plan import CallSite, KernelPath, Span
from detdiff.engines.mlx.taps.operations import ROW_BY_ROW, Operations
from detdiff.scenario import KernelPlan

LINEAR = CallSite("layers.0.mlp.up_proj", "linear", "decode")
SWITCH = CallSite("layers.0.mlp.switch_mlp.up_proj", "switch", "decode")
ATTENTION = CallSite("layers.0.self_attn.attention", "attention", "decode")


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.array_equal(a, b))


def overridden(*spans: Span, plan: KernelPlan | None = None) -> Operations:
    operations = Operations(plan or KernelPlan())
    operations.chooser.override = lambda place, call, planned: spans
    return operations


def linear() -> nn.Linear:
    module = nn.Linear(64, 48)
    module.weight, module.bias = normal(48, 64, seed=1), normal(48, seed=2)
    return module


def reference(name: str, rows: int | None = None) -> KernelPath:
    return KernelPath(f"reference/{name}", "overridden", rows=rows)


def test_an_override_is_asked_and_a_native_plan_is_then_not_native() -> None:
    operations = overridden(Span(0, 3, KernelPath("native", "")))
    assert not operations.native
    operations.chooser.override = None
    assert operations.native


def test_rows_of_one_call_take_paths_of_their_own() -> None:
    module, x = linear(), normal(1, 7, 64)
    mv, mm = reference("candle-metal/mv"), reference("candle-metal/mm")
    whole = {path: overridden(Span(0, 7, path)).linear.run(LINEAR, module, module, x)[0] for path in (mv, mm)}
    assert not same(whole[mv], whole[mm])
    mixed, taken = overridden(Span(0, 3, mv), Span(3, 7, mm)).linear.run(LINEAR, module, module, x)
    assert same(mixed[:, :3], whole[mv][:, :3]) and same(mixed[:, 3:], whole[mm][:, 3:])
    assert [(one.at, one.made.rows if one.made else None) for one in taken] == [
        (range(0, 3), 3),
        (range(3, 7), 4),
    ]


@pytest.mark.parametrize("kernel", ["mlx-metal/gemv", "candle-metal/mv", "mlx-metal/splitk"])
def test_a_row_alone_can_be_summed_as_one_of_many(kernel: str) -> None:
    module, x = linear(), normal(1, 9, 64)
    together = overridden(Span(0, 9, reference(kernel))).linear.run(LINEAR, module, module, x)[0]
    alone = overridden(Span(0, 1, reference(kernel, rows=9))).linear.run(LINEAR, module, module, x[:, 4:5])[0]
    assert same(alone, together[:, 4:5])


@pytest.mark.parametrize(("rows", "calls"), [(1, [1] * 5), (2, [2, 2, 2]), (5, [5]), (8, [8]), (None, [5])])
def test_a_native_path_can_be_called_with_another_number_of_rows(rows: int | None, calls: list[int]) -> None:
    module, seen = linear(), []

    def native(x: mx.array) -> mx.array:
        seen.append(x.size // 64)
        y: mx.array = module(x)
        return y

    x = normal(1, 5, 64)
    y = overridden(Span(0, 5, KernelPath("native", "", rows=rows))).linear.run(LINEAR, native, module, x)[0]
    assert seen == calls and y.shape == (1, 5, 48) and bool(mx.allclose(y, module(x), atol=1e-5))


def _qkv(batch: int, rows: int, keys: int) -> tuple[mx.array, mx.array, mx.array]:
    q, k, v = (
        normal(batch, 4, rows, 16),
        normal(batch, 2, keys, 16, seed=1),
        normal(batch, 2, keys, 16, seed=2),
    )
    return q, k, v


@pytest.mark.parametrize("profile", [None, "mlx-metal"])
def test_attention_row_by_row_is_what_decoding_would_have_called(profile: str | None) -> None:
    q, k, v = _qkv(1, 5, 12)
    plan = KernelPlan(profile)
    held = overridden(Span(0, 5, KernelPath(ROW_BY_ROW, "")), plan=plan)
    given = {"cache": None, "scale": 0.25, "mask": "causal"}
    y, _ = held.attention.run(ATTENTION, scaled_dot_product_attention, (q, k, v), given)
    for row in range(5):
        end = 12 - 5 + row + 1
        alone = {"cache": None, "scale": 0.25, "mask": None}
        args = (q[:, :, row : row + 1], k[:, :, :end], v[:, :, :end])
        one, _ = Operations(plan).attention.run(ATTENTION, scaled_dot_product_attention, args, alone)
        assert same(y[:, :, row : row + 1], one)


def test_a_padded_slot_attends_to_its_own_keys_only() -> None:
    q, k, v = _qkv(2, 1, 9)
    mask = mx.array([[True] * 9, [False] * 4 + [True] * 5])[:, None, None]
    held = overridden(Span(0, 1, KernelPath(ROW_BY_ROW, "")), plan=KernelPlan("mlx-metal"))
    given = {"cache": None, "scale": 0.25, "mask": mask}
    y, _ = held.attention.run(ATTENTION, scaled_dot_product_attention, (q, k, v), given)
    alone = {"cache": None, "scale": 0.25, "mask": None}
    args = (q[1:], k[1:, :, 4:], v[1:, :, 4:])
    plain = Operations(KernelPlan("mlx-metal"))
    assert same(y[1:], plain.attention.run(ATTENTION, scaled_dot_product_attention, args, alone)[0])


def test_query_rows_of_one_call_take_paths_of_their_own() -> None:
    q, k, v = _qkv(1, 6, 14)
    given = {"cache": None, "scale": 0.25, "mask": "causal"}
    one, two = reference("mlx-metal/sdpa_steel"), KernelPath("native", "")

    def run(*spans: Span) -> mx.array:
        args: Any = (q, k, v)
        return overridden(*spans).attention.run(ATTENTION, scaled_dot_product_attention, args, given)[0]

    mixed = run(Span(0, 2, one), Span(2, 6, two))
    assert same(mixed[:, :, :2], run(Span(0, 6, one))[:, :, :2])
    assert same(mixed[:, :, 2:], run(Span(0, 6, two))[:, :, 2:])


@pytest.mark.parametrize("sort", [False, True])
def test_rows_of_an_expert_call_take_paths_of_their_own(sort: bool) -> None:
    module = SwitchLinear(64, 48, 4, bias=False)
    module.weight = normal(4, 48, 64, seed=3)
    x, experts = (
        normal(1, 6, 64)[:, :, None, None],
        mx.array([[[0, 2], [1, 3], [2, 0], [3, 1], [0, 1], [2, 3]]]),
    )
    order = None
    if sort:
        result = _gather_sort(x, experts)
        order = ExpertOrder.of((x, experts), result)
        x, experts = result[0], result[1]
    mv, mm = reference("candle-metal/mv"), reference("candle-metal/mm")

    def run(*spans: Span) -> mx.array:
        operations = overridden(*spans)
        operations.switch.order = order
        y, _ = operations.switch.run(SWITCH, module, module, (x, experts), {"sorted_indices": sort})
        return (order.rows(y) if order is not None else y).reshape(6, 2, 48)

    mixed, first, second = run(Span(0, 4, mv), Span(4, 12, mm)), run(Span(0, 12, mv)), run(Span(0, 12, mm))
    assert not same(first, second)
    assert same(mixed[:2], first[:2]) and same(mixed[2:], second[2:])
