"""Where many arrays lie, asked for in one compiled loop: Python's part of asking is ten times as long as MLX's own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from .forward import STRIDED_READ_ONLY

Int64 = NDArray[np.int64]

DIMS: Final = 6
ADDRESS, ITEM, FORMAT, NDIM, SHAPE, STRIDES = 0, 1, 2, 3, 4, 4 + DIMS
WIDTH: Final = 4 + 2 * DIMS
_VIEW: Final = 10  # words of a Py_buffer


def _function(name: str) -> int:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


# By address, which compiled code on disk does not hold: it is another one in every process.
_FUNCTIONS = np.array(
    [_function(name) for name in ("PyObject_GetBuffer", "PyBuffer_Release", "PyErr_Clear")], np.int64
)


def _caller(n_args: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [arg.type for arg in args[1:]]
        function = builder.inttoptr(args[0], ir.FunctionType(ir.IntType(32), kinds).as_pointer())
        return builder.call(function, args[1:])

    return codegen


@intrinsic  # type: ignore[untyped-decorator]
def _get(typingctx: Any, function: Any, owner: Any, view: Any, flags: Any) -> Any:
    """A C function of two addresses and an int. Not without the GIL."""
    return types.int32(types.int64, types.int64, types.int64, types.int32), _caller(3)


@intrinsic  # type: ignore[untyped-decorator]
def _call(typingctx: Any, function: Any, argument: Any) -> Any:
    """A C function of an address, which may be of nothing. Not without the GIL."""
    return types.int32(types.int64, types.int64), _caller(1)


@intrinsic  # type: ignore[untyped-decorator]
def _word(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _byte(typingctx: Any, address: Any) -> Any:
    """The byte at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = builder.load(builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return builder.zext(byte, ir.IntType(64))

    return types.int64(types.int64), codegen


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _layouts(objects: Int64, functions: Int64, flags: np.int32, view: Int64, out: Int64) -> None:
    for i in range(objects.shape[0]):
        if _get(functions[0], objects[i], view.ctypes.data, flags) != 0:
            _call(functions[2], 0)
            out[i, 3] = -1
            continue
        ndim = view[4] >> 32
        out[i, 0] = view[0]
        out[i, 1] = view[3]
        # A format is a letter or two and an end.
        first = _byte(view[5])
        out[i, 2] = first if first == 0 else first + (_byte(view[5] + 1) << 8)
        out[i, 3] = ndim if ndim <= DIMS else -1
        for d in range(min(ndim, DIMS)):
            out[i, 4 + d] = _word(view[6] + 8 * d)
            out[i, 4 + DIMS + d] = _word(view[7] + 8 * d)
        _call(functions[1], view.ctypes.data)


def layouts(arrays: Sequence[mx.array]) -> Int64:
    """Address, bytes of an element, format, dimensions, shape and strides (bytes) of arrays, int64 [n, WIDTH].

    Fewer than 0 dimensions: it has too many, or no buffer. Waits for those that are not evaluated yet.
    """
    out = np.zeros((len(arrays), WIDTH), np.int64)
    objects = np.fromiter(map(id, arrays), np.int64, len(arrays))
    _layouts(objects, _FUNCTIONS, np.int32(STRIDED_READ_ONLY), np.zeros(_VIEW, np.int64), out)
    return out
