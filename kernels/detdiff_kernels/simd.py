"""Vector operations for compiled loops: a few LLVM instructions each, so rounding is what a loop says.

Only code compiled by numba may call them. A vector holds float32 values, one per lane, and every lane gets
the bits that the scalar operation would give. Arrays are flat; offsets count items. A uint16 array holds
float16 bits, and loading it widens, which is exact. No fastmath flag is set anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)


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


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    one = builder.insert_element(ir.Constant(_vector(lanes, scalar.type), ir.Undefined), scalar, _INT32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_vector(lanes, _INT32), [0] * lanes))


def _pick(builder: Any, vector: Any, numbers: range) -> Any:
    """The lanes ``numbers`` of a vector, as a shorter vector."""
    chosen = ir.Constant(_vector(len(numbers), _INT32), list(numbers))
    return builder.shuffle_vector(vector, vector, chosen)


def _below(builder: Any, limit: Any, lanes: int) -> Any:
    """A mask: true in the lanes whose number is below ``limit``."""
    limits = _splat(builder, builder.trunc(limit, _INT32), lanes)
    return builder.icmp_signed("<", ir.Constant(limits.type, list(range(lanes))), limits)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(c.type, [c.type] * 3)
    name = f"llvm.fma.v{c.type.count}f32"
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), [a, b, c])


class _Memory(NamedTuple):
    """Where a flat array's items are, while code for one use of it is generated."""

    context: Any
    builder: Any
    array: Any

    @property
    def item(self) -> Any:
        return ir.HalfType() if self.array.dtype == types.uint16 else _FLOAT

    def at(self, value: Any, offset: Any, lanes: int) -> Any:
        data = self.context.make_array(self.array)(self.context, self.builder, value).data
        pointer = self.builder.gep(data, [offset])
        return self.builder.bitcast(pointer, _vector(lanes, self.item).as_pointer())

    @property
    def align(self) -> int:
        return int(self.array.dtype.bitwidth // 8)

    def load(self, pointer: Any, lanes: int) -> Any:
        return self._widen(self.builder.load(pointer, align=self.align), lanes)

    def load_first(self, pointer: Any, lanes: int, count: Any) -> Any:
        """The first ``count`` items, +0.0 in the other lanes; memory behind those items is not touched."""
        kind = _vector(lanes, self.item)
        mask = _below(self.builder, count, lanes)
        size = "f16" if self.array.dtype == types.uint16 else "f32"
        call = ir.FunctionType(kind, [pointer.type, _INT32, mask.type, kind])
        masked = self.builder.module.declare_intrinsic(f"llvm.masked.load.v{lanes}{size}.p0", fnty=call)
        filled = ir.Constant(kind, [0.0] * lanes)
        loaded = self.builder.call(masked, [pointer, _INT32(self.align), mask, filled])
        return self._widen(loaded, lanes)

    def load_turns(self, value: Any, offset: Any, lanes: int) -> Callable[[int], Any]:
        """Loads the vector at ``offset`` plus a number of whole vectors."""

        def turn(number: int) -> Any:
            place = self.builder.add(offset, ir.Constant(offset.type, number * lanes))
            return self.load(self.at(value, place, lanes), lanes)

        return turn

    def store_first(self, vector: Any, pointer: Any, lanes: int, count: Any) -> None:
        mask = _below(self.builder, count, lanes)
        call = ir.FunctionType(ir.VoidType(), [vector.type, pointer.type, _INT32, mask.type])
        masked = self.builder.module.declare_intrinsic(f"llvm.masked.store.v{lanes}f32.p0", fnty=call)
        self.builder.call(masked, [vector, pointer, _INT32(self.align), mask])

    def _widen(self, loaded: Any, lanes: int) -> Any:
        return loaded if self.item is _FLOAT else self.builder.fpext(loaded, _vector(lanes))


def _operation(typing: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = intrinsic(prefer_literal=True)(typing)
    return made


@_operation
def zeros(typing: Any, lanes: Any) -> Any:
    """``zeros(lanes)``: +0.0 in every lane."""
    vector = Vector(lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return ir.Constant(_vector(vector.lanes), [0.0] * vector.lanes)

    return vector(lanes), generate


@_operation
def chain_step(typing: Any, total: Any, array: Any, offset: Any, weights: Any, place: Any) -> Any:
    """``chain_step(total, x, i, w, j)``: lane l becomes fma(x[i], w[j + l], total[l])."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        before, x, i, w, j = values
        inputs, weight = _Memory(context, builder, array), _Memory(context, builder, weights)
        one = inputs.load(inputs.at(x, i, 1), 1)
        scalar = builder.extract_element(one, _INT32(0))
        row = weight.load(weight.at(w, j, total.lanes), total.lanes)
        return _fma(builder, _splat(builder, scalar, total.lanes), row, before)

    return total(total, array, types.intp, weights, types.intp), generate


def _by_turn(builder: Any, wide: Any, each: int) -> list[Any]:
    """Splits ``lanes * each`` items, lane by lane, into ``each`` vectors: first items, second items, ...

    One halving into even and odd items after another, because processors shuffle two registers at a time.
    """
    if each == 1:
        return [wide]
    count = wide.type.count
    if each % 2:
        return [_pick(builder, wide, range(turn, count, each)) for turn in range(each)]
    even = _by_turn(builder, _pick(builder, wide, range(0, count, 2)), each // 2)
    odd = _by_turn(builder, _pick(builder, wide, range(1, count, 2)), each // 2)
    return [turn for pair in zip(even, odd, strict=True) for turn in pair]


def _lane_step(builder: Any, total: Any, inputs: Callable[[int], Any], wide: Any, each: int) -> Any:
    for turn, weight in enumerate(_by_turn(builder, wide, each)):
        total = _fma(builder, inputs(turn), weight, total)
    return total


@_operation
def lane_step(typing: Any, total: Any, array: Any, offset: Any, weights: Any, place: Any, each: Any) -> Any:
    """``lane_step(total, x, i, w, j, each)``: lane l adds its ``each`` products, in ascending order, by FMA.

    Lane l owns the weights ``w[j + l * each]`` and on. Its inputs are ``x[i + l]``, ``x[i + lanes + l]`` and
    on: x is laid out by turn already, because all outputs share it.
    """
    wide = total.lanes * each.literal_value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        before, x, i, w, j, _ = values
        inputs, weight = _Memory(context, builder, array), _Memory(context, builder, weights)
        turns = inputs.load_turns(x, i, total.lanes)
        return _lane_step(
            builder, before, turns, weight.load(weight.at(w, j, wide), wide), each.literal_value
        )

    return total(total, array, types.intp, weights, types.intp, each), generate


@_operation
def lane_last_step(
    typing: Any, total: Any, array: Any, offset: Any, weights: Any, place: Any, each: Any, left: Any
) -> Any:
    """``lane_last_step(total, x, i, w, j, each, left)``: ``lane_step`` with only ``left`` weights.

    Missing weights are +0.0, and so must the missing inputs in x be; a lane adds their product as any other.
    """
    wide = total.lanes * each.literal_value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        before, x, i, w, j, _, count = values
        inputs, weight = _Memory(context, builder, array), _Memory(context, builder, weights)
        turns = inputs.load_turns(x, i, total.lanes)
        loaded = weight.load_first(weight.at(w, j, wide), wide, count)
        return _lane_step(builder, before, turns, loaded, each.literal_value)

    return total(total, array, types.intp, weights, types.intp, each, types.intp), generate


@_operation
def halving_sum(typing: Any, vector: Any) -> Any:
    """``halving_sum(vector)``: lane l adds lane l + n/2, then l + n/4, down to one float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        part, lanes = values[0], vector.lanes
        while lanes > 1:
            lanes //= 2
            part = builder.fadd(
                _pick(builder, part, range(lanes)), _pick(builder, part, range(lanes, 2 * lanes))
            )
        return builder.extract_element(part, _INT32(0))

    return types.float32(vector), generate


@_operation
def store_first(typing: Any, vector: Any, array: Any, offset: Any, count: Any) -> Any:
    """``store_first(vector, out, i, count)``: writes the first ``count`` lanes to ``out[i]`` and on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, out, i, limit = values
        memory = _Memory(context, builder, array)
        memory.store_first(value, memory.at(out, i, vector.lanes), vector.lanes, limit)
        return context.get_dummy_value()

    return types.none(vector, array, types.intp, types.intp), generate
