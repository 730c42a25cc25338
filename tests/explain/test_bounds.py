"""Rounding never leaves its bound, and the bounds say something: random and adversarial operations of every kind."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mlx_lm.models import rope_utils
from mlx_lm.models.activations import precise_swiglu
from operands import BITS, DTYPES, MX, Float64, given, read, rows, weights, widened
from tiers import examples, first_of_each, some_now

from detdiff.engines.mlx.taps.kernel_plan import weight_of
from detdiff.errors import OracleRefused
from detdiff.explain.attention_bounds import AttentionOperation
from detdiff.explain.bounds import Embedding, Linear, Norm, Rope
from detdiff.explain.oracle import Judgement, Operation, judge
from detdiff.explain.roundings import UNIT, Arithmetic, growth
from detdiff_kernels import Dense, Kernel, KernelLibraryError, forced, kernel, kernel_names
from detdiff_kernels.attention import ATTENTION
from detdiff_kernels.rounding import rounded

LINEAR = [name for name in kernel_names() if name not in ATTENTION]
KINDS = ("normal", "wide", "cancelling", "subnormal")
# Of random data, the share of its bound that the worst of an operation's elements must reach.
TELLING = 1e-3


def library(name: str) -> str:
    """What a kernel is of: ``ggml-cuda`` of ``ggml-cuda/mmvq``."""
    return name.partition("/")[0]


class Record:
    """What was judged: how many outputs of each kind, and the largest share of the bound that one reached."""

    def __init__(self) -> None:
        self.outputs: dict[str, int] = defaultdict(int)
        self.tightest: dict[str, float] = defaultdict(float)

    def judged(self, kind: str, operation: Operation, output: object, arithmetic: Arithmetic) -> Judgement:
        found = judge(operation, output, arithmetic)
        assert found.inside, (kind, found)
        self.outputs[kind] += found.elements
        self.tightest[kind] = max(self.tightest[kind], found.worst)
        return found

    def check(self, outputs: int, telling: float = TELLING) -> None:
        """Every kind was judged often enough, and its bound is within a factor of what rounding does."""
        assert self.outputs
        for kind, count in self.outputs.items():
            assert count >= outputs, (kind, count)
            assert self.tightest[kind] > telling, (kind, self.tightest[kind])


@pytest.mark.parametrize("name", some_now(LINEAR, *first_of_each(map(library, LINEAR))[:3]))
def test_reference_kernels_stay_within_the_bound_of_their_order(name: str) -> None:
    """10,000 outputs and more of every kernel, each a sum of its own, in all dtypes and formats that it takes."""
    rng = np.random.default_rng(7)
    record = Record()
    found = kernel(name)
    assert isinstance(found, Kernel)
    for k in (128, 512):
        for dtype in DTYPES:
            for kind in KINDS:
                x = rows(rng, (8, k), dtype, kind)
                for form, weight in weights(rng, 120, k, dtype, kind).items():
                    try:
                        out = found(x, found.stage(weight, dtype))
                    except KernelLibraryError:
                        continue
                    operation = Linear(widened(x), weight, quantised=form != "dense")
                    record.judged("all", operation, out, Arithmetic(f"reference/{name}", dtype))
    record.check(10000, telling=0.01)


@settings(max_examples=examples(60))
@drawn(
    st.sampled_from(LINEAR), st.sampled_from(DTYPES), st.sampled_from(KINDS),
    st.integers(1, 7), st.integers(1, 9), st.integers(1, 700), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape_of_dense_sums(name: str, dtype: str, kind: str, m: int, n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rows(rng, (m, k), dtype, kind), weights(rng, n, k, dtype, "wide")["dense"]
    found = kernel(name)
    assert isinstance(found, Kernel)
    try:
        out = found(x, found.stage(weight, dtype))
    except KernelLibraryError:
        return
    assert judge(Linear(widened(x), weight), out, Arithmetic(f"reference/{name}", dtype)).inside


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_linear_layers(dtype: str) -> None:
    rng = np.random.default_rng(8)
    record = Record()
    for k in (64, 320, 1024):
        for size in (1e-3, 1.0, 30.0):
            layer = nn.Linear(k, 70)
            layer.set_dtype(MX[dtype])
            held = given(rows(rng, (9, k), dtype) * np.float32(size), dtype)
            bias = read(layer.bias)
            dense = Linear(read(held), weight_of(layer), bias)
            arithmetic = Arithmetic("native", dtype)
            record.judged("dense", dense, read(layer(held)), arithmetic)
            record.judged("rows", dense, read(forced.rows(layer, held, mx)), Arithmetic("forced/rows", dtype))
            padded = forced.padded(layer, held, 16, mx)
            record.judged("pad", dense, read(padded), Arithmetic("forced/pad:16", dtype))
            for bits in BITS:
                packed = layer.to_quantized(group_size=64, bits=bits)
                operation = Linear(read(held), weight_of(packed), bias, quantised=True)
                record.judged("affine", operation, read(packed(held)), arithmetic)
            for mode in ("mxfp4", "mxfp8", "nvfp4"):
                packed = layer.to_quantized(mode=mode, group_size=None, bits=None)
                operation = Linear(read(held), weight_of(packed), bias, quantised=True)
                record.judged(mode, operation, read(packed(held)), arithmetic)
    record.check(3000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_embeddings(dtype: str) -> None:
    layer = nn.Embedding(90, 128)
    layer.set_dtype(MX[dtype])
    ids = np.arange(90)
    arithmetic = Arithmetic("native", dtype)
    exact = judge(Embedding(ids, weight_of(layer)), read(layer(mx.array(ids))), arithmetic)
    assert exact.inside and exact.worst == 0
    record = Record()
    for bits in BITS:
        packed = layer.to_quantized(group_size=64, bits=bits)
        operation = Embedding(ids, weight_of(packed), quantised=True)
        record.judged("affine", operation, read(packed(mx.array(ids))), arithmetic)
    record.check(10000, telling=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: str) -> None:
    rng = np.random.default_rng(9)
    record = Record()
    arithmetic = Arithmetic("native", dtype)
    eps = float(np.float32(1e-5))
    for n in (64, 576):
        weight, bias = (given(rows(rng, (n,), dtype), dtype) for _ in range(2))
        for shift, size in ((0.0, 1.0), (5.0, 1.0), (0.0, 1e-3), (300.0, 40.0)):
            x = given((rows(rng, (30, 2, n), dtype) + np.float32(shift)) * np.float32(size), dtype)
            gate = given(rows(rng, (30, 2, n), dtype) * np.float32(8), dtype)
            plain = mx.fast.rms_norm(x, weight, 1e-5)
            record.judged("rms", Norm(read(x), eps, "rms", read(weight)), read(plain), arithmetic)
            more = Norm(read(x), eps, "rms", 1 + read(weight), weight_unit=UNIT[dtype])
            record.judged("one more", more, read(mx.fast.rms_norm(x, 1.0 + weight, 1e-5)), arithmetic)
            layer = Norm(read(x), eps, "layer", read(weight), read(bias))
            record.judged("layer", layer, read(mx.fast.layer_norm(x, weight, bias, 1e-5)), arithmetic)
            gated = Norm(read(x), eps, "rms", read(weight), gate=read(gate))
            record.judged("gated", gated, read(precise_swiglu(x, gate, plain)), arithmetic)
    record.check(10000, telling=0.02)


@settings(max_examples=examples(80))
@drawn(
    st.sampled_from(["rms", "layer"]), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.integers(1, 6),
    st.integers(1, 300), st.integers(-40, 40), st.floats(-100, 100), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape_and_size_of_norms(
    form: str, dtype: str, kind: str, m: int, n: int, power: int, shift: float, seed: int
) -> None:
    """Tiny and huge rows, rows that are nearly constant, rows of one item: whatever the mean square does."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        values = (rows(rng, (m, n), "float32", kind) + np.float32(shift)) * np.float32(2.0**power)
        x = rounded(values.astype(np.float32), dtype)
    if not np.isfinite(x).all():
        return
    weight, bias = rows(rng, (n,), dtype), rows(rng, (n,), dtype)
    held, scale, added = given(x, dtype), given(weight, dtype), given(bias, dtype)
    eps = float(np.float32(1e-6))
    if form == "rms":
        operation, out = Norm(widened(x), eps, "rms", widened(weight)), mx.fast.rms_norm(held, scale, 1e-6)
    else:
        operation = Norm(widened(x), eps, "layer", widened(weight), widened(bias))
        out = mx.fast.layer_norm(held, scale, added, 1e-6)
    assert judge(operation, read(out), Arithmetic("native", dtype)).inside


@pytest.mark.parametrize("dtype", DTYPES)
def test_ropes(dtype: str) -> None:
    rng = np.random.default_rng(10)
    record = Record()
    arithmetic = Arithmetic("native", dtype)
    scaled = {
        "llama3": rope_utils.Llama3RoPE(64, 8192, False, 5e5, {"factor": 8.0}),
        "yarn": rope_utils.YarnRoPE(64, scaling_factor=4.0),
        "su": rope_utils.SuScaledRoPE(64, long_factor=[1 + i / 10 for i in range(32)]),
        "proportional": rope_utils.ProportionalRoPE(64, 32),
    }
    for offset in (0, 1000, 100000):
        x = given(rows(rng, (1, 4, 16, 80), dtype), dtype)
        by_row = read(x)[0].swapaxes(0, 1)
        positions = offset + np.arange(16.0)
        for base, scale, traditional in ((1e4, 1.0, False), (1e6, 1.0, True), (1e4, 0.25, False)):
            turned = nn.RoPE(64, traditional, base, scale)(x, offset)
            operation = Rope(by_row, positions, 64, traditional, base=base, scale=scale)
            record.judged("plain", operation, read(turned)[0].swapaxes(0, 1), arithmetic)
        for name, module in scaled.items():
            operation = Rope(
                by_row, positions, 64, frequencies=read(module._freqs),
                multiplier=float(getattr(module, "mscale", getattr(module, "_scale", 1.0))),
            )  # fmt: skip
            record.judged(name, operation, read(module(x, offset))[0].swapaxes(0, 1), arithmetic)
    record.check(10000, telling=0.02)
    with pytest.raises(OracleRefused, match="no error is published"):
        judge(operation, by_row, Arithmetic("native", dtype, backend="metal"))


@settings(max_examples=examples(40))
@drawn(
    st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.integers(0, 200000),
    st.floats(100, 1e7), st.integers(-20, 10), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape_of_ropes(
    dtype: str, length: int, half: int, traditional: bool, offset: int, base: float, power: int, seed: int
) -> None:
    x = given(
        rows(np.random.default_rng(seed), (1, 2, length, 2 * half + 3), dtype) * np.float32(2.0**power), dtype
    )
    out = nn.RoPE(2 * half, traditional, base)(x, offset)
    operation = Rope(
        read(x)[0].swapaxes(0, 1), offset + np.arange(float(length)), 2 * half, traditional, base=base
    )
    assert judge(operation, read(out)[0].swapaxes(0, 1), Arithmetic("native", dtype)).inside


def _attention(
    rng: np.random.Generator, dtype: str, queries: int, keys: int, size: float, mask: str, sinks: bool
) -> tuple[AttentionOperation, dict[str, object]]:
    """An operation over 4 query and 2 key heads, and the arguments of a kernel's call."""
    q, k, v = (
        rows(rng, (1, heads, length, 64), dtype)
        for heads, length in ((4, queries), (2, keys), (2, keys))
    )  # fmt: skip
    q = rounded(q * np.float32(size), dtype)
    held: object = None
    bias: Float64 = np.zeros((1, queries, keys))
    if mask == "causal":
        held = "causal"
        bias = np.where(np.arange(keys) <= np.arange(keys - queries, keys)[:, None], 0.0, -np.inf)[None]
    elif mask == "bool":
        seen = rng.random((queries, keys)) < 0.7
        seen[:, 0] = True
        held, bias = seen, np.where(seen, 0.0, -np.inf)[None]
    elif mask == "float":
        added = rows(rng, (queries, keys), dtype)
        added[:, 1:][rng.random((queries, keys - 1)) < 0.3] = -np.inf
        held, bias = added, widened(added)[None]
    sink = rows(rng, (4,), dtype) if sinks else None
    operation = AttentionOperation(
        widened(q[0]).swapaxes(0, 1),
        widened(k[0]),
        widened(v[0]),
        0.125,
        bias,
        None if sink is None else widened(sink),
    )
    return operation, {"q": q, "k": k, "v": v, "mask": held, "sinks": sink}


CALLS = [
    (queries, keys, size, mask, sinks)
    for queries, keys in ((1, 1), (1, 37), (5, 40), (3, 300))
    for size in (0.3, 4.0)
    for mask, sinks in (("none", False), ("causal", True), ("bool", False), ("float", True))
]


@pytest.mark.parametrize("name", some_now(ATTENTION, *first_of_each(map(library, ATTENTION))))
def test_reference_attention(name: str) -> None:
    rng = np.random.default_rng(11)
    record = Record()
    for dtype in DTYPES:
        for queries, keys, size, mask, sinks in CALLS:
            operation, call = _attention(rng, dtype, queries, keys, size, mask, sinks)
            try:
                out = ATTENTION[name](
                    call["q"], call["k"], call["v"], 0.125, mask=call["mask"], sinks=call["sinks"], dtype=dtype
                )  # fmt: skip
            except KernelLibraryError:
                continue
            arithmetic = Arithmetic(f"reference/{name}", dtype)
            record.judged(dtype, operation, out[0].swapaxes(0, 1), arithmetic)
    record.check(10000, telling=0.01)


def test_native_attention() -> None:
    rng = np.random.default_rng(12)
    record = Record()
    for dtype in DTYPES:
        for queries, keys, size, mask, sinks in CALLS:
            operation, call = _attention(rng, dtype, queries, keys, size, mask, sinks)
            held = call["mask"]
            if isinstance(held, np.ndarray) and held.dtype != np.bool_:
                held = given(held, dtype)
            elif isinstance(held, np.ndarray):
                held = mx.array(held)
            sink = call["sinks"]
            out = mx.fast.scaled_dot_product_attention(
                *(given(call[side], dtype) for side in "qkv"), scale=0.125, mask=held,
                sinks=None if sink is None else given(sink, dtype),
            )  # fmt: skip
            record.judged(dtype, operation, read(out)[0].swapaxes(0, 1), Arithmetic("native", dtype))
    record.check(10000, telling=0.01)


@settings(max_examples=examples(40))
@drawn(
    st.sampled_from(sorted(ATTENTION)), st.sampled_from(DTYPES), st.integers(1, 6), st.integers(1, 200),
    st.sampled_from([0.1, 1.0, 8.0]), st.sampled_from(["none", "causal", "bool", "float"]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape_of_attention(
    name: str, dtype: str, queries: int, keys: int, size: float, mask: str, seed: int
) -> None:
    keys = max(keys, queries)
    operation, call = _attention(np.random.default_rng(seed), dtype, queries, keys, size, mask, False)
    try:
        out = ATTENTION[name](call["q"], call["k"], call["v"], 0.125, mask=call["mask"], dtype=dtype)
    except KernelLibraryError:
        return
    assert judge(operation, out[0].swapaxes(0, 1), Arithmetic(f"reference/{name}", dtype)).inside


def test_the_example_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bounds.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/bounds.md", "exec"), {})


def test_growth_is_the_product_and_at_most_higham_gamma() -> None:
    for count, unit in ((1, 2.0**-24), (64, 2.0**-11), (200, 2.0**-8)):
        product = (1 + unit) ** count - 1
        gamma = count * unit / (1 - count * unit)
        assert growth((count, unit)) == pytest.approx(product, rel=1e-9)
        assert growth((count, unit)) <= gamma
    assert growth((3, 2.0**-11), (2, 2.0**-24)) == pytest.approx(
        (1 + 2.0**-11) ** 3 * (1 + 2.0**-24) ** 2 - 1
    )
    assert np.isfinite(growth((1000, 2.0**-8)))


def test_a_bound_follows_the_order_of_its_kernel() -> None:
    """Lanes and a tree round a term less often than one chain, and a bound of sums in the dtype is far wider."""
    weight = Dense(np.ones((4, 512), np.float32))
    counts = {
        name: Arithmetic(f"reference/{name}", "float32").sums(weight, 1, quantised=False).float32
        for name in ("mlx-metal/gemv", "mlx-metal/steel", "candle-metal/mm")
    }
    assert counts["mlx-metal/gemv"] < 30 < 512 <= counts["mlx-metal/steel"] <= counts["candle-metal/mm"] + 1
    half = Dense(np.ones((4, 512), np.float16), "float16")
    narrow = Arithmetic("reference/ggml-cuda/mmvf", "float16").sums(half, 1, quantised=False)
    assert narrow.dtype > 0 and Arithmetic("native", "float16").sums(half, 1, quantised=False).dtype == 0


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_native_on_a_gpu_is_the_kernel_that_its_profile_chooses(backend: str) -> None:
    rng = np.random.default_rng(0)
    for form, weight in weights(rng, 64, 256, "bfloat16").items():
        if form not in ("dense", "affine-4"):
            continue
        for count in (1, 2, 64):
            sums = Arithmetic("native", "bfloat16", backend).sums(weight, count, quantised=form != "dense")  # type: ignore[arg-type]
            assert sums.float32 + sums.dtype > 0
            assert sums.flushed == 2.0**-126
