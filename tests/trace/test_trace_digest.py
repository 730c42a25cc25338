from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from detdiff.trace import (
    B_DTYPE,
    B_LENGTH,
    DTYPE_CODES,
    coefficients,
    combine_entries,
    digest_rows,
    head_weight,
    position_weight,
    splitmix64,
)
from detdiff.trace.digest import STORAGE

MASK = (1 << 64) - 1
DTYPES = st.sampled_from(sorted(DTYPE_CODES))


def splitmix_by_hand(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def digest_by_hand(raw: bytes, dtype: str) -> int:
    padded = raw + b"\0" * (-len(raw) % 4)
    total = B_DTYPE * DTYPE_CODES[dtype] + B_LENGTH * len(raw)
    for i in range(0, len(padded), 4):
        total += (splitmix_by_hand(i // 4) | 1) * int.from_bytes(padded[i : i + 4], "little")
    return total & MASK


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], str]:
    """Rows of any dtype made from random bytes, so that NaN payloads and odd sizes occur."""
    dtype = draw(DTYPES)
    shape = draw(st.sampled_from([(1, 1), (2, 3), (3, 1, 5), (1, 0), (0, 4), (2, 7)]))
    item = STORAGE[dtype].itemsize
    count = int(np.prod(shape))
    raw = draw(st.binary(min_size=count * item, max_size=count * item))
    return np.frombuffer(raw, STORAGE[dtype]).reshape(shape), dtype


def test_splitmix64_is_the_published_generator() -> None:
    # The first outputs of the reference C program for seed 0: states 0, gamma, 2 * gamma.
    gamma = 0x9E3779B97F4A7C15
    states = np.array([0, gamma, 2 * gamma & MASK], np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(states).tolist() == expected
    assert int(splitmix64(7)) == splitmix_by_hand(7)


def test_the_coefficients_are_fixed() -> None:
    # Traces on disk hold digests made with these numbers: a change breaks every one of them.
    assert coefficients(3).tolist() == [splitmix_by_hand(i) | 1 for i in range(3)]
    assert coefficients(1).tolist() == [0xE220A8397B1DCDAF]
    assert digest_rows(np.array([[1.0, -2.0]], np.float32), "F32").tolist() == [0x1196886D6DEF0936]
    everything = coefficients(5000)
    assert (everything & np.uint64(1)).all()
    assert len(np.unique(everything)) == 5000


@given(matrices())
def test_digest_equals_its_statement_in_plain_python(matrix: tuple[np.ndarray[Any, Any], str]) -> None:
    data, dtype = matrix
    assert digest_rows(data, dtype).tolist() == [digest_by_hand(row.tobytes(), dtype) for row in data]


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.data())
def test_one_changed_word_always_changes_the_digest(words: int, seed: int, data: st.DataObject) -> None:
    row = np.random.default_rng(seed).integers(0, 2**32, (1, words), dtype=np.uint32)
    place = data.draw(st.integers(0, words - 1))
    changed = row.copy()
    changed[0, place] = data.draw(st.integers(0, 2**32 - 1))
    assume(changed[0, place] != row[0, place])
    assert digest_rows(row, "F32") != digest_rows(changed, "F32")


@given(matrices(), st.data())
def test_one_changed_bit_changes_only_its_row(
    matrix: tuple[np.ndarray[Any, Any], str], data: st.DataObject
) -> None:
    rows, dtype = matrix
    assume(rows.size)
    raw = bytearray(rows.tobytes())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    changed = np.frombuffer(bytes(raw), rows.dtype).reshape(rows.shape)
    different = digest_rows(rows, dtype) != digest_rows(changed, dtype)
    row = bit // 8 // (len(raw) // len(rows))
    assert np.flatnonzero(different).tolist() == [row]


@given(st.binary(min_size=24, max_size=24), DTYPES, DTYPES)
def test_the_dtype_matters_when_the_bytes_are_the_same(raw: bytes, first: str, second: str) -> None:
    assume(first != second)
    a, b = (digest_rows(np.frombuffer(raw, STORAGE[dtype])[None, :], dtype) for dtype in (first, second))
    assert a != b


@given(st.binary(max_size=24))
def test_the_length_matters_even_when_the_words_are_the_same(raw: bytes) -> None:
    """Zero bytes at the end leave the sum alone; only the length term tells them apart."""
    longer = raw + b"\0"
    digests = [digest_rows(np.frombuffer(r, np.uint8)[None, :], "U8").tolist() for r in (raw, longer)]
    assert digests[0] != digests[1]


def test_bits_count_and_not_values() -> None:
    zeros = digest_rows(np.array([[0.0], [-0.0]], np.float32), "F32")
    assert zeros[0] != zeros[1]
    nans = np.array([[0x7FC00000], [0x7FC00001], [0xFFC00000]], np.uint32).view(np.float32)
    assert len(set(digest_rows(nans, "F32").tolist())) == 3


@given(hnp.arrays(np.uint32, (1, 4)), hnp.arrays(np.uint32, (1, 4)))
def test_the_order_of_concatenation_matters(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    assume((a != b).any())
    assert digest_rows(np.hstack([a, b]), "U32") != digest_rows(np.hstack([b, a]), "U32")


def test_empty_rows_and_no_rows() -> None:
    assert digest_rows(np.empty((0, 4), np.float32), "F32").shape == (0,)
    empty = digest_rows(np.empty((2, 0), np.float32), "F32")
    assert empty.tolist() == [B_DTYPE * DTYPE_CODES["F32"] & MASK] * 2


def test_rows_are_independent_of_layout_and_of_the_block_they_are_summed_in() -> None:
    data = np.random.default_rng(0).integers(0, 2**32, (700, 300), dtype=np.uint32)
    alone = [int(digest_rows(data[i : i + 1], "U32")[0]) for i in (0, 217, 218, 699)]
    assert digest_rows(data, "U32")[[0, 217, 218, 699]].tolist() == alone
    assert (digest_rows(np.asfortranarray(data), "U32") == digest_rows(data, "U32")).all()
    assert (digest_rows(data.astype(">u4"), "U32") == digest_rows(data, "U32")).all()


@pytest.mark.parametrize("dtype", ["F16", "F99"])
def test_a_dtype_of_another_size_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=dtype):
        digest_rows(np.zeros((1, 2), np.float32), dtype)


@given(hnp.arrays(np.uint64, (6, 4)), st.integers(0, 5), st.integers(0, 3), st.integers(1, MASK))
def test_one_changed_entry_changes_every_sum_that_sees_it(
    entries: np.ndarray[Any, Any], position: int, head: int, delta: int
) -> None:
    changed = entries.copy()
    changed[position, head] ^= np.uint64(delta)
    before = np.cumsum(combine_entries(entries, np.arange(6)), dtype=np.uint64)
    after = np.cumsum(combine_entries(changed, np.arange(6)), dtype=np.uint64)
    assert np.flatnonzero(before != after).tolist() == list(range(position, 6))


@given(hnp.arrays(np.uint64, (2, 2), unique=True))
def test_entries_that_change_places_change_the_sum(entries: np.ndarray[Any, Any]) -> None:
    total = combine_entries(entries, [4, 5]).sum(dtype=np.uint64)
    assert combine_entries(entries[::-1], [4, 5]).sum(dtype=np.uint64) != total
    assert combine_entries(entries[:, ::-1], [4, 5]).sum(dtype=np.uint64) != total
    # The same entries at the same positions, listed in another order, are the same cache.
    assert combine_entries(entries[::-1], [5, 4]).sum(dtype=np.uint64) == total


def test_weights_are_odd_and_their_streams_differ() -> None:
    positions, heads = position_weight(np.arange(4096)), head_weight(np.arange(4096))
    both = np.concatenate([positions, heads, coefficients(4096)])
    assert (both & np.uint64(1)).all()
    assert len(np.unique(both)) == len(both)
    assert position_weight(3).shape == ()
