"""Linear, expert and attention calls on reference kernels: what the kernels are given, and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear, _gather_sort
from numpy.typing import NDArray
from profiles import write_profile
from tiers import examples

from detdiff.engines.mlx.taps.kernel_plan import CallSite, weight_of
from detdiff.engines.mlx.taps.operations import Operations
from detdiff.engines.mlx.taps.tapping import TAPPED
from detdiff.errors import KernelPlanError
from detdiff.scenario import KernelPlan, PathRule
from detdiff_kernels import Affine, Dense, kernel
from detdiff_kernels.rounding import rounded

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
LINEAR = CallSite("layers.0.mlp.up_proj", "linear", "decode")
SWITCH = CallSite("layers.0.mlp.switch_mlp.up_proj", "switch", "decode")


def asked(path: str) -> Operations:
    return Operations(KernelPlan(rules=(PathRule(path=path),)))


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b))


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dense_weight_is_not_copied(dtype: str) -> None:
    module = nn.Linear(64, 48, bias=False)
    module.weight = normal(48, 64, dtype=DTYPES[dtype])
    mx.eval(module.parameters())
    first, second = weight_of(module), weight_of(module)
    assert isinstance(first, Dense) and isinstance(second, Dense)
    assert first.dtype == dtype and address(first.data) == address(second.data)
    assert np.array_equal(first.floats(), np.array(module.weight.astype(mx.float32)))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packed_codes_are_not_copied_and_mean_what_mlx_means(bits: int) -> None:
    module = nn.QuantizedLinear(64, 48, bias=False, group_size=32, bits=bits)
    mx.eval(module.parameters())
    weight, again = weight_of(module), weight_of(module)
    assert isinstance(weight, Affine) and isinstance(again, Affine)
    assert address(weight.packed) == address(again.packed)
    whole = mx.dequantize(module.weight, module.scales, module.biases, group_size=32, bits=bits)
    assert np.allclose(weight.floats(), np.array(whole), rtol=1e-6, atol=1e-7)


def test_another_mode_is_unpacked() -> None:
    module = nn.QuantizedLinear(64, 48, bias=False, group_size=32, bits=4, mode="mxfp4")
    weight = weight_of(module)
    whole = mx.dequantize(module.weight, module.scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
    assert isinstance(weight, Dense) and np.array_equal(weight.floats(), np.array(whole))


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("given_dtype", DTYPES)
def test_the_output_has_the_dtype_of_the_native_one(held: str, given_dtype: str) -> None:
    module = nn.Linear(64, 48)
    module.set_dtype(DTYPES[held])
    x = normal(2, 3, 64, dtype=DTYPES[given_dtype])
    y, (taken,) = asked("candle-metal/mv").linear.run(LINEAR, module, module, x)
    assert y.dtype == module(x).dtype and y.shape == (2, 3, 48)
    assert taken.path == "reference/candle-metal/mv" and (taken.rows, taken.second_last) == (6, 3)
    assert np.allclose(np.array(y.astype(mx.float32)), np.array(module(x).astype(mx.float32)), atol=0.05)


def test_a_class_that_computes_in_its_own_way_stays_native(tmp_path: Path) -> None:
    class Doubling(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    module = Doubling(64, 48)
    x = normal(1, 1, 64)
    y, (taken,) = Operations(KernelPlan("candle-metal")).linear.run(LINEAR, module, module, x)
    assert taken.path == "native" and "Doubling computes in its own way" in taken.rule
    assert taken.rule.startswith("candle-metal: second-to-last dimension 1 -> mv; not taken") and same(
        y, module(x)
    )
    with pytest.raises(KernelPlanError, match="Doubling computes in its own way"):
        asked("candle-metal/mv").linear.run(LINEAR, module, module, x)
    # The class that taps put in front of a module's own is none of these.
    tapped = nn.Linear(64, 48)
    tapped.__class__ = type("Linear", (nn.Linear,), {TAPPED: True, "__call__": nn.Linear.__call__})
    _, (taken,) = asked("candle-metal/mv").linear.run(LINEAR, tapped, tapped, x)
    assert taken.path == "reference/candle-metal/mv"


@settings(max_examples=examples(25))
@given(st.integers(1, 3), st.integers(1, 9))
def test_each_part_of_the_rows_takes_its_own_kernel(tmp_path_factory: Any, slots: int, columns: int) -> None:
    name = write_profile(
        tmp_path_factory.mktemp("p") / "fours.toml",
        {"kernel": "candle-metal/mm", "op": "linear", "whole": 4},
        {"kernel": "candle-metal/mv", "op": "linear"},
    )
    module = nn.Linear(64, 48)
    x = normal(slots, columns, 64, seed=slots * 16 + columns)
    rows = slots * columns
    y, taken = Operations(KernelPlan(name)).linear.run(LINEAR, module, module, x)
    whole = rows - rows % 4
    expected = []
    for path, first, last in (("candle-metal/mm", 0, whole), ("candle-metal/mv", whole, rows)):
        part = asked(path).linear.run(LINEAR, module, module, x.reshape(1, rows, 64)[:, first:last])[0]
        expected.append(part)
    assert same(y.reshape(1, rows, 48), mx.concatenate(expected, axis=1))
    found = {one.path: one.at or range(rows) for one in taken}
    wanted = {"reference/candle-metal/mm": range(0, whole), "reference/candle-metal/mv": range(whole, rows)}
    assert found == {path: run for path, run in wanted.items() if run}
    assert {(one.rows, one.second_last) for one in taken} == {(rows, columns)}


def switch(experts: int, bits: int | None, bias: bool = False) -> SwitchLinear | QuantizedSwitchLinear:
    mx.random.seed(experts)
    dense = SwitchLinear(64, 48, experts, bias=bias)
    if bias:
        dense.bias = normal(experts, 48)
    return dense if bits is None else dense.to_quantized(group_size=32, bits=bits)


def by_hand(module: Any, x: mx.array, experts: mx.array, name: str, dtype: str) -> NDArray[np.float32]:
    """Every row [k, 1, D] alone through the kernel, with its expert's weight dequantised by MLX's own layer."""
    reference = kernel(name)
    given = np.array(x.astype(mx.float32))
    made = np.empty((*experts.shape, 1, 48), np.float32)
    for place in np.ndindex(*experts.shape):
        row = given[place if given.shape[: len(place)] == experts.shape else (*place[:-1], 0)]
        expert = int(experts[place])
        staged = reference.stage(weight_of(module, expert), dtype)
        made[place] = reference(np.ascontiguousarray(row), staged)
        if "bias" in module:
            made[place] = rounded(made[place] + np.array(module.bias[expert].astype(mx.float32)), dtype)
    return made


@settings(max_examples=examples(20))
@given(
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from((None, 4)),
    st.sampled_from(("float32", "bfloat16")),
    st.booleans(),
)
def test_a_row_goes_to_its_experts_weight(
    slots: int, columns: int, each: int, bits: int | None, dtype: str, bias: bool
) -> None:
    module = switch(4, bits, bias)
    module.set_dtype(DTYPES[dtype])
    x = normal(slots, columns, 1, 1, 64, seed=slots + 8 * columns, dtype=DTYPES[dtype])
    experts = mx.random.randint(0, 4, (slots, columns, each), key=mx.random.key(columns))
    operations = asked("candle-metal/mv")
    y, (taken,) = operations.switch.run(SWITCH, module, module, (x, experts), {})
    assert y.dtype == DTYPES[dtype] and taken.path == "reference/candle-metal/mv"
    assert (taken.rows, taken.second_last) == (slots * columns * each, 1)
    expected = by_hand(module, x, experts, "candle-metal/mv", dtype)
    assert np.array_equal(np.array(y.astype(mx.float32)), expected)
    # The same rows in mlx-lm's order by expert.
    gathered, chosen, back = _gather_sort(x, experts)
    ordered, _ = operations.switch.run(SWITCH, module, module, (gathered, chosen), {"sorted_indices": True})
    assert np.array_equal(np.array(ordered[back].astype(mx.float32)).reshape(expected.shape), expected)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("path", ["rows", "pad:1", "pad:7", "pad:64"])
@pytest.mark.parametrize("in_order", [False, True])
def test_forced_paths_of_experts_give_the_bits_of_the_native_one(
    bits: int | None, path: str, in_order: bool
) -> None:
    module = switch(4, bits, bias=True)
    x, experts = normal(2, 3, 1, 1, 64), mx.random.randint(0, 4, (2, 3, 2), key=mx.random.key(5))
    if in_order:
        x, experts, _ = _gather_sort(x, experts)
    calls: list[tuple[int, ...]] = []

    def native(*args: Any, **kw: Any) -> mx.array:
        calls.append(tuple(args[1].shape))
        return module(*args, **kw)

    y, (taken,) = asked(path).switch.run(SWITCH, native, module, (x, experts), {"sorted_indices": in_order})
    assert same(y, module(x, experts, sorted_indices=in_order))
    assert taken.path == f"forced/{path}" and taken.rows == 12
    shape = tuple(experts.shape)
    assert calls == {"rows": [(1,)] * 12, "pad:64": [(64,)]}.get(path, [shape])


ATTENTION = CallSite("layers.0.self_attn.attention", "attention", "decode")
SDPA = "candle-metal/sdpa_vector"


def masks(batch: int, queries: int, keys: int, dtype: mx.Dtype) -> dict[str, Any]:
    seen = mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)[None]
    return {
        "none": None,
        "causal": "causal",
        "bool": mx.broadcast_to(seen, (batch, 1, queries, keys)),
        "added": mx.where(seen, mx.array(0.0), mx.array(-mx.inf)).astype(dtype),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 7), (2, 3, 9)])
def test_attention_gets_what_the_model_gives(
    dtype: str, kind: str, batch: int, queries: int, keys: int
) -> None:
    # As models have them: heads moved to the front, keys cut out of a longer cache.
    q = normal(batch, queries, 4, 32, seed=1, dtype=DTYPES[dtype]).transpose(0, 2, 1, 3)
    k = normal(batch, 2, 16, 32, seed=2, dtype=DTYPES[dtype])[:, :, :keys]
    v = normal(batch, 2, 16, 32, seed=3, dtype=DTYPES[dtype])[:, :, :keys]
    mask = masks(batch, queries, keys, DTYPES[dtype])[kind]
    y, taken = asked(SDPA).attention.run(
        ATTENTION, mx.fast.scaled_dot_product_attention, (q, k, v, None, 0.25, mask), {}
    )
    assert taken[:3] == (batch * queries, queries, f"reference/{SDPA}")
    held: Any = (
        mask
        if mask is None or isinstance(mask, str)
        else np.array(mask if kind == "bool" else mask.astype(mx.float32))
    )
    plain = [np.array(array.astype(mx.float32)) for array in (q, k, v)]
    expected = kernel(SDPA)(*plain, 0.25, mask=held, dtype=dtype)  # type: ignore[operator]
    assert y.dtype == DTYPES[dtype] and np.array_equal(np.array(y.astype(mx.float32)), expected)
    native = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
    assert bool(
        mx.allclose(
            y.astype(mx.float32), native.astype(mx.float32), atol=1e-5 if dtype == "float32" else 0.02
        )
    )


def test_what_a_kernel_does_not_take_stays_native_and_says_why(tmp_path: Path) -> None:
    name = write_profile(tmp_path / "a.toml", {"kernel": SDPA, "op": "attention"})
    q, k = normal(1, 4, 1, 32), normal(1, 2, 7, 32)
    packed = mx.quantize(k, group_size=32, bits=8)
    answer = mx.zeros((1, 4, 1, 32))
    cases = {
        "quantised": ((q, packed, packed, None, 0.25, None), {}),
        "sinks": ((q, k, k, None, 0.25, None), {"sinks": mx.zeros(4)}),
    }
    for word, (args, kw) in cases.items():
        y, taken = Operations(KernelPlan(name)).attention.run(ATTENTION, lambda *_, **__: answer, args, kw)
        assert y is answer and taken.path == "native"
        assert "not taken, so native" in taken.rule and word in taken.rule
        with pytest.raises(KernelPlanError, match=word):
            asked(SDPA).attention.run(ATTENTION, lambda *_, **__: answer, args, kw)


def test_the_facts_of_attention_are_those_of_the_padded_batch() -> None:
    seen: list[Any] = []
    operations = Operations(KernelPlan("candle-metal"))
    operations.chooser.choose = lambda place, call: seen.append(call) or ()  # type: ignore[method-assign,func-returns-value]
    q, k = normal(3, 8, 2, 16), normal(3, 4, 21, 16)
    mask = mx.ones((3, 1, 2, 21), mx.bool_)
    with pytest.raises(IndexError):
        operations.attention.run(ATTENTION, lambda *_: q, (q, k, k), {"scale": 1.0, "mask": mask})
    (call,) = seen
    assert (call.op, call.rows, call.query, call.keys, call.batch) == ("attention", 2, 2, 21, 3)
    assert (call.head_dim, call.heads, call.kv_heads, call.mask, call.dtype) == (16, 8, 4, "array", "float32")
    assert call.names()["padded"] is True


def test_a_kernel_gets_what_the_profile_hands_it() -> None:
    """How many blocks two passes take depends on the chip, which the operands do not say."""
    q, k, v = normal(1, 4, 1, 64, seed=1), normal(1, 2, 1500, 64, seed=2), normal(1, 2, 1500, 64, seed=3)
    plain = [np.array(array) for array in (q, k, v)]
    outputs = {}
    for letter, blocks in (("s", 64), ("d", 128)):
        plan = KernelPlan(f"mlx-metal:letter={letter}")
        y, taken = Operations(plan).attention.run(
            ATTENTION, lambda *_, **__: None, (q, k, v, None, 0.125, None), {}
        )
        assert taken.path == "reference/mlx-metal/sdpa_vector_2pass" and f"blocks {blocks}" in taken.rule
        expected = kernel("mlx-metal/sdpa_vector_2pass")(*plain, 0.125, blocks=blocks)  # type: ignore[operator, call-arg]
        assert np.array_equal(np.array(y), expected)
        outputs[letter] = np.array(y)
    assert not np.array_equal(outputs["s"], outputs["d"])
