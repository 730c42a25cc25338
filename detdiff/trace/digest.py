"""The 64-bit digest of a row's bytes: a multilinear hash with fixed, published coefficients.

digest = sum_i a_i * w_i + B_DTYPE * code + B_LENGTH * bytes (mod 2**64), w_i the row's little-endian uint32
words (zero-padded to a whole word) and a_i = splitmix64(i) | 1. The sum is exact in any order, so any device
gives the same number; an odd a_i times a non-zero difference below 2**32 is never 0 mod 2**64, so one changed
word always changes the digest. For coefficients drawn at random, two rows that differ in several words would
collide with a chance of at most 2**-31, and near 2**-64 unless all differences share high powers of two.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

UInt64 = NDArray[np.uint64]

DTYPE_CODES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 2,
    "I8": 3,
    "U16": 4,
    "I16": 5,
    "F16": 6,
    "BF16": 7,
    "U32": 8,
    "I32": 9,
    "F32": 10,
    "U64": 11,
    "I64": 12,
    "F64": 13,
    "C64": 14,
}
"""Codes mixed into a digest, by the dtype names of safetensors."""

STORAGE: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
"""The numpy dtype that stores each of them; numpy has no BF16, so its bits are kept as uint16."""

B_DTYPE: Final = 0xD6E8FEB86659FD93
B_LENGTH: Final = 0xA0761D6478BD642F

_POSITION_STREAM: Final = 0x706F736974696F6E
_HEAD_STREAM: Final = 0x0000000068656164
_BLOCK_WORDS: Final = 1 << 16


def splitmix64(x: ArrayLike) -> UInt64:
    """The output function of splitmix64 (Steele, Lea and Flood 2014) for state ``x``; uint64, any shape."""
    z = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).reshape(np.shape(x))


def coefficients(n: int) -> UInt64:
    """The first ``n`` coefficients, uint64 [n], all odd: splitmix64(i) | 1."""
    return splitmix64(np.arange(n, dtype=np.uint64)) | np.uint64(1)


def position_weight(positions: ArrayLike) -> UInt64:
    """Odd weights of cache positions, uint64 like ``positions``: splitmix64(p xor "position") | 1."""
    stream = np.uint64(_POSITION_STREAM)
    return splitmix64(np.asarray(positions).astype(np.uint64) ^ stream) | np.uint64(1)


def head_weight(heads: ArrayLike) -> UInt64:
    """Odd weights of cache heads, uint64 like ``heads``: splitmix64(h xor "head") | 1."""
    return splitmix64(np.asarray(heads).astype(np.uint64) ^ np.uint64(_HEAD_STREAM)) | np.uint64(1)


def combine_entries(entry_digests: UInt64, positions: ArrayLike) -> UInt64:
    """One term per position for ports that stand for many cache entries (``kv``, ``written``, ``read``).

    ``entry_digests`` uint64 [T, heads] (K heads then V heads), ``positions`` int [T]; returns uint64 [T] =
    position_weight(p) * sum_h head_weight(h) * entry_digests[p, h] mod 2**64. The caller sums the terms of
    the visible positions, or takes their cumulative sum. One changed entry always changes the sum.
    """
    entries = np.asarray(entry_digests, np.uint64)
    heads = (entries * head_weight(np.arange(entries.shape[1]))).sum(axis=1, dtype=np.uint64)
    terms: UInt64 = position_weight(positions) * heads
    return terms


def digest_bias(dtype: str, nbytes: int) -> int:
    """What dtype and length add to a digest: (B_DTYPE * code + B_LENGTH * nbytes) mod 2**64."""
    return (B_DTYPE * DTYPE_CODES[dtype] + B_LENGTH * nbytes) % (1 << 64)


def words_of(data: NDArray[Any]) -> NDArray[np.uint32]:
    """The bytes of each row of ``data`` [n, ...] as little-endian uint32 words [n, words], zero-padded."""
    count = data.shape[0]
    little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
    nbytes = little.nbytes // count if count else 0
    raw = little.reshape(-1).view(np.uint8).reshape(count, nbytes)
    if nbytes % 4:
        padded = np.zeros((count, (nbytes + 3) // 4 * 4), np.uint8)
        padded[:, :nbytes] = raw
        raw = padded
    return raw.view("<u4")


def digest_rows(data: NDArray[Any], dtype: str) -> UInt64:
    """The digest of every row of ``data`` [n, ...] whose elements are ``dtype``; uint64 [n].

    ``data`` may be in any storage of the same element size (BF16 as uint16). Raises ValueError for an unknown
    dtype or another element size.
    """
    if dtype not in STORAGE or STORAGE[dtype].itemsize != data.dtype.itemsize:
        raise ValueError(f"{data.dtype} does not store elements of dtype {dtype!r}")
    words = words_of(data)
    weights = coefficients(words.shape[1])
    block = max(1, _BLOCK_WORDS // max(1, words.shape[1]))
    sums = np.empty(words.shape[0], np.uint64)
    for start in range(0, words.shape[0], block):
        # A block at a time: the 64-bit products then stay in the cache instead of filling memory.
        part = words[start : start + block]
        np.multiply(part, weights, dtype=np.uint64).sum(axis=1, out=sums[start : start + block])
    row_bytes = int(np.prod(data.shape[1:], dtype=np.int64)) * data.dtype.itemsize
    return sums + np.uint64(digest_bias(dtype, row_bytes))
