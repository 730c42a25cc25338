"""Digests of recorded arrays: on the host straight from MLX's memory, by compiled loops, or by MLX on its own device.

The numbers are those of :mod:`detdiff.trace.digest`; only the way there differs. On the host nothing is copied except rows
whose contiguous pieces are not whole 32-bit words; from the device only 8 bytes a row leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from detdiff.trace.digest import coefficients, digest_bias

from .forward import DTYPE_NAMES, Memory

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]

_WORD_POINTER: Any = types.CPointer(types.uint32)  # type: ignore[attr-defined]
_BYTE_POINTER: Any = types.CPointer(types.uint8)  # type: ignore[attr-defined]

JOB = 10  # address, slot stride, column stride, three (count, stride) pairs, bytes per contiguous piece


@intrinsic  # type: ignore[untyped-decorator]
def _words(typingctx: Any, address: Any) -> Any:
    """An int64 address as a pointer to uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return _WORD_POINTER(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _bytes(typingctx: Any, address: Any) -> Any:
    """An int64 address as a pointer to uint8."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return _BYTE_POINTER(types.int64), codegen


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def sum_words(address: int, count: int, coef: UInt64, first: int) -> np.uint64:
    """The sum over ``count`` words at an address, with coefficients from ``first`` on."""
    words = numba.carray(_words(address), count)
    total = np.uint64(0)
    for i in range(count):
        total += coef[first + i] * np.uint64(words[i])
    return total


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _digest_one(base: int, job: Int64, coef: UInt64, scratch: NDArray[np.uint8]) -> np.uint64:
    piece = job[9]
    total = np.uint64(0)
    if piece % 4 == 0:
        words = piece // 4
        first = 0
        for a in range(job[3]):
            for b in range(job[5]):
                for c in range(job[7]):
                    total += sum_words(base + a * job[4] + b * job[6] + c * job[8], words, coef, first)
                    first += words
        return total
    at = 0
    for a in range(job[3]):
        for b in range(job[5]):
            for c in range(job[7]):
                source = numba.carray(_bytes(base + a * job[4] + b * job[6] + c * job[8]), piece)
                for i in range(piece):
                    scratch[at] = source[i]
                    at += 1
    while at % 4 != 0:
        scratch[at] = np.uint8(0)
        at += 1
    for i in range(at // 4):
        word = np.uint64(scratch[4 * i])
        for k in range(1, 4):
            word |= np.uint64(scratch[4 * i + k]) << np.uint64(8 * k)
        total += coef[i] * word
    return total


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _digest_jobs(
    jobs: Int64,
    constants: UInt64,
    slots: Int64,
    columns: Int64,
    coef: UInt64,
    scratch: NDArray[np.uint8],
    out: UInt64,
) -> None:
    for j in range(jobs.shape[0]):
        job = jobs[j]
        for r in range(slots.shape[0]):
            base = job[0] + slots[r] * job[1] + columns[r] * job[2]
            out[r, j] = constants[j] + _digest_one(base, job, coef, scratch)


def layout_job(memory: Memory, axis: int | None) -> tuple[int, ...] | None:
    """How to walk a row of an array [slots, ..., rows at ``axis``, ...]; None when it has too many pieces.

    ``axis`` None: one row a slot.

    Neighbouring dimensions that lie contiguously are merged, so the walk (and with it the identity of two views
    of the same rows) does not depend on how a model reshaped them.
    """
    walk = _walk(memory.shape, memory.strides, memory.itemsize, axis)
    return None if walk is None else (memory.address, *walk)


@lru_cache(4096)  # a run has few layouts and asks for one at every port of every forward
def _walk(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, axis: int | None
) -> tuple[int, ...] | None:
    """A job without its address."""
    dims = [
        (n, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if i not in (0, axis) and n != 1
    ]
    merged: list[tuple[int, int]] = []
    for n, s in dims:
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    piece = itemsize
    if merged and merged[-1][1] == itemsize:
        piece *= merged.pop()[0]
    if len(merged) > 3:
        return None
    pairs = [(1, 0)] * (3 - len(merged)) + merged
    slot_stride = strides[0] if shape[0] > 1 else 0
    row_stride = strides[axis] if axis is not None and shape[axis] > 1 else 0
    return (slot_stride, row_stride, *(v for pair in pairs for v in pair), piece)


def row_bytes(job: tuple[int, ...]) -> int:
    """Bytes of one row of a job."""
    return job[3] * job[5] * job[7] * job[9]


_coefficients: UInt64 = coefficients(1 << 14)


def coefficients_for(words: int) -> UInt64:
    """At least so many coefficients."""
    global _coefficients
    if words > len(_coefficients):
        _coefficients = coefficients(1 << (words - 1).bit_length())
    return _coefficients


class Jobs(NamedTuple):
    """Walks of rows (``layout_job``) of several arrays, int64 [jobs, JOB], with what is added to each digest."""

    table: Int64
    constants: UInt64
    longest: int

    @classmethod
    def of(cls, jobs: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> Jobs:
        sizes = [row_bytes(job) for job in jobs]
        constants = np.array([digest_bias(d, n) for d, n in zip(dtypes, sizes, strict=True)], np.uint64)
        return cls(np.array(jobs, np.int64).reshape(-1, JOB), constants, max(sizes, default=0))

    def digest(self, slots: Int64, columns: Int64) -> UInt64:
        """Digests uint64 [rows, jobs] of the rows (slot, column) of every job; the arrays must be alive."""
        out = np.empty((len(slots), len(self.table)), np.uint64)
        coef = coefficients_for((self.longest + 3) // 4)
        scratch = np.empty(self.longest + 4, np.uint8)
        _digest_jobs(self.table, self.constants, slots, columns, coef, scratch, out)
        return out


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _digest_entries(
    address: int,
    head_stride: int,
    row_stride: int,
    piece: int,
    base: np.uint64,
    coef: UInt64,
    out: UInt64,
) -> None:
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            out[t, h] = base + sum_words(address + h * head_stride + t * row_stride, piece // 4, coef, 0)


def digest_entries(memory: Memory, slot: int) -> UInt64:
    """Digests uint64 [T, heads] of the cache entries of one slot; memory [slots, heads, T, D]."""
    _, heads, length, width = memory.shape
    slot_stride, head_stride, row_stride, item_stride = memory.strides
    piece = width * memory.itemsize
    if piece % 4 or (item_stride != memory.itemsize and width > 1):
        job = layout_job(
            Memory(memory.address, memory.shape, memory.strides, memory.itemsize, memory.dtype), 2
        )
        assert job is not None
        per_head = [
            (job[0] + h * head_stride, job[1], job[2], 1, 0, 1, 0, width, item_stride, memory.itemsize)
            for h in range(heads)
        ]
        slots = np.full(length, slot, np.int64)
        return Jobs.of(per_head, [memory.dtype] * heads).digest(slots, np.arange(length, dtype=np.int64))
    out = np.empty((length, heads), np.uint64)
    coef = coefficients_for(piece // 4)
    base = np.uint64(digest_bias(memory.dtype, piece))
    _digest_entries(memory.address + slot * slot_stride, head_stride, row_stride, piece, base, coef, out)
    return out


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fold(
    found: UInt64,
    placed: Int64,
    ledger: UInt64,
    position_weights: UInt64,
    head_weights: UInt64,
    nobody: np.uint64,
    sum_written: UInt64,
    sum_read: UInt64,
    changed: Int64,
) -> int:
    """Sum entries column by column, as written and as read; list those that are not what was written."""
    n_changed = 0
    for c in range(found.shape[0]):
        p = placed[c]
        term_read = np.uint64(0)
        term_written = np.uint64(0)
        for h in range(found.shape[1]):
            now = found[c, h]
            then = now if p < 0 else ledger[p, h]
            if then != now:
                if n_changed < changed.shape[0]:
                    changed[n_changed, 0] = p
                    changed[n_changed, 1] = h
                n_changed += 1
            term_read += head_weights[h] * now
            term_written += head_weights[h] * then
        weight = nobody if p < 0 else position_weights[p]
        sum_read[c + 1] = sum_read[c] + weight * term_read
        sum_written[c + 1] = sum_written[c] + weight * term_written
    return n_changed


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _over(sums: UInt64, first: Int64, last: Int64, seen: NDArray[np.bool_], out: UInt64) -> None:
    """The sum over the columns that each row sees; ``seen`` without rows: all from first to last."""
    for r in range(out.shape[0]):
        if seen.shape[0] == 0:
            out[r] = sums[last[r] + 1] - sums[first[r]]
        else:
            total = np.uint64(0)
            for c in range(first[r], last[r] + 1):
                if seen[r, c]:
                    total += sums[c + 1] - sums[c]
            out[r] = total


_ALL: Final = np.zeros((0, 0), np.bool_)
NOBODY: Final = np.uint64(0x6E6F626F64790001)
"""The weight of an entry that is of no position of the request."""


@dataclass(frozen=True)
class EntrySums:
    """Entries of one request summed up column by column, uint64 [columns + 1], as written and as read.

    ``changed`` int64 [n, 2] has (position, head) of at most 64 entries that are not what was written, of ``number``.
    """

    written: UInt64
    read: UInt64
    changed: Int64
    number: int

    def over(self, first: Int64, last: Int64, seen: NDArray[np.bool_] | None) -> tuple[UInt64, UInt64]:
        """As written and as read, uint64 [rows]: the sums of what rows see (as in ``visible.Sight``)."""
        shown = _ALL if seen is None else np.ascontiguousarray(seen)
        written, read = np.empty(len(first), np.uint64), np.empty(len(first), np.uint64)
        _over(self.written, first, last, shown, written)
        if not self.number:
            return written, written
        _over(self.read, first, last, shown, read)
        return written, read


def fold_entries(found: UInt64, placed: Int64, ledger: UInt64, weights: tuple[UInt64, UInt64]) -> EntrySums:
    """Sums of the entries ``found`` uint64 [columns, heads], of the positions ``placed`` int64 [columns] (negative: of none).

    ``ledger`` uint64 [capacity, heads] are the digests as the entries were written, the new ones included; ``weights`` those
    of positions and heads.
    """
    written = np.zeros(len(found) + 1, np.uint64)
    read = np.zeros(len(found) + 1, np.uint64)
    changed = np.empty((64, 2), np.int64)
    n = _fold(found, placed, ledger, *weights, NOBODY, written, read, changed)
    return EntrySums(written, read, changed[: min(n, 64)], n)


_on_device: dict[int, mx.array] = {}


def _device_coefficients(words: int) -> mx.array:
    found = _on_device.get(words)
    if found is None:
        found = _on_device[words] = mx.array(coefficients(words))
    return found


def _digest_last(array: mx.array) -> mx.array:
    """Digests uint64 [...] over the last axis of ``array`` [..., D]."""
    n_bytes = array.shape[-1] * array.itemsize
    if array.dtype == mx.bool_:
        array = array.astype(mx.uint8)
        dtype = "BOOL"
    else:
        dtype = DTYPE_NAMES[array.dtype]
    array = mx.contiguous(array)
    if array.itemsize >= 4:
        words = array.view(mx.uint32)
    else:
        raw = array.view(mx.uint8)
        if n_bytes % 4:
            widths = [(0, 0)] * (raw.ndim - 1) + [(0, 4 - n_bytes % 4)]
            raw = mx.contiguous(mx.pad(raw, widths))
        words = raw.view(mx.uint32)
    total = (words.astype(mx.uint64) * _device_coefficients(words.shape[-1])).sum(axis=-1)
    # As a numpy array: MLX refuses Python integers from 2**63 on.
    return total + mx.array(np.array(digest_bias(dtype, n_bytes), np.uint64))


def device_rows(array: mx.array, axis: int | None) -> mx.array:
    """Digests uint64 [slots, columns] of the rows of ``array``; ``axis`` None: one row a slot, [slots, 1]."""
    moved = mx.expand_dims(array, 1) if axis is None else mx.moveaxis(array, axis, 1)
    # The width is said and not left to -1, which an array without rows could not answer.
    return _digest_last(moved.reshape(*moved.shape[:2], math.prod(moved.shape[2:])))


def device_entries(array: mx.array) -> mx.array:
    """Digests uint64 [slots, T, heads] of cache entries in ``array`` [slots, heads, T, width]."""
    return _digest_last(array).swapaxes(1, 2)
