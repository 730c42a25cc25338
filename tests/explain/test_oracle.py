"""The oracle at sites of real models, and injected faults: outside the bound, at the place, and named for what they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from operands import DTYPES, dense, given, quantised, read, rows, widened
from tiers import examples
from tiny import CONFIGS, FORMATS, tiny
from watching import Watching, watched

from detdiff.compare.forwards import KernelCall
from detdiff.engines.mlx.oracle_operations import operation_of
from detdiff.engines.mlx.taps.sites import site_name
from detdiff.errors import OracleRefused
from detdiff.explain.attention_bounds import AttentionOperation
from detdiff.explain.bounds import Copied, Linear
from detdiff.explain.controls.oracle import judge_rows
from detdiff.explain.oracle import Judgement, Scores, compare_sides, judge
from detdiff.explain.origins import OriginRow
from detdiff.explain.roundings import Arithmetic
from detdiff.trace import Site
from detdiff_kernels import Affine, Kernel, Weight, kernel
from detdiff_kernels.rounding import rounded

NATIVE = Arithmetic("native", "float32")


# MLX's product for experts takes float32 only on a CPU.
MODELS = [
    (name, fmt)
    for name in CONFIGS
    for fmt in FORMATS
    if not (fmt == "bf16" and "num_experts" in CONFIGS[name])
]


@pytest.mark.parametrize(("architecture", "fmt"), MODELS)
def test_every_leaf_of_every_architecture_is_inside(architecture: str, fmt: str) -> None:
    loaded = tiny(architecture, fmt)
    watching = watched(loaded.model)
    kinds = set()
    for name, (kind, captured, out, dtype) in watching.seen.items():
        operation = operation_of(loaded, site_name(name), captured)
        found = judge(operation, out, Arithmetic("native", dtype))
        assert found.inside, (name, found)
        kinds.add(kind)
        # Twin: the same site with one element off by a hundredth of the largest is outside, there.
        if kind != "embedding" and not (kind in ("linear", "as_linear", "switch") and dtype == "bfloat16"):
            wrong = out.copy()
            where = tuple(size // 2 for size in out.shape)
            wrong[where] += np.abs(out).max() * 0.05 + 1e-3
            injected = judge(operation, wrong, Arithmetic("native", dtype))
            assert not injected.inside and injected.outside == 1, (name, injected)
            assert np.ravel_multi_index(injected.where, injected.errors.shape) == np.ravel_multi_index(
                where, out.shape
            )
    assert {"linear", "norm", "rope", "attention", "embedding"} <= kinds


def test_composites_and_unknown_sites_are_refused() -> None:
    loaded = tiny("qwen3_moe")
    for site in ("layers.0", "layers.0.mlp", "layers.1.self_attn", "layers.0.mlp.switch_mlp"):
        with pytest.raises(OracleRefused, match="Ask its leaves"):
            operation_of(loaded, site, {"in": np.zeros((1, 64))})
    with pytest.raises(OracleRefused, match="no site"):
        operation_of(loaded, "logits", {"in": np.zeros((1, 64))})
    with pytest.raises(OracleRefused, match="'in'"):
        operation_of(loaded, "layers.0.self_attn.q_proj", {})
    with pytest.raises(OracleRefused, match="float64"):
        Arithmetic("native", "float64")
    with pytest.raises(OracleRefused, match="shape"):
        judge(Copied(np.zeros((2, 3))), np.zeros((2, 2)), NATIVE)


def test_a_module_that_computes_in_its_own_way_is_refused() -> None:
    class Mine(nn.RMSNorm):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) * 2

    class MyLinear(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) + 1

    loaded = tiny("llama")
    loaded.model.model.norm = Mine(64)
    loaded.model.model.layers[0].mlp.up_proj = MyLinear(64, 128)
    with pytest.raises(OracleRefused, match="Mine"):
        operation_of(loaded, "norm", {"in": np.zeros((1, 64))})
    with pytest.raises(OracleRefused, match="MyLinear"):
        operation_of(loaded, "layers.0.mlp.up_proj", {"in": np.zeros((1, 64))})


def test_what_a_cache_holds_must_be_the_same_bits() -> None:
    """Case 6: 1e-6 of a neighbour's key; and a changed sign of zero."""
    rng = np.random.default_rng(0)
    loaded = tiny("llama")
    keys = widened(rows(rng, (2, 12, 16), "float32"))
    keys[1, 3, 4] = 0.0
    operation = operation_of(loaded, "layers.0.self_attn.cache.write", {"expected": keys})
    assert judge(operation, keys, NATIVE).inside
    leaked = keys.copy()
    leaked[0, 7] += 1e-6 * keys[1, 7]
    found = judge(operation, leaked.astype(np.float32), NATIVE)
    assert not found.inside and found.where[:2] == (0, 7)
    negative = keys.copy()
    negative[1, 3, 4] = -0.0
    assert judge(operation, negative, NATIVE).where == (1, 3, 4)


def _leaf(watching: Watching, ending: str) -> tuple[str, tuple[str, dict[str, Any], Any, str]]:
    return next((name, seen) for name, seen in watching.seen.items() if name.endswith(ending))


@settings(max_examples=examples(15))
@drawn(st.sampled_from(FORMATS), st.integers(1, 12), st.integers(0, 1000))
def test_rope_rows_zeroed_and_wrong_offsets(fmt: str, length: int, seed: int) -> None:
    """Cases 9 and 14: rows after the first are zero; rows take another row's offset."""
    loaded = tiny("llama", fmt, seed=seed % 3)
    name, (_, captured, out, dtype) = _leaf(watched(loaded.model, length), "rope")
    arithmetic = Arithmetic("native", dtype)
    operation = operation_of(loaded, name, captured)
    assert judge(operation, out, arithmetic).inside
    if length > 1:
        wrong = out.copy()
        wrong[1:] = 0
        found = judge(operation, wrong, arithmetic)
        assert not found.inside and found.where[0] > 0
        assert not np.any(found.errors[0] > 1e-2 * np.abs(out).max())
        assert found.precision_name in ("none", "bfloat16")
    for apart in (1, 9):
        moved = operation_of(loaded, name, {**captured, "positions": captured["positions"] + apart})
        assert not judge(moved, out, arithmetic).inside


@pytest.mark.parametrize("fmt", FORMATS)
def test_columns_that_are_not_written(fmt: str) -> None:
    """Case 10: the last columns of a linear layer stay zero."""
    loaded = tiny("qwen2", fmt)
    name, (_, captured, out, dtype) = _leaf(watched(loaded.model, 4), "lm_head")
    operation = operation_of(loaded, name, captured)
    wrong = out.copy()
    wrong[:, 64:] = 0
    found = judge(operation, wrong, Arithmetic("native", dtype))
    assert not found.inside and found.where[-1] >= 64
    beyond = found.errors > np.abs(out).max() * 0.02
    assert not beyond[:, :64].any() and beyond[:, 64:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_wrong_head_of_a_quantised_cache(dtype: str) -> None:
    """Case 11: scores of quantised keys come from the next head."""
    rng = np.random.default_rng(3)
    q, k, v = (rows(rng, (1, heads, length, 64), dtype) for heads, length in ((4, 3), (2, 20), (2, 20)))
    held = [mx.quantize(given(side, dtype), group_size=32, bits=8) for side in (k, v)]
    plain: list[Any] = [
        tuple(np.array(a.astype(mx.float32) if a.dtype != mx.uint32 else a)[0] for a in side) for side in held
    ]
    captured = {
        "in": widened(q[0]).swapaxes(0, 1), "k": plain[0], "v": plain[1], "bits": 8, "group_size": 32, "scale": 0.125,
        "mask": None,
    }  # fmt: skip
    loaded = tiny("llama")
    operation = operation_of(loaded, "layers.0.self_attn.attention", captured)

    def run(keys: Any) -> Any:
        out = quantized_scaled_dot_product_attention(
            given(q, dtype), keys, tuple(held[1]), 0.125, None, group_size=32, bits=8
        )  # fmt: skip
        return read(out)[0].swapaxes(0, 1)

    arithmetic = Arithmetic("native", dtype)
    right = judge(operation, run(tuple(held[0])), arithmetic)
    assert right.inside and right.worst > 0
    wrong = judge(operation, run(tuple(part[:, ::-1] for part in held[0])), arithmetic)
    # Sums in 16 bits may be off by more than the heads differ; the error still is no rounding of float32 sums.
    assert not wrong.inside or dtype != "float32"
    assert wrong.float32_units > 20 * right.float32_units


def _changed(weight: Affine, what: str) -> Affine:
    packed, scales, biases = (array.copy() for array in (weight.packed, weight.scales, weight.biases))
    if what == "transposed group":
        words = weight.group_size * weight.bits // 32
        packed[3, :words] = packed[3, :words][::-1]
    elif what == "swapped scale":
        scales[3, [0, 1]] = scales[3, [1, 0]]
    else:
        biases[3, 1] = -biases[3, 1]
    return Affine(packed, scales, biases, weight.bits, weight.group_size)


@pytest.mark.parametrize(
    "name", ["mlx-metal/qmv_fast", "mlx-metal/qmm_t", "ggml-metal/mv", "candle-metal/mm"]
)
@pytest.mark.parametrize("what", ["transposed group", "swapped scale", "negative minimum"])
def test_faults_in_quantised_weights(name: str, what: str) -> None:
    rng = np.random.default_rng(4)
    weight = quantised(rows(rng, (16, 128), "float32"), 4, 32, "float32")
    x = rows(rng, (8, 128), "float32")
    found = kernel(name)
    assert isinstance(found, Kernel)
    operation = Linear(widened(x), weight, quantised=True)
    arithmetic = Arithmetic(f"reference/{name}", "float32")
    assert judge(operation, found(x, found.stage(weight)), arithmetic).inside
    wrong = judge(operation, found(x, found.stage(_changed(weight, what))), arithmetic)
    assert not wrong.inside and wrong.where[1] == 3
    assert wrong.errors[:, 3].max() > 20 * np.delete(wrong.errors, 3, axis=1).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_bias(dtype: str) -> None:
    x = rows(np.random.default_rng(5), (4, 64), "float32")
    weight = dense(rows(np.random.default_rng(6), (32, 64), dtype), dtype)
    bias = np.full(32, 2.0)
    without = read(given(x, dtype) @ given(weight.floats(), dtype).T)
    held = read(given(x, dtype))
    assert judge(Linear(held, weight), without, Arithmetic("native", dtype)).inside
    assert not judge(Linear(held, weight, bias), without, Arithmetic("native", dtype)).inside


def test_nan_and_infinity_where_float64_has_none() -> None:
    rng = np.random.default_rng(6)
    x, weight = rows(rng, (3, 64), "float32"), dense(rows(rng, (8, 64), "float32"), "float32")
    operation = Linear(widened(x), weight)
    out = widened(x) @ weight.floats().T.astype(np.float64)
    for value in (np.nan, np.inf):
        wrong = out.copy()
        wrong[1, 5] = value
        found = judge(operation, wrong, NATIVE)
        assert (found.outside, found.not_finite, found.where) == (1, 1, (1, 5))
    # Where the dtype cannot hold the output, infinity is rounding.
    large = Linear(widened(x) * 1e4, weight)
    with np.errstate(over="ignore"):
        half = rounded((out * 1e4).astype(np.float32), "float16")
    assert np.isinf(half).any()
    assert judge(large, half, Arithmetic("native", "float16")).inside
    # And where float64 has a NaN itself, NaN is right.
    poisoned = x.copy()
    poisoned[0, 0] = np.nan
    assert judge(Linear(widened(poisoned), weight), widened(poisoned) @ weight.floats().T, NATIVE).inside


def test_a_masked_value_counts_nothing_and_a_row_without_keys_must_be_finite() -> None:
    rng = np.random.default_rng(7)
    q, k, v = (widened(rows(rng, (heads, 6, 16), "float32")) for heads in (4, 2, 2))
    v[1, 5] = np.nan
    seen = np.ones((6, 6), np.bool_)
    seen[:, 5] = False
    seen[2] = False
    loaded = tiny("llama")
    captured = {"in": q.swapaxes(0, 1), "k": k, "v": v, "mask": seen, "scale": 0.25}
    operation = operation_of(loaded, "layers.0.self_attn.attention", captured)
    exact = operation.bounded(NATIVE).exact
    assert np.isfinite(exact).all()
    assert judge(operation, exact, NATIVE).inside
    for row in (0, 2):
        wrong = exact.copy()
        wrong[row] = np.nan
        found = judge(operation, wrong, NATIVE)
        assert not found.inside and found.where[0] == row and found.not_finite == wrong[row].size


def _summed(x: Any, weight: Weight, path: str) -> Any:
    found = kernel(path)
    assert isinstance(found, Kernel)
    return found(x, found.stage(weight))


def _in_bfloat16(x: Any, w: Any) -> Any:
    total = np.zeros((len(x), len(w)), np.float32)
    for i in range(x.shape[1]):
        total = rounded(total + x[:, i : i + 1] * w[:, i], "bfloat16")
    return total


@settings(max_examples=examples(20))
@drawn(
    st.sampled_from([64, 256, 1024]),
    st.integers(2, 8),
    st.sampled_from(DTYPES[:1] + DTYPES[2:]),
    st.integers(0, 10**6),
)
def test_sums_in_low_precision_are_named_by_side(k: int, m: int, dtype: str, seed: int) -> None:
    """Case 4: one path accumulates in bfloat16."""
    rng = np.random.default_rng(seed)
    x, w = rows(rng, (m, k), dtype), rows(rng, (48, k), dtype)
    operation = Linear(widened(x), dense(w, dtype))
    arithmetic = Arithmetic("reference/batch-invariant/mm", dtype)
    found = kernel("batch-invariant/mm")
    assert isinstance(found, Kernel)
    right = judge(operation, found(x, found.stage(operation.weight, dtype)), arithmetic)
    wrong = judge(operation, _in_bfloat16(x, w), arithmetic)
    assert right.inside and not wrong.inside
    assert right.float32_units <= 1 < wrong.float32_units
    assert wrong.precision_name == "bfloat16" and right.precision_name in ("float32", "exact")
    sides = compare_sides(right, wrong)
    assert sides.nearer == "a" and sides.ratio < 0.5
    assert compare_sides(wrong, right).nearer == "b"


@settings(max_examples=examples(20))
@drawn(st.sampled_from([64, 256, 1024]), st.integers(2, 8), st.integers(0, 10**6))
def test_inputs_in_low_precision_are_named_as_precision(k: int, m: int, seed: int) -> None:
    """Case 5: inputs rounded to 11 significant bits: the error's scale is not that of float32 sums in any order."""
    rng = np.random.default_rng(seed)
    x, w = rows(rng, (m, k), "float32"), rows(rng, (48, k), "float32")
    operation = Linear(widened(x), dense(w, "float32"))
    cut = ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    arithmetic = Arithmetic("reference/mlx-metal/gemv", "float32")
    wrong = judge(operation, _summed(cut, operation.weight, "mlx-metal/gemv"), arithmetic)
    assert not wrong.inside and wrong.precision_name == "float16 or tf32"
    assert 2.0**-13 < wrong.precision < 2.0**-10
    for path in ("mlx-metal/gemv", "mlx-metal/steel"):
        other = judge(
            operation, _summed(x, operation.weight, path), Arithmetic(f"reference/{path}", "float32")
        )
        assert other.inside and other.precision_name == "float32"


def test_one_element_decides_nothing() -> None:
    """A single large error on one side, or a fault in few elements, is not a nearer side; a clear lead of many is."""
    rng = np.random.default_rng(8)
    x, w = rows(rng, (4, 256), "float32"), rows(rng, (32, 256), "float32")
    operation = Linear(widened(x), dense(w, "float32"))
    exact = operation.bounded(NATIVE).exact
    noise = rng.standard_normal((2, *exact.shape)) * 1e-6

    def side(values: Any) -> Judgement:
        return judge(operation, values, NATIVE)

    assert compare_sides(side(exact + noise[0]), side(exact + noise[1])).nearer == "equal"
    spoiled = exact + noise[0]
    spoiled[0, 0] += 1.0
    assert compare_sides(side(spoiled), side(exact + noise[1])).nearer == "equal"
    assert compare_sides(side(exact + noise[0]), side(exact + 3 * noise[1])).nearer == "a"
    assert compare_sides(side(exact), side(exact)).nearer == "equal"
    with pytest.raises(OracleRefused, match="two outputs of one operation"):
        compare_sides(side(exact), judge(Copied(np.zeros(3)), np.zeros(3), NATIVE))


def test_each_side_is_counted_by_its_own_bound_where_they_read_other_keys() -> None:
    """Attention over a cache that is not recorded: a's small fault is not lost in the bound of what b was given."""
    rng = np.random.default_rng(9)
    q, keys, values = (rng.standard_normal((1, n, 16)) for n in (1, 4, 4))
    small, large = (
        AttentionOperation(q, keys, values * size, 0.25, np.zeros((1, 1, 4))) for size in (1.0, 1e8)
    )
    given = {"a": small, "b": large}
    site = Site("layers.0.self_attn.attention", "attention", 0, ("in",), ("out",))
    call = KernelCall(1, 1, "native", "")
    origin = OriginRow(site, "leaf", "r", 3, 0, 0, 0, 0, call, call)

    def side(name: str, fault: float) -> Any:
        out = given[name].bounded(NATIVE).exact + fault
        return SimpleNamespace(
            name=name,
            output=lambda site, rows: (out, "float32"),
            trace=SimpleNamespace(header={"environment": {}}),
        )

    engine = SimpleNamespace(operation=lambda site, side, request, rows, asked: given[side.name])
    case: Any = SimpleNamespace(engine=lambda name: engine, scenario=lambda name: None)
    for fault, outside in ((0.0, 0), (0.1, 1)):
        scores = Scores(1)
        judge_rows(case, [side("a", fault), side("b", 0.0)], [origin], scores)
        found = scores.detail("")
        assert (found["outside_a"], found["outside_b"]) == (outside, 0)


def test_json_holds_no_number_that_json_lacks() -> None:
    import json

    found = judge(Copied(np.zeros(3)), np.array([0.0, np.nan, 1.0]), NATIVE)
    text = json.dumps(found.as_json(), allow_nan=False)
    assert json.loads(text)["outside"] == 2
