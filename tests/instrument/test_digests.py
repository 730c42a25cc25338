"""Digests of MLX arrays: straight from memory, by MLX itself and by numpy give one number, whatever the layout."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from runs import Runs, digests, model, scenario
from tiers import examples, some_now

from detdiff.engines.mlx.taps.digests import (
    Jobs,
    device_entries,
    device_rows,
    digest_entries,
    layout_job,
    row_bytes,
)
from detdiff.engines.mlx.taps.forward import DTYPE_NAMES, memory
from detdiff.trace import digest_rows
from detdiff.trace.digest import STORAGE

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# MLX's CPU has no float64 on a device other than the CPU and no 64-bit view of every type; these are what models use.
DTYPES = (
    mx.float32,
    mx.float16,
    mx.bfloat16,
    mx.uint32,
    mx.int32,
    mx.uint8,
    mx.int8,
    mx.uint16,
    mx.int16,
    mx.int64,
    mx.uint64,
    mx.bool_,
)
SPECIAL = {
    2: (0x8000, 0x0000, 0x7E01, 0xFE02, 0x7FC1, 0x0001, 0xFFFF),
    4: (0x80000000, 0, 0x7FC00001, 0xFFC00002, 0x7F800001, 1, 0xFFFFFFFF),
}


def from_bits(raw: NDArray[Any], dtype: mx.Dtype) -> mx.array:
    """An MLX array of these bits, NaN payloads and all."""
    if dtype == mx.bool_:
        return mx.array(raw & 1).astype(mx.bool_)
    return mx.array(raw).view(dtype)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[mx.array, int | None]:
    """An array [slots, ..., rows, ...] in some memory layout, and its row axis (None: one row a slot)."""
    dtype = draw(st.sampled_from(DTYPES))
    rank = draw(st.integers(2, 5))
    shape = draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank))
    shape[-1] = draw(st.sampled_from((0, 1, 2, 3, 4, 5, 7, 16)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole = [n + draw(st.integers(0, 2)) for n in shape]
    steps = [draw(st.sampled_from((1, 1, 2))) for _ in shape]
    order = draw(st.permutations(range(rank)))
    grown = [n * s for n, s in zip(whole, steps, strict=True)]
    raw = rng.integers(0, 1 << (8 * dtype.size), [grown[i] for i in order], np.uint64, endpoint=False)
    raw = raw.astype(UNSIGNED[dtype.size])
    if dtype.size in SPECIAL and raw.size:
        places = rng.integers(0, raw.size, max(1, raw.size // 3))
        raw.reshape(-1)[places] = rng.choice(np.array(SPECIAL[dtype.size], raw.dtype), len(places))
    array = from_bits(raw, dtype)
    # Transposed, sliced, with steps: what models do to what they hand on.
    array = array.transpose([order.index(i) for i in range(rank)])
    array = array[tuple(slice(0, n * s, s) for n, s in zip(shape, steps, strict=True))]
    if draw(st.booleans()):
        array = mx.broadcast_to(array[:1], shape)
    axis = draw(st.sampled_from([None, *range(1, rank - 1)] if rank > 2 else [None, 1]))
    return array, axis


def reference(array: mx.array, axis: int | None) -> NDArray[np.uint64]:
    """Digests uint64 [slots, rows] by detdiff.trace alone, from a plain copy."""
    name = DTYPE_NAMES[array.dtype]
    flat = mx.contiguous(array)
    raw = flat if flat.dtype == mx.bool_ else flat.view(UINTS[array.dtype.size])
    plain = np.array(raw).astype(UNSIGNED[array.dtype.size])
    plain = plain[:, None] if axis is None else np.moveaxis(plain, axis, 1)
    slots, rows = plain.shape[:2]
    width = int(np.prod(plain.shape[2:], dtype=np.int64))
    found = digest_rows(np.ascontiguousarray(plain).reshape(slots * rows, width).view(STORAGE[name]), name)
    return found.reshape(slots, rows)


UINTS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def on_host(array: mx.array, axis: int | None) -> NDArray[np.uint64]:
    where = memory(array)
    job = layout_job(where, axis)
    if job is None:
        array = mx.contiguous(array)
        where = memory(array)
        job = layout_job(where, axis)
        assert job is not None
    rows = 1 if axis is None else array.shape[axis]
    slots, columns = (a.ravel() for a in np.indices((array.shape[0], rows)))
    found = Jobs.of([job], [where.dtype]).digest(slots.astype(np.int64), columns.astype(np.int64))
    return found.reshape(array.shape[0], rows)


@settings(max_examples=examples(150))
@given(arrays())
def test_host_device_and_numpy_agree(drawn: tuple[mx.array, int | None]) -> None:
    array, axis = drawn
    expected = reference(array, axis)
    assert np.array_equal(on_host(array, axis), expected)
    assert np.array_equal(np.asarray(device_rows(array, axis)), expected)


@settings(max_examples=examples(60))
@given(arrays(), st.data())
def test_one_changed_bit_changes_one_digest(drawn: tuple[mx.array, int | None], data: st.DataObject) -> None:
    array, axis = drawn
    if not array.size or array.dtype == mx.bool_:
        return
    flat = np.array(mx.contiguous(array).view(UINTS[array.dtype.size]))
    place = data.draw(st.integers(0, flat.size - 1))
    bit = data.draw(st.integers(0, 8 * array.dtype.size - 1))
    flat.reshape(-1)[place] ^= np.array(1 << bit, np.uint64).astype(flat.dtype)
    changed = from_bits(flat, array.dtype)
    before, after = on_host(array, axis), on_host(changed, axis)
    index = np.unravel_index(place, flat.shape)
    row = (index[0], 0 if axis is None else index[axis])
    differing = np.argwhere(before != after)
    assert differing.tolist() == [list(row)]
    on_device = np.asarray(device_rows(array, axis)) != np.asarray(device_rows(changed, axis))
    assert np.array_equal(on_device, before != after)


@settings(max_examples=examples(60))
@given(
    st.sampled_from((mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8)),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from((1, 2, 3, 4, 5, 8, 16)),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_cache_entries_by_host_device_and_numpy(
    dtype: mx.Dtype, slots: int, heads: int, length: int, width: int, turned: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (slots, length + 2, heads, width) if turned else (slots, heads, length + 2, width + 1)
    raw = rng.integers(0, 1 << (8 * dtype.size), shape, np.uint64).astype(UNSIGNED[dtype.size])
    whole = from_bits(raw, dtype)
    # A cache hands out a slice of a longer buffer; a model may keep rows first.
    array = whole.transpose(0, 2, 1, 3)[:, :, 1:-1] if turned else whole[:, :, :length, :width]
    on_device = np.asarray(device_entries(array))
    for slot in range(slots):
        found = digest_entries(memory(array), slot)
        assert found.shape == (length, heads)
        for head in range(heads):
            expected = reference(array[slot : slot + 1, head], 1)[0]
            assert np.array_equal(found[:, head], expected)
            assert np.array_equal(on_device[slot, :, head], expected)


def test_zero_and_minus_zero_and_dtypes_are_told_apart() -> None:
    zero = mx.zeros((1, 1, 4))
    assert on_host(zero, 1) != on_host(-zero, 1)
    seen = {
        int(on_host(mx.zeros((1, 1, 4 // dtype.size * 2), dtype), 1)[0, 0])
        for dtype in (mx.float32, mx.int32, mx.uint32, mx.float16, mx.bfloat16, mx.uint16, mx.int16)
    }
    assert len(seen) == 7
    assert on_host(mx.zeros((1, 1, 3), mx.bfloat16), 1) != on_host(mx.zeros((1, 1, 4), mx.bfloat16), 1)


@settings(max_examples=examples(100))
@given(st.data())
def test_views_with_one_job_have_the_same_rows(data: st.DataObject) -> None:
    """Arrays whose job is the same share a column, so they must hold the same bytes in every row."""
    base = mx.arange(2 * 4 * 6 * 8, dtype=mx.float32).reshape(2, 4, 6, 8)
    mx.eval(base)
    slots = data.draw(st.integers(1, 2))
    array = base[:slots]
    views: list[tuple[mx.array, int]] = [
        (array, 1),
        (array.reshape(slots, 4, 48), 1),
        (array.transpose(0, 2, 1, 3), 2),
        (array[:, :, :3], 1),
        (array[:, :, 3:], 1),
        (array[..., :4], 1),
        (array[..., ::2], 1),
        (array.transpose(0, 1, 3, 2), 1),
        (array, 2),
        (array.transpose(0, 2, 1, 3), 1),
        (array[:, 1:], 1),
        (array[:, ::2], 1),
        (mx.broadcast_to(array[:, :1], array.shape), 1),
        (array.transpose(0, 3, 1, 2).reshape(slots, 8, 4, 6), 2),
    ]
    mx.eval([view for view, _ in views])
    (a, axis_a), (b, axis_b) = data.draw(st.tuples(st.sampled_from(views), st.sampled_from(views)))
    job_a, job_b = layout_job(memory(a), axis_a), layout_job(memory(b), axis_b)
    rows = min(a.shape[axis_a], b.shape[axis_b])
    equal = a.shape[axis_a] == b.shape[axis_b] and np.array_equal(
        reference(a, axis_a)[:, :rows], reference(b, axis_b)[:, :rows]
    )
    if job_a is not None and job_a == job_b:
        assert np.array_equal(reference(a, axis_a)[:, :rows], reference(b, axis_b)[:, :rows])
    if equal:
        # The numbers in the base are all different: the same rows are the same memory, or a copy of it.
        assert job_a is None or row_bytes(job_a) == a.nbytes // a.shape[0] // a.shape[axis_a]


def test_a_row_of_too_many_pieces_is_copied_first() -> None:
    base = mx.arange(3 * 4**4, dtype=mx.float32).reshape(1, 3, 4, 4, 4, 4)[:, :, ::2, ::2, ::2, ::2]
    assert layout_job(memory(base), 1) is None
    assert np.array_equal(on_host(base, 1), reference(base, 1))


@pytest.mark.parametrize(
    ("arch", "fmt"), some_now([("llama", "bf16"), ("gemma3_text", "f32"), ("qwen3_moe", "q4")], 0, 2)
)
@pytest.mark.parametrize("layout", some_now(["padded", "packed"], 1))
def test_a_trace_does_not_depend_on_who_digests(runs: Runs, arch: str, fmt: str, layout: str) -> None:
    keys = {"arrivals": (0, 2, 5), "prefill_chunk": 9}
    host = runs.record(model(arch, fmt), scenario("continuous", layout, digest="host", **keys))
    device = runs.record(model(arch, fmt), scenario("continuous", layout, digest="device", **keys))
    found = digests(host)
    assert found and found == digests(device)


@pytest.mark.parametrize("arch", ["qwen3_next", "mamba2"])
def test_states_digested_on_the_device_are_the_same(runs: Runs, arch: str) -> None:
    host = runs.record(model(arch), scenario("static", digest="host"))
    device = runs.record(model(arch), scenario("static", digest="device"))
    assert digests(host) == digests(device)
