"""Evaluated MLX arrays without copying them: address, strides, dtype; and the largest logits of a row.

NumPy cannot import bfloat16 from the buffer protocol, and makes no view of a strided buffer whose format it
does not know; so the address is read through the C buffer interface itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

STRIDED_READ_ONLY = 0x11C  # PyBUF_FULL_RO of CPython's object.h

DTYPE_NAMES: dict[Any, str] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float64: "F64",
    mx.complex64: "C64",
}

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.POINTER(_PyBuffer)]
_release.restype = None


# One is made at every port of every forward, and a frozen dataclass takes three times as long to make.
class Memory(NamedTuple):
    """Address (bytes), shape (elements), strides (bytes) and dtype name of one evaluated array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str

    def numpy(self) -> NDArray[Any]:
        """A read-only view as unsigned integers of the item size; valid while the MLX array lives."""
        if 0 in self.shape:
            return np.zeros(self.shape, _UNSIGNED[self.itemsize])
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize
        raw = (ctypes.c_char * span).from_address(self.address)
        view: NDArray[Any] = np.ndarray(
            self.shape, _UNSIGNED[self.itemsize], memoryview(raw), strides=self.strides
        )
        view.flags.writeable = False
        return view


def memory(array: mx.array) -> Memory:
    """Memory of ``array``, evaluating it first when that has not happened yet."""
    shape = tuple(array.shape)
    if array.size == 0:
        return Memory(0, shape, (0,) * len(shape), array.itemsize, DTYPE_NAMES[array.dtype])
    view = _PyBuffer()
    if _get_buffer(array, ctypes.byref(view), STRIDED_READ_ONLY) != 0:
        raise BufferError("MLX gave no buffer for an evaluated array")
    try:
        strides = tuple(view.strides[: view.ndim])
        return Memory(int(view.buf or 0), shape, strides, array.itemsize, DTYPE_NAMES[array.dtype])
    finally:
        _release(ctypes.byref(view))


def handle(array: mx.array) -> mx.array:
    """A second Python handle on the same array.

    Models change arrays in place (``h *= scale`` in gemma), which rebinds the Python object; the handle keeps
    pointing at the value that was recorded. ``astype`` to the same dtype adds no operation to the graph.
    """
    return array.astype(array.dtype)


Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


def top(logits: Float32, k: int) -> tuple[Int32, Float32]:
    """Ids int32 [rows, k] and logits float32 [rows, k] of the largest of ``logits`` [rows, V].

    Descending; equal logits by lower id, NaN last.
    """
    k = min(k, logits.shape[-1])
    ids = np.empty((len(logits), k), np.int32)
    for row, values in enumerate(logits):
        ranked = np.where(np.isnan(values), -np.inf, values)
        kth = np.partition(ranked, len(ranked) - k)[len(ranked) - k]
        candidates = np.flatnonzero(ranked >= kth)
        order = np.lexsort((candidates, np.isnan(values[candidates]), -ranked[candidates]))
        ids[row] = candidates[order[:k]]
    return ids, np.take_along_axis(logits, ids, axis=1)


def as_float32(logits: mx.array) -> Float32:
    """An evaluated MLX array as float32, exactly (half and bfloat16 are subsets of float32)."""
    where = memory(logits)
    bits = where.numpy()
    if where.dtype == "BF16":
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
    kinds = {"F16": np.float16, "F32": np.float32}
    return np.ascontiguousarray(bits).view(kinds[where.dtype]).astype(np.float32)


def lens_logits(
    hidden: mx.array, norm: Callable[[mx.array], mx.array], head: Callable[[mx.array], mx.array]
) -> mx.array:
    """Logits [rows, V] of ``hidden`` [rows, D] as if the model ended after this layer (lazy)."""
    return head(norm(hidden[None]))[0]
