"""Vector operations for compiled loops: a few LLVM instructions each, so rounding is what a loop says.

Only code compiled by numba may call them. A vector holds float32 values, one per lane, and every lane gets
the bits that the scalar operation would give. Arrays are flat; offsets count items. What an array's items are
is told by its dtype: float32, uint16 (float16 bits), int16 (bfloat16 bits), uint8 and int8 (codes); loading
widens them, which is exact. No fastmath flag is set anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from .rounding import DTYPES

_FLOAT = ir.FloatType()
_HALF = ir.HalfType()
_INT32 = ir.IntType(32)
_INT16 = ir.IntType(16)
_INT8 = ir.IntType(8)
_ITEMS = {
    types.float32: _FLOAT,
    types.uint16: _HALF,
    types.int16: _INT16,
    types.uint8: _INT8,
    types.int8: _INT8,
}


class Vector(types.Type):  # type: ignore[misc]
    """The numba type of a vector of ``lanes`` float32 values."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Vector({lanes})")


class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _vector(vector.lanes))


register_model(Vector)(_VectorModel)


def _vector(lanes: int, item: Any = _FLOAT) -> Any:
    return ir.VectorType(item, lanes)


def _operation(typing: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = intrinsic(prefer_literal=True)(typing)
    return made


def _pointer(context: Any, builder: Any, array: Any, value: Any, offset: Any, kind: Any) -> Any:
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [offset]), kind.as_pointer())


def _load(context: Any, builder: Any, array: Any, value: Any, offset: Any, lanes: int) -> Any:
    kind = _vector(lanes, _ITEMS[array.dtype])
    pointer = _pointer(context, builder, array, value, offset, kind)
    loaded = builder.load(pointer, align=int(array.dtype.bitwidth // 8))
    if array.dtype == types.uint16:
        return builder.fpext(loaded, _vector(lanes))
    if array.dtype == types.int16:
        wide = builder.zext(loaded, _vector(lanes, _INT32))
        return builder.bitcast(builder.shl(wide, _same(lanes, 16)), _vector(lanes))
    if array.dtype == types.uint8:
        # Through int32, for which processors have a conversion.
        return builder.sitofp(builder.zext(loaded, _vector(lanes, _INT32)), _vector(lanes))
    if array.dtype == types.int8:
        return builder.sitofp(builder.sext(loaded, _vector(lanes, _INT32)), _vector(lanes))
    return loaded


def _same(lanes: int, number: int) -> Any:
    return ir.Constant(_vector(lanes, _INT32), [number] * lanes)


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    one = builder.insert_element(ir.Constant(_vector(lanes, scalar.type), ir.Undefined), scalar, _INT32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_vector(lanes, _INT32), [0] * lanes))


def _joined(builder: Any, parts: list[Any]) -> Any:
    """Vectors of one length, one behind the other; the number of them is a power of two."""
    while len(parts) > 1:
        count = parts[0].type.count
        numbers = ir.Constant(_vector(2 * count, _INT32), list(range(2 * count)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(low, high, numbers) for low, high in pairs]
    return parts[0]


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = c.type
    name = f"llvm.fma.v{kind.count}f32"
    function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(kind, [kind] * 3))
    return builder.call(function, [a, b, c])


def _fabs(builder: Any, value: Any) -> Any:
    kind = value.type
    name = f"llvm.fabs.v{kind.count}f64"
    function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(kind, [kind]))
    return builder.call(function, [value])


@_operation
def zeros(typing: Any, lanes: Any) -> Any:
    """``zeros(lanes)``: +0.0 in every lane."""
    vector = Vector(lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return ir.Constant(_vector(vector.lanes), [0.0] * vector.lanes)

    return vector(lanes), generate


@_operation
def load(typing: Any, array: Any, offset: Any, lanes: Any, times: Any) -> Any:
    """``load(a, i, lanes, times)``: the ``lanes`` items ``a[i]`` and on, ``times`` times one behind the other."""
    width, count = lanes.literal_value, times.literal_value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        loaded = _load(context, builder, array, values[0], values[1], width)
        return _joined(builder, [loaded] * count)

    return Vector(width * count)(array, types.intp, lanes, times), generate


@_operation
def spread(typing: Any, array: Any, offset: Any, lanes: Any, times: Any) -> Any:
    """``spread(a, i, lanes, times)``: ``a[i]`` in ``lanes`` lanes, then ``a[i + 1]``, ``times`` items in all."""
    width, count = lanes.literal_value, times.literal_value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        parts = []
        for number in range(count):
            offset = builder.add(values[1], ir.Constant(values[1].type, number))
            one = _load(context, builder, array, values[0], offset, 1)
            parts.append(_splat(builder, builder.extract_element(one, _INT32(0)), width))
        return _joined(builder, parts)

    return Vector(width * count)(array, types.intp, lanes, times), generate


@_operation
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``fma(a, b, c)``: a * b + c with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _fma(builder, *values)

    return c(a, b, c), generate


@_operation
def fma_in(typing: Any, a: Any, b: Any, c: Any, dtype: Any) -> Any:
    """``fma_in(a, b, c, dtype)``: a * b + c rounded once to the literal dtype, in which a, b and c are exact."""
    kind, lanes = dtype.literal_value, c.lanes

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if kind == "float32":
            return _fma(builder, *values[:3])
        # The product of two narrow numbers is exact in float64. Their sum with a third can be inexact there, but not
        # near enough to a tie to matter. On its way through float32 it is rounded to odd, which keeps on which side
        # of a tie it lies.
        wide = _vector(lanes, ir.DoubleType())
        x, y, z = (builder.fpext(value, wide) for value in values[:3])
        exact = builder.fadd(builder.fmul(x, y), z)
        near = builder.fptrunc(exact, _vector(lanes))
        back = builder.fpext(near, wide)
        bits = builder.bitcast(near, _vector(lanes, _INT32))
        even = builder.icmp_signed("==", builder.and_(bits, _same(lanes, 1)), _same(lanes, 0))
        missed = builder.and_(builder.fcmp_ordered("one", back, exact), even)
        outwards = _fabs(builder, exact), _fabs(builder, back)
        step = builder.select(builder.fcmp_ordered(">", *outwards), _same(lanes, 1), _same(lanes, -1))
        odd = builder.bitcast(
            builder.add(bits, builder.select(missed, step, _same(lanes, 0))), _vector(lanes)
        )
        return _rounded(builder, odd, kind, lanes)

    return c(a, b, c, dtype), generate


@_operation
def add(typing: Any, a: Any, b: Any) -> Any:
    """``add(a, b)``: a + b."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fadd(*values)

    return a(a, b), generate


@_operation
def mul(typing: Any, a: Any, b: Any) -> Any:
    """``mul(a, b)``: a * b."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fmul(*values)

    return a(a, b), generate


@_operation
def negative(typing: Any, a: Any) -> Any:
    """``negative(a)``: a with the other sign."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fneg(values[0])

    return a(a), generate


@_operation
def rounded(typing: Any, a: Any, dtype: Any) -> Any:
    """``rounded(a, dtype)``: every lane rounded to nearest even in the literal dtype, and widened again."""
    kind, lanes = dtype.literal_value, a.lanes

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _rounded(builder, values[0], kind, lanes)

    return a(a, dtype), generate


@_operation
def rounded_as(typing: Any, a: Any, dtype: Any) -> Any:
    """``rounded_as(a, number)``: as ``rounded``, to the dtype of that number in ``rounding.DTYPES``, any intp."""
    lanes = a.lanes

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, number = values
        result = cgutils.alloca_once_value(builder, value)
        for place, kind in enumerate(DTYPES[1:], 1):
            with builder.if_then(builder.icmp_signed("==", number, ir.Constant(number.type, place))):
                builder.store(_rounded(builder, value, kind, lanes), result)
        return builder.load(result)

    return a(a, types.intp), generate


def _rounded(builder: Any, value: Any, kind: str, lanes: int) -> Any:
    if kind == "float16":
        return builder.fpext(builder.fptrunc(value, _vector(lanes, _HALF)), _vector(lanes))
    return _bfloat16(builder, value, lanes) if kind == "bfloat16" else value


def _bfloat16(builder: Any, value: Any, lanes: int) -> Any:
    bits = builder.bitcast(value, _vector(lanes, _INT32))
    odd = builder.and_(builder.lshr(bits, _same(lanes, 16)), _same(lanes, 1))
    up = builder.add(bits, builder.add(odd, _same(lanes, 0x7FFF)))
    # Adding could carry a NaN's payload into infinity; a NaN stays one, and quiet.
    quiet = builder.or_(bits, _same(lanes, 0x400000))
    number = builder.fcmp_ordered("ord", value, value)
    kept = builder.and_(builder.select(number, up, quiet), _same(lanes, 0xFFFF0000))
    return builder.bitcast(kept, _vector(lanes))


@_operation
def store(typing: Any, vector: Any, array: Any, offset: Any) -> Any:
    """``store(v, a, i)``: writes all lanes to float32 ``a[i]`` and on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _pointer(context, builder, array, values[1], values[2], values[0].type)
        builder.store(values[0], pointer, align=4)
        return context.get_dummy_value()

    return types.none(vector, array, types.intp), generate


@_operation
def store_rows(typing: Any, vector: Any, array: Any, offset: Any, stride: Any, lanes: Any, count: Any) -> Any:
    """``store_rows(v, a, i, stride, lanes, count)``: of every ``lanes`` lanes, which are a row, the first ``count``
    to float32 ``a[i]`` and on, the next row to ``a[i + stride]`` and on; nothing else is touched."""
    width = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, out, offset, distance, _, limit = values
        limits = _splat(builder, builder.trunc(limit, _INT32), width)
        mask = builder.icmp_signed("<", ir.Constant(limits.type, list(range(width))), limits)
        for first in range(0, vector.lanes, width):
            numbers = ir.Constant(_vector(width, _INT32), list(range(first, first + width)))
            part = builder.shuffle_vector(value, value, numbers)
            pointer = _pointer(context, builder, array, out, offset, part.type)
            kind = ir.FunctionType(ir.VoidType(), [part.type, pointer.type, _INT32, mask.type])
            function = builder.module.declare_intrinsic(f"llvm.masked.store.v{width}f32.p0", fnty=kind)
            builder.call(function, [part, pointer, _INT32(4), mask])
            offset = builder.add(offset, distance)
        return context.get_dummy_value()

    return types.none(vector, array, types.intp, types.intp, lanes, types.intp), generate
