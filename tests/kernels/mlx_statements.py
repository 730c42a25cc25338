"""What MLX's Metal matmul kernels compute, one multiply-add at a time, as their sources write it.

Read from https://github.com/ml-explore/mlx, mlx/backend/metal: kernels/quantized.h (load_vector, qdot, qmv_impl,
qmv_fast_impl, qmv_quad_impl, qmv_wide_impl, qmm_t_impl), kernels/gemv.h (GEMVKernel, GemvWide),
kernels/steel/gemm/kernels/steel_gemm_fused.h, steel_gemm_splitk.h and steel_gemm_splitk_nax.h,
kernels/reduction/reduce_col.h, quantized.cpp and matmul.cpp. Not visible in them, and taken for granted here: products
that are added are one FMA, ``simd_sum`` adds by halving, an 8-wide MMA is a chain.

Every field of a statement is a choice that a test can make otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

from harness import ROUND, add, f32, fma, mul, tree
from statements import DenseStatement, Packed, Shape, chain, in_order

# Of a pack of codes: divisors of its inputs; and terms, each the byte, what of it counts, the input, and by how much
# that one is multiplied again.
_DIVISORS = {
    2: (1, 4, 16, 64),
    3: (1, 8, 64, 2, 16, 128, 4, 32),
    4: (1, 16, 256, 4096),
    5: (1, 32, 4, 128, 16, 2, 64, 8),
    6: (1, 64, 16, 4),
    8: (1,),
}
_TERMS = {
    3: (
        (0, 0x07, 0, 1), (0, 0x38, 1, 1), (0, 0xC0, 2, 1), (1, 0x01, 2, 256), (1, 0x0E, 3, 1), (1, 0x70, 4, 1),
        (1, 0x80, 5, 1), (2, 0x03, 5, 256), (2, 0x1C, 6, 1), (2, 0xE0, 7, 1),
    ),
    5: (
        (0, 0x1F, 0, 1), (0, 0xE0, 1, 1), (1, 0x03, 1, 256), (1, 0x7C, 2, 1), (1, 0x80, 3, 1), (2, 0x0F, 3, 256),
        (2, 0xF0, 4, 1), (3, 0x01, 4, 256), (3, 0x3E, 5, 1), (3, 0xC0, 6, 1), (4, 0x07, 6, 256), (4, 0xF8, 7, 1),
    ),
    6: (
        (0, 0x3F, 0, 1), (0, 0xC0, 1, 1), (1, 0x0F, 1, 256), (1, 0xF0, 2, 1), (2, 0x03, 2, 256), (2, 0xFC, 3, 1),
    ),
    8: ((0, 0xFF, 0, 1),),
}  # fmt: skip


@dataclass(frozen=True)
class QMV:
    """qmv_impl and qmv_fast_impl, which differ in how many values a lane takes."""

    values: dict[int, int]
    lanes: int = 32
    groups: bool = True  # 2- and 4-bit codes in fours, added to the rest at once
    sums_in_dtype: bool = True
    shift_last: bool = True  # scale * accum is the FMA, sum * bias is rounded
    join: Callable[[list[float]], float] = tree

    def weights(self, row: Packed, shape: Shape) -> Packed:
        return row

    def per_lane(self, w: Packed, shape: Shape) -> int:
        return self.values[w.bits]

    def total(self, x: list[float], w: Packed, shape: Shape) -> float:
        values = self.per_lane(w, shape)
        result = [0.0] * self.lanes
        for k in range(0, shape.k, self.lanes * values):
            for lane in range(self.lanes):
                start = k + lane * values
                count = min(max(shape.k - start, 0), values)
                if count:
                    total, inputs = self._load(x[start : start + count], w.bits, shape.dtype)
                    octets = w.octets[start * w.bits // 8 : (start + count) * w.bits // 8]
                    accum = self._dot(octets, inputs, w.bits)
                    scale, bias = w.scales[start // w.group], w.biases[start // w.group]
                    if self.shift_last:
                        part = fma(scale, accum, mul(total, bias))
                    else:
                        part = fma(total, bias, mul(scale, accum))
                    result[lane] = add(result[lane], part)
        return self.join(result)

    def _load(self, x: list[float], bits: int, dtype: str) -> tuple[float, list[float]]:
        narrow = ROUND[dtype if self.sums_in_dtype else "float32"]
        divisors = _DIVISORS[bits]
        total = 0.0
        for i in range(0, len(x), len(divisors)):
            total = add(total, reduce(lambda a, b: narrow(a + b), x[i : i + len(divisors)]))
        return total, [f32(value / divisors[i % len(divisors)]) for i, value in enumerate(x)]

    def _dot(self, octets: bytes, x: list[float], bits: int) -> float:
        """Codes are multiplied where they lie, which the inputs' divisors make good."""
        accum = 0.0
        if bits in (2, 4):
            size = bits // 2
            for i in range(len(x) // 4):
                word = int.from_bytes(octets[i * size : (i + 1) * size], "little")
                masked = [word & ((1 << bits) - 1) << place * bits for place in range(4)]
                if self.groups:
                    four = mul(x[4 * i], masked[0])
                    for place in (1, 2, 3):
                        four = fma(x[4 * i + place], masked[place], four)
                    accum = add(accum, four)
                else:
                    for place in range(4):
                        accum = fma(x[4 * i + place], masked[place], accum)
            return accum
        pack = len(_DIVISORS[bits])
        size = pack * bits // 8
        for i in range(len(x) // pack):
            for octet, mask, item, again in _TERMS[bits]:
                value = f32(x[i * pack + item] * again)
                accum = fma(octets[i * size + octet] & mask, value, accum)
        return accum


@dataclass(frozen=True)
class QuadQMV(QMV):
    """qmv_quad_impl: four lanes share a row of 64 or 128 items."""

    lanes: int = 4

    def per_lane(self, w: Packed, shape: Shape) -> int:
        return shape.k // 4


def dequantised(w: Packed, count: int, narrow: Callable[[float], float] = f32) -> list[float]:
    """dequantize: codes of 2 and 4 bits are taken where they lie in a byte. One rounding, then ``narrow``."""
    return [
        narrow(fma(f32(scale / place), code * place, bias)) for code, place, scale, bias in _codes(w, count)
    ]


def dequantised_in(
    w: Packed, count: int, narrow: Callable[[float], float], in_place: bool = True
) -> list[float]:
    """dequantize up to 0.32.0: every operation is one of the dtype."""
    if narrow is f32:
        return dequantised(w, count)
    found = []
    for code, place, scale, bias in _codes(w, count):
        place = place if in_place else 1
        found.append(narrow(narrow(narrow(scale / place) * code * place) + bias))
    return found


def _codes(w: Packed, count: int) -> Iterator[tuple[int, int, float, float]]:
    """Codes, what their places in a byte are worth, scales, biases."""
    codes = int.from_bytes(w.octets, "little")
    per_byte = 8 // w.bits if w.bits in (2, 4) else 1
    for item in range(count):
        code = codes >> item * w.bits & ((1 << w.bits) - 1)
        yield code, 1 << item % per_byte * w.bits, w.scales[item // w.group], w.biases[item // w.group]


@dataclass(frozen=True)
class WideQMV:
    """qmv_wide_impl."""

    lanes: int = 8
    chunk: int = 8
    narrowed: bool = False
    join: Callable[[list[float]], float] = tree

    def weights(self, row: Packed, shape: Shape) -> tuple[list[float], int]:
        narrow = ROUND[shape.dtype] if self.narrowed else f32
        return dequantised(row, shape.k, narrow), row.group

    def total(self, x: list[float], w: tuple[list[float], int], shape: Shape) -> float:
        values, group = w
        result = [0.0] * self.lanes
        for lane in range(self.lanes):
            for g in range(lane, shape.k // group, self.lanes):
                for start in range(g * group, (g + 1) * group, self.chunk):
                    acc = 0.0
                    for i in range(start, start + self.chunk):
                        acc = fma(x[i], values[i], acc)
                    result[lane] = add(result[lane], acc)
        return self.join(result)


@dataclass(frozen=True)
class Tile:
    """qmm_t_impl: 32 x 32 tiles of K, the weight rounded to the dtype when it is loaded."""

    old: bool = False
    in_place: bool = True
    narrowed: bool = True
    ascending: bool = True

    def weights(self, row: Packed, shape: Shape) -> list[float]:
        narrow = ROUND[shape.dtype] if self.narrowed else f32
        if self.old:
            return dequantised_in(row, shape.k, narrow, self.in_place)
        return dequantised(row, shape.k, narrow)

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        items = range(shape.k)
        return chain(x, w, items if self.ascending else items[::-1])


def _quantised_splits(m: int, n: int, k: int, group: int) -> int:
    tiles = ((n + 31) // 32) * ((m + 31) // 32)
    align = max(group, 32)
    splits = min(max(1, 512 // tiles), k // align)
    while splits > 1 and k % (splits * align) != 0:
        splits -= 1
    return splits


@dataclass(frozen=True)
class SplitTile:
    """qmm_splitk: qmm_t over ranges of K into partials of the dtype, which a column reduction adds."""

    old: bool = False
    partials_in_dtype: bool = True
    rows: int = 8
    other_splits: Callable[[int], int] = lambda splits: splits
    tree_of_many: bool = True
    tree_in_dtype: bool = False

    def weights(self, row: Packed, shape: Shape) -> tuple[list[float], int]:
        return Tile(old=self.old).weights(row, shape), row.group

    def total(self, x: list[float], w: tuple[list[float], int], shape: Shape) -> float:
        values, group = w
        splits = self.other_splits(_quantised_splits(shape.m, shape.n, shape.k, group))
        if splits <= 1:
            return chain(x, values, range(shape.k))
        narrow = ROUND[shape.dtype if self.partials_in_dtype else "float32"]
        size = shape.k // splits
        partials = [narrow(chain(x, values, range(s * size, (s + 1) * size))) for s in range(splits)]
        many = splits >= 32 and self.tree_of_many
        rows = [0.0] * (32 if many else min(self.rows, splits))
        for s, partial in enumerate(partials):
            rows[s % len(rows)] = narrow(rows[s % len(rows)] + partial)
        if not many:
            return reduce(lambda a, b: narrow(a + b), rows)
        # simd_sum of bfloat16 is one of floats (bf16_math.h); taken for the same of half.
        return tree(rows, narrow if self.tree_in_dtype else f32)


@dataclass(frozen=True)
class GEMV(DenseStatement):
    """GEMVKernel: simdgroups of ``SN`` lanes that take four items each; ``BN`` of them share a row."""

    four: int = 4
    join: Callable[[list[float]], float] = tree
    simdgroups: int = 8
    narrow_lanes: int = 4
    lanes: int = 32
    single_output: bool = True  # makes the rows the matrix

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        outputs = shape.m if shape.n == 1 and self.single_output else shape.n
        bn, sn = 1, self.lanes
        if shape.k <= 64:
            sn = self.narrow_lanes
        elif shape.k >= 16 * outputs:
            bn = self.simdgroups
        result = [0.0] * (bn * sn)
        for block in range(0, shape.k, bn * sn * self.four):
            for lane in range(bn * sn):
                for i in range(block + lane * self.four, block + (lane + 1) * self.four):
                    a, b = (w[i], x[i]) if i < shape.k else (0.0, 0.0)
                    result[lane] = fma(a, b, result[lane])
        return in_order([self.join(result[group * sn : (group + 1) * sn]) for group in range(bn)])


@dataclass(frozen=True)
class WideGEMV(DenseStatement):
    """GemvWide: blocks of four items; eight of a lane are added before they reach its total, later ones at once."""

    unroll: int = 8
    lanes: Callable[[int], int] = lambda lanes: lanes
    loose_tail: bool = True
    join: Callable[[list[float]], float] = tree

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        lanes = self.lanes(32 if shape.m <= 5 or shape.n <= 64 else 16)
        blocks = shape.k // 4
        main = blocks - blocks % (lanes * self.unroll)
        result = [0.0] * lanes
        for lane in range(lanes):
            for base in range(0, main, lanes * self.unroll):
                result[lane] = add(result[lane], self._dots(x, w, base + lane, lanes, self.unroll))
            tail = range(main + lane, blocks, lanes)
            if self.loose_tail:
                for block in tail:
                    result[lane] = add(result[lane], self._dots(x, w, block, lanes, 1))
            elif tail:
                result[lane] = add(result[lane], self._dots(x, w, tail[0], lanes, len(tail)))
        return self.join(result)

    def _dots(self, x: list[float], w: list[float], first: int, lanes: int, count: int) -> float:
        acc = 0.0
        for i in range(count):
            start = 4 * (first + i * lanes)
            dot = mul(w[start], x[start])
            for item in range(start + 1, start + 4):
                dot = fma(w[item], x[item], dot)
            acc = add(acc, dot)
        return acc


@dataclass(frozen=True)
class Steel(DenseStatement):
    """gemm of steel_gemm_fused.h with BK 16: K's last part tile comes first, filled up with zeros."""

    tail_first: bool = True
    ascending: bool = True

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        whole = shape.k // 16 * 16
        items = list(range(whole)) if self.ascending else list(range(whole))[::-1]
        tail = list(range(whole, shape.k))
        total = 0.0
        for i in tail + items if self.tail_first else items + tail:
            total = fma(x[i], w[i], total)
            if i == shape.k - 1 and tail:
                total = fma(0.0, 0.0, total)
        return total


@dataclass(frozen=True)
class SteelSplit(DenseStatement):
    """steel_gemm_splitk_axpby: P ranges of whole tiles, by K alone up to 0.30.0; the last takes what they leave."""

    other_splits: Callable[[int], int] = lambda splits: splits
    tile: int = 16
    own_tail: bool = False
    old: bool = False
    join: Callable[[list[float]], float] = in_order

    def splits(self, shape: Shape) -> int:
        tiles_of_k = shape.k // 16
        if self.old:
            return 2 if tiles_of_k < 16 else 4 if tiles_of_k < 32 else 8 if tiles_of_k < 64 else 16
        wanted = tiles_of_k // (((shape.m + 31) // 32) * ((shape.n + 31) // 32))
        power = 1
        while power < wanted:
            power *= 2
        return min(max(2, power), 32)

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        splits = self.other_splits(self.splits(shape))
        size = shape.k // self.tile // splits * self.tile
        ranges = [range(s * size, (s + 1) * size) for s in range(splits)]
        if self.own_tail:
            ranges.append(range(splits * size, shape.k))
        else:
            ranges[-1] = range((splits - 1) * size, shape.k)
        return self.join([0.0] + [chain(x, w, items) for items in ranges])


@dataclass(frozen=True)
class NaxSplit(DenseStatement):
    """steel_gemm_splitk_axpby_nax: ranges of a size that K decides, the last one shorter."""

    other_size: Callable[[int], int] = lambda size: size
    join: Callable[[list[float]], float] = in_order

    def total(self, x: list[float], w: list[float], shape: Shape) -> float:
        k = shape.k
        size = 4096
        if k <= 1024:
            size = k // 2
        elif k <= 2048:
            size = 1024
        elif k <= 4096:
            size = 2048
        size = self.other_size(size)
        ranges = [range(start, min(start + size, k)) for start in range(0, k, size)]
        return self.join([0.0] + [chain(x, w, items) for items in ranges])
