"""The attention kernels against a scalar statement of their order.

Equality is of bits, except that a NaN equals a NaN: which payload an operation passes on is not part of an order.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from attention_calls import attend, normals, plain, same, takes_sinks
from attention_numbers import exp, exp_fast
from attention_orders import STATEMENTS, Call, Statement, stated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiers import examples, first_of_each, some_now

from detdiff_kernels.attention import ATTENTION
from detdiff_kernels.attention_order import Dealt, Streams, Tiles, blocks
from detdiff_kernels.rounding import DTYPES, rounded

Float32 = NDArray[np.float32]

# Where dtypes, products and exponentials change their behaviour.
EDGES = [0.0, 1.0, 1.5, 2.0**-149, 2.0**-126, 3.4e38, 65504.0, 1e5, 2.0**-24, 1 + 2.0**-7, 88.0, 1e-3]
SPECIALS = [np.inf, np.nan]
# Around the bounds at which simdgroups, rounds and splits change.
OFFSETS = [0, 0, 1, 7, 31, 250, 2030, 4070, 4090, 9000]


@st.composite
def calls(draw: st.DrawFn, name: str) -> Call:
    """Operands of any shape, random normals with edges, or specials, or cancelling halves among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    batch, kv_heads, share = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rows, keys = draw(st.integers(1, 3)), draw(st.integers(1, 90))
    if isinstance(ATTENTION[name].order, Dealt):
        width, value_width = draw(st.sampled_from([(32, 32), (64, 64), (96, 32), (128, 128), (192, 128)]))
        batch, keys = 1, min(keys, 40)
    else:
        width, value_width = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    palette = np.array(EDGES + draw(st.sampled_from([[], [], SPECIALS])), np.float32)
    edges = draw(st.sampled_from([0.0, 0.0, 0.02, 0.5]))

    def some(*shape: int) -> Float32:
        values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 3, shape))
        picked = palette[rng.integers(0, len(palette), shape)] * rng.choice([-1, 1], shape)
        return rounded(np.where(rng.random(shape) < edges, picked, values).astype(np.float32), dtype)

    heads = kv_heads * share
    q, k, v = (
        some(batch, heads, rows, width),
        some(batch, kv_heads, keys, width),
        some(batch, kv_heads, keys, value_width),
    )
    if draw(st.booleans()):
        half = width // 2
        k[..., half : 2 * half] = k[..., :half]
        q[..., half : 2 * half] = -q[..., :half]
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    mask: Any = {"none": None, "causal": "causal"}.get(kind)
    shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, rows)] + [keys]
    if kind == "bool":
        mask = rng.random(shape) < draw(st.sampled_from([0.1, 0.7]))
    if kind == "float":
        mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)).astype(np.float32)
    return Call(
        q,
        k,
        v,
        scale=draw(st.sampled_from([1.0, 0.125, 0.1, 3.0])),
        mask=mask,
        dtype=dtype,
        offset=draw(st.sampled_from(OFFSETS)),
        sinks=some(heads) if takes_sinks(name) and draw(st.booleans()) else None,
    )


def knows_no_padding(name: str) -> bool:
    order = ATTENTION[name].order
    return isinstance(order, Tiles) and order.packed


def stated_packed(statement: Any, call: Call) -> Float32:
    """Every batch entry alone, without the keys in front that none of its rows attends."""
    found = []
    for entry in range(len(call.q)):
        one = replace(call, q=call.q[entry : entry + 1], offset=0)
        lead = 0
        if isinstance(call.mask, np.ndarray):
            whole = np.broadcast_to(call.mask, (len(call.q), *call.q.shape[1:3], call.k.shape[2]))[
                entry : entry + 1
            ]
            attends = (whole if whole.dtype == np.bool_ else whole > -np.inf).any(axis=(0, 1, 2))
            lead = int(attends.argmax())
            one = replace(one, mask=whole[..., lead:])
        keys, values = (array[entry : entry + 1, :, lead:] for array in (call.k, call.v))
        found.append(stated(statement, replace(one, k=keys, v=values)))
    return np.concatenate(found)


def test_every_kernel_has_a_statement() -> None:
    assert STATEMENTS.keys() == ATTENTION.keys()


@pytest.mark.parametrize("name", ATTENTION)
@settings(deadline=None, max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_order(name: str, data: st.DataObject) -> None:
    call = data.draw(calls(name))
    with np.errstate(all="ignore"):
        got = attend(ATTENTION[name], call)
        expected = (
            stated_packed(STATEMENTS[name], call)
            if knows_no_padding(name)
            else stated(STATEMENTS[name], call)
        )
    assert same(got, expected)


def in_front(call: Call, count: int) -> Call:
    """The call with masked keys, that hold anything, in front of its own."""
    batch, heads, rows = call.q.shape[:3]
    keys = call.k.shape[2]

    def longer(array: Float32, seed: int) -> Float32:
        front = normals(*array.shape[:2], count, array.shape[3], seed=seed, dtype=call.dtype)
        return np.concatenate([front, array], axis=2)

    mask: Any = np.ones((1, 1, 1, keys), bool) if call.mask is None else call.mask
    if isinstance(mask, str):
        mask = np.tri(rows, keys, keys - rows, dtype=bool)
    mask = np.broadcast_to(mask, (batch, heads, rows, keys))
    masked = np.full((batch, heads, rows, count), False if mask.dtype == np.bool_ else -np.inf, mask.dtype)
    return replace(
        call,
        k=longer(call.k, 3),
        v=longer(call.v, 4),
        mask=np.concatenate([masked, mask], axis=3),
        offset=0,
    )


@pytest.mark.parametrize("name", ATTENTION)
@settings(deadline=None, max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(data=st.data(), count=st.sampled_from([1, 5, 31, 32, 64, 257, 2047]))
def test_an_offset_is_so_many_masked_keys_in_front(name: str, data: st.DataObject, count: int) -> None:
    call = data.draw(calls(name))
    with np.errstate(all="ignore"):
        shifted = attend(ATTENTION[name], replace(call, offset=count))
        assert same(shifted, attend(ATTENTION[name], in_front(call, count)))


@pytest.mark.parametrize("name", ATTENTION)
def test_an_offset_matters_unless_the_streams_come_round(name: str) -> None:
    call, order = plain(name, 700, "float32"), ATTENTION[name].order
    first = attend(ATTENTION[name], call)
    moved = [attend(ATTENTION[name], replace(call, offset=offset)) for offset in (1, 2, 5)]
    if knows_no_padding(name):
        assert all(same(first, other) for other in moved)
        return
    if not isinstance(order, Streams):
        assert not all(same(first, other) for other in moved)
        return
    # Lanes that halve are a ring: turned by any number, they add the same pairs.
    ring = order.blocks == 32 and order.in_block == 1
    assert all(same(first, other) == ring for other in moved)
    streams = (order.blocks or 64) * order.in_block
    assert same(first, attend(ATTENTION[name], replace(call, offset=streams)))


@pytest.mark.parametrize("name", ATTENTION)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    kernel, call = ATTENTION[name], plain(name, 300, "bfloat16", rows=3, batch=3)
    whole = attend(kernel, call)
    q, k, v = call.q.copy(), call.k.copy(), call.v.copy()
    q[:, :, :2], q[1:], k[1:], v[1:] = np.nan, np.inf, np.nan, 1e30
    q[:, 0], k[:, 1], v[:, 1] = 3.0, np.inf, np.nan
    with np.errstate(all="ignore"):
        other = attend(kernel, replace(call, q=q, k=k, v=v))
    # Batch 0, the head that shares its key head with head 0, the last row.
    assert same(whole[0, 1, 2], other[0, 1, 2])
    if name != "flash-split-kv/attention":
        alone = replace(call, q=call.q[1:2], k=call.k[1:2], v=call.v[1:2])
        assert same(whole[1:2], attend(kernel, alone))


def test_the_splits_of_flash_attention_depend_on_the_batch() -> None:
    kernel = ATTENTION["flash-split-kv/attention"]
    one = plain(kernel.name, 3000, "float32")
    q, k, v = (np.repeat(array, 120, axis=0) for array in (one.q, one.k, one.v))
    many = replace(one, q=q, k=k, v=v)
    assert not same(attend(kernel, one)[0], attend(kernel, many)[0])


@pytest.mark.parametrize("name", ATTENTION)
def test_threads_share_the_rows_and_change_nothing(name: str) -> None:
    call = plain(name, 400, "bfloat16", rows=200)
    whole = attend(ATTENTION[name], replace(call, mask="causal"))
    mask = np.tri(200, 400, 200, dtype=bool)
    for row in (0, 57, 199):
        # The others are masked, so that this call is as large, but only one of its rows is computed.
        alone = np.zeros_like(mask)
        alone[row] = mask[row]
        assert same(whole[:, :, row], attend(ATTENTION[name], replace(call, mask=alone))[:, :, row])


@pytest.mark.parametrize("name", ATTENTION)
def test_masked_keys_never_count(name: str) -> None:
    call = plain(name, 90, "float16", rows=2)
    mask = np.random.default_rng(1).random((1, 1, 2, 90)) < 0.5
    mask[..., 30:60] = False
    mask[0, 0, 1] = False
    clean = attend(ATTENTION[name], replace(call, mask=mask))
    k, v = call.k.copy(), call.v.copy()
    k[:, :, 30:60], v[:, :, 30:60] = np.nan, np.inf
    assert same(clean, attend(ATTENTION[name], replace(call, k=k, v=v, mask=mask)))
    assert (clean[:, :, 1] == 0).all() and not np.signbit(clean[:, :, 1]).any() and clean[:, :, 0].any()


STREAMS = {
    "another number of streams": lambda order: replace(order, blocks=96),
    "a joining in turn": lambda order: replace(order, halving=False),
    "another exponential": lambda order: replace(order, weigh=exp if not order.two else exp_fast),
    "another way to divide": lambda order: replace(
        order, divide="guarded" if order.divide == "reciprocal" else "reciprocal"
    ),
}
BLOCKS = STREAMS | {"fewer streams in a block": lambda order: replace(order, in_block=4)}
TWO_PASS = STREAMS | {
    "partials in float32": lambda order: replace(order, round_partials=False),
    "blocks as products": lambda order: replace(order, chained=False, blocks=64),
}
STEEL = {
    "another tile": lambda order: replace(order, tile=lambda width: 64),
    "keys from the end": lambda order: replace(order, descending=True),
    "a sum in turn": lambda order: replace(order, sums="chain"),
    "another place of the scale": lambda order: replace(
        order, scale="query" if order.scale == "score" else "score"
    ),
    "another exponential": lambda order: replace(order, weigh=exp),
    "a reciprocal": lambda order: replace(order, reciprocal=True),
}
FLASH = {
    "another tile": lambda order: replace(order, tile=lambda width: 64),
    "the other direction": lambda order: replace(order, descending=not order.descending),
    "weights in float32": lambda order: replace(order, round_weights=False),
    "a sum by eights": lambda order: replace(order, sums="eights"),
    "a quotient": lambda order: replace(order, reciprocal=False),
    "another number of splits": lambda order: replace(order, splits=lambda row, tile: 2),
}
UNFUSED = {
    "scores in float32": lambda order: replace(order, round_scores=False),
    "weights in float32": lambda order: replace(order, round_weights=False),
    "fewer threads": lambda order: replace(order, threads=32),
}
MUTATIONS: dict[str, dict[str, Callable[[Any], Statement]]] = {
    "mlx-metal/sdpa_vector": STREAMS,
    "mlx-metal/sdpa_vector_2pass": TWO_PASS,
    "mlx-metal/sdpa_vector_2pass-0.30.3": BLOCKS,
    "mlx-metal/sdpa_steel": STEEL,
    "mlx-metal/sdpa_steel-0.30.6": STEEL,
    "mlx-metal/sdpa_unfused": UNFUSED,
    "mlx-cuda/sdpa_vector": STREAMS | {"the base e": lambda order: replace(order, two=False)},
    "mlx-cuda/sdpa_vector_2pass": BLOCKS,
    "mlx-cuda/sdpa_unfused": UNFUSED,
    "mlx-cuda/sdpa_cudnn": FLASH,
    "candle-metal/sdpa_vector": STREAMS,
    "candle-metal/sdpa_vector_2pass": BLOCKS,
    "candle-metal/sdpa_full": STEEL,
    "ggml-metal/flash_attn_vec": {
        "smaller blocks": lambda order: replace(order, block=16),
        "a joining in turn": lambda order: replace(order, halving=False),
        "fewer workgroups": lambda order: replace(order, workgroups=16),
        "the query in the dtype": lambda order: replace(order, half_query=False),
    },
    "ggml-metal/flash_attn": {
        "smaller tiles": lambda order: replace(order, tile=lambda width: 32),
        "a sum by eights": lambda order: replace(order, sums="eights"),
        "an output in float32": lambda order: replace(order, half_output=False),
        "the query in float16": lambda order: replace(order, query_half=lambda dtype: True),
        "the scale on the score": lambda order: replace(order, scale="score"),
    },
    "flash-split-kv/attention": FLASH,
    "batch-invariant/attention": FLASH,
}


CHANGED = [(name, what) for name, parts in MUTATIONS.items() for what in parts]


@pytest.mark.parametrize(
    ("name", "mutation"),
    some_now(CHANGED, *first_of_each(name for name, _ in CHANGED)),
)
def test_a_changed_order_is_told_apart(name: str, mutation: str) -> None:
    changed = MUTATIONS[name][mutation](STATEMENTS[name])
    # So far behind that FlashAttention has more tiles than splits.
    far = 256 * 300 if name == "flash-split-kv/attention" else 0
    for dtype, seed in product(DTYPES, range(3)):
        call = plain(name, 620, dtype, seed=seed)
        # Queries that float16 and float32 do not hold alike.
        call = replace(call, q=rounded(call.q * np.float32(1.2345e-4), dtype), scale=5e3)
        for offset in {0, far}:
            moved = replace(call, offset=offset)
            if not same(attend(ATTENTION[name], moved), stated(changed, moved)):
                return
    pytest.fail(f"{name} cannot be told from one with {mutation}")


def test_every_kernel_has_mutations() -> None:
    assert MUTATIONS.keys() == ATTENTION.keys()


def test_blocks_follow_the_chip_the_queries_and_the_keys() -> None:
    expected = {
        ("s", 5, 1024): 64,
        ("s", 5, 1025): 128,
        ("s", 4, 9000): 64,
        ("s", 8, 8193): 256,
        ("s", 8, 40000): 512,
        ("s", 8, 70000): 1024,
        ("d", 1, 8192): 128,
        ("d", 2, 8193): 256,
        ("d", 3, 8193): 128,
        ("d", 6, 16384): 512,
        ("d", 6, 65536): 1024,
        ("d", 5, 65536): 128,
        ("g", 3, 5000): 32,
        ("g", 4, 5000): 64,
    }
    assert {call: blocks(*call) for call in expected} == expected


def test_blocks_can_be_chosen() -> None:
    kernel = ATTENTION["mlx-metal/sdpa_vector_2pass"]
    call = plain(kernel.name, 300, "float16")
    few, many = attend(kernel, call, blocks=32), attend(kernel, call, blocks=1024)
    assert not same(few, many)
    assert same(attend(kernel, call), attend(kernel, call, blocks=64))
    order: Any = STATEMENTS[kernel.name]
    assert same(many, stated(replace(order, blocks=1024), call))


def test_no_rows_are_no_rows() -> None:
    for name, kernel in ATTENTION.items():
        call = plain(name, 5, "float32", rows=0)
        assert attend(kernel, call).shape == call.q.shape


def test_choosing_a_kernel_does_not_import_numba() -> None:
    code = "import sys; from detdiff_kernels.attention import ATTENTION; assert ATTENTION and 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_sources_say_what_was_read() -> None:
    for kernel in ATTENTION.values():
        assert kernel.op == "attention" and kernel.tag in ("read", "inferred", "measured")
        assert "inferred" in kernel.source or "closed" in kernel.source
