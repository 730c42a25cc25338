"""Candle's and ggml's matmul kernels said one scalar operation at a time, thread by thread, as their sources write them.

Nothing here knows how the library describes an order. A product that is added is fused into the sum; of two products that
are added the right one is rounded first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from harness import add, f16, f32, fma, fma_in, mul, tree

Row = list[float]
Reduce = Callable[[Row], float]


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


@dataclass(frozen=True)
class Block:
    """32 codes of a Q4_0, Q4_1 or Q8_0 block or of an affine group: unsigned, or signed for Q8_0."""

    codes: list[int]
    d: float
    m: float = 0.0


def small_blocks(kind: str, row: bytes) -> list[Block]:
    """A row of bytes of Q4_0, Q4_1 or Q8_0 blocks."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    found = []
    for at in range(0, len(row), size):
        block = row[at : at + size]
        if kind == "Q8_0":
            found.append(Block(list(struct.unpack_from("32b", block, 2)), half(block, 0)))
            continue
        packed = block[4:] if kind == "Q4_1" else block[2:]
        codes = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        found.append(Block(codes, half(block, 0), half(block, 2) if kind == "Q4_1" else 0.0))
    return found


def dot4(x: Row, w: Row) -> float:
    """A chain from +0.0."""
    total = 0.0
    for a, b in zip(x, w, strict=True):
        total = fma(a, b, total)
    return total


def in_order(sums: Row) -> float:
    total = sums[0]
    for one in sums[1:]:
        total = add(total, one)
    return total


def with_missing(sums: Row) -> float:
    """Sums of groups of 32 lanes, as one more such sum over 32 of them, the missing ones +0.0."""
    groups = [tree(sums[first : first + 32]) for first in range(0, len(sums), 32)]
    return tree(groups + [0.0] * (32 - len(groups)))


# Metal, one row.


def nibbles_mv(x: Row, blocks: list[Block], *, minimum: bool, pairs: bool, reduce: Reduce = tree) -> float:
    """mul_vec_q_n_f32_impl with block_q_n_dot_y; ``pairs`` as Candle has it, else as ggml."""
    lanes = []
    for lane in range(32):
        total, il = 0.0, lane % 2 * 8
        for ib in range(lane // 2, len(blocks), 16):
            y, q, d, m = x[ib * 32 + il :][:24], blocks[ib].codes, blocks[ib].d, blocks[ib].m
            low = high = both = 0.0
            yl, ql = [0.0] * 16, [0] * 16
            for i in range(0, 8, 2):
                first, second = add(y[i], y[i + 1]), add(y[i + 16], y[i + 17])
                both = add(add(both, first), second)
                low, high = add(low, first), add(high, second)
                yl[i], yl[i + 1] = y[i], f32(y[i + 1] / 256)
                yl[i + 8], yl[i + 9] = f32(y[i + 16] / 16), f32(y[i + 17] / 4096)
                ql[i], ql[i + 1] = q[il + i], q[il + i + 1] << 8
                ql[i + 8], ql[i + 9] = q[il + i + 16] << 4, q[il + i + 17] << 12
            if pairs:
                sums, s = [0.0, 0.0], both
                for i in range(0, 16, 2):
                    pair = fma(yl[i + 1], ql[i + 1], mul(yl[i], ql[i]))
                    sums[i // 8] = add(sums[i // 8], pair)
            else:
                sums, s = [0.0] * 4, add(low, high)
                for i in range(16):
                    at = i // 8 * 2 + i % 2
                    sums[at] = fma(yl[i], ql[i], sums[at])
            if minimum:
                total = add(total, fma(d, in_order(sums), mul(m, s)))
            else:
                total = fma(d, in_order([fma(s, -8.0, sums[0])] + sums[1:]), total)
        lanes.append(total)
    return reduce(lanes)


def q8_0_mv(x: Row, blocks: list[Block], *, groups: int, minimum: bool = False) -> float:
    lanes = []
    for lane in range(32 * groups):
        total, il = 0.0, lane % 4 * 8
        for ib in range(lane // 4, len(blocks), 8 * groups):
            y, q = x[ib * 32 + il :][:8], blocks[ib].codes[il : il + 8]
            product = dot4(y, [float(code) for code in q])
            if minimum:
                s = 0.0
                for one in y:
                    s = add(s, one)
                total = add(total, fma(blocks[ib].d, product, mul(blocks[ib].m, s)))
            else:
                total = fma(product, blocks[ib].d, total)
        lanes.append(total)
    return tree(lanes) if groups == 1 else with_missing(lanes)


def q4_k_scales(block: bytes) -> tuple[list[int], list[int]]:
    """get_scale_min_k4 for all eight sub-blocks."""
    q = block[4:16]
    scales = [q[j] & 63 if j < 4 else q[j + 4] & 15 | q[j - 4] >> 6 << 4 for j in range(8)]
    minima = [q[j + 4] & 63 if j < 4 else q[j + 4] >> 4 | q[j] >> 6 << 4 for j in range(8)]
    return scales, minima


def q4_k_mv(x: Row, row: bytes, *, lanes_first: bool = True) -> float:
    blocks = [row[at : at + 144] for at in range(0, len(row), 144)]
    lanes = []
    for lane in range(32):
        ix, it = (lane // 8, lane % 8) if lanes_first else (lane % 4, lane // 4)
        iq, ir = it // 4, it % 4
        total = 0.0
        for ib in range(ix, len(blocks), 4):
            block, y = blocks[ib], x[ib * 256 + 64 * iq + 8 * ir :]
            d, dmin = half(block, 0), half(block, 2)
            scales, minima = q4_k_scales(block)
            acc, sumy = [0.0] * 8, [0.0] * 4
            for i in range(8):
                for nth, far in enumerate((0, 32, 128, 160)):
                    sumy[nth] = add(sumy[nth], y[i + far])
            words = struct.unpack_from("<64H", block, 16)
            for side, far in ((0, 0), (1, 128)):
                for i in range(4):
                    word = words[16 * iq + 4 * ir + 32 * side + i]
                    for nth, (item, mask) in enumerate(((0, 0xF), (1, 0xF00), (32, 0xF0), (33, 0xF000))):
                        at = 4 * side + nth
                        acc[at] = fma(y[far + 2 * i + item], word & mask, acc[at])
            sub = [2 * iq, 2 * iq + 1, 2 * iq + 4, 2 * iq + 5]
            b = [fma(1 / 256, acc[2 * nth + 1], acc[2 * nth]) for nth in range(4)]
            u = mul(b[0], scales[sub[0]])
            u = fma(mul(b[1], scales[sub[1]]), 1 / 16, u)
            u = fma(b[2], scales[sub[2]], u)
            u = fma(mul(b[3], scales[sub[3]]), 1 / 16, u)
            v = mul(sumy[0], minima[sub[0]])
            for nth in range(1, 4):
                v = fma(sumy[nth], minima[sub[nth]], v)
            total = add(total, fma(d, u, -mul(dmin, v)))
        lanes.append(total)
    return tree(lanes)


def q6_k_codes(block: bytes) -> list[int]:
    """dequantize_row_q6_K's q for all 256 items."""
    codes = [0] * 256
    for n in range(2):
        ql, qh = block[64 * n :], block[128 + 32 * n :]
        for item in range(32):
            codes[128 * n + item] = (ql[item] & 15 | (qh[item] & 3) << 4) - 32
            codes[128 * n + item + 32] = (ql[item + 32] & 15 | (qh[item] >> 2 & 3) << 4) - 32
            codes[128 * n + item + 64] = (ql[item] >> 4 | (qh[item] >> 4 & 3) << 4) - 32
            codes[128 * n + item + 96] = (ql[item + 32] >> 4 | (qh[item] >> 6 & 3) << 4) - 32
    return codes


def q6_k_mv(x: Row, row: bytes) -> float:
    blocks = [row[at : at + 210] for at in range(0, len(row), 210)]
    lanes = []
    for lane in range(32):
        tid, ix = lane // 2, lane % 2
        ip, il = tid // 8, tid % 8
        l0 = 4 * il
        total = 0.0
        for i in range(ix, len(blocks), 2):
            block, y = blocks[i], x[i * 256 + 128 * ip + l0 :]
            sc = struct.unpack_from("16b", block, 192)[8 * ip + l0 // 16 :]
            codes, sums = q6_k_codes(block), [0.0] * 4
            for step in range(4):
                for nth in range(4):
                    code = codes[128 * ip + l0 + step + 32 * nth]
                    sums[nth] = fma(y[step + 32 * nth], code, sums[nth])
            u = mul(sums[0], sc[0])
            for nth in range(1, 4):
                u = fma(sums[nth], sc[2 * nth], u)
            total = fma(half(block, 208), u, total)
        lanes.append(total)
    return tree(lanes)


def dense_mv(x: Row, w: Row, *, most: int = 4) -> float:
    """kernel_mul_mv_t_t_4, _t_t and _t_t_short in ``most`` simdgroups at the most; a block that a lane does not have
    counts as +0.0."""
    k = len(x)
    if k < 32:
        return dot4(x, w)
    groups, nb = min(most, (k + 127) // 128), k // 32
    nf = 16 if k % 4 == 0 else 8
    lanes = []
    for lane in range(32 * groups):
        sg, tiisg = lane // 32, lane % 32
        total = 0.0
        il = tiisg % (32 // nf) * nf
        for ib in range(sg * nf + tiisg // (32 // nf), nb, groups * nf):
            at, q = ib * 32 + il, 0.0
            for i in range(0, nf, 4 if nf == 16 else 8):
                width = 4 if nf == 16 else 8
                one = dot4(x[at + i : at + i + width], w[at + i : at + i + width])
                q = add(q, one) if nf == 16 else one
            total = add(total, q)
        for i in range(nb * 32 + lane, k, 32 * groups):
            total = add(total, mul(x[i], w[i]))
        lanes.append(total)
    return with_missing(lanes)


# Metal, several rows: what the dequantisers make of a row.


def metal_small(kind: str, blocks: list[Block]) -> Row:
    found = []
    for block in blocks:
        for item, code in enumerate(block.codes):
            d1 = f16(block.d / 16) if item >= 16 else block.d
            at = code << 4 if item >= 16 else code
            if kind == "Q8_0":
                found.append(mul(code, block.d))
            else:
                found.append(fma(d1, at, f16(-8 * block.d) if kind == "Q4_0" else block.m))
    return found


def q4_k_numbers(row: bytes, *, metal: bool) -> Row:
    found = []
    for at in range(0, len(row), 144):
        block = row[at : at + 144]
        scales, minima = q4_k_scales(block)
        for sub in range(8):
            upper = sub % 2
            d = f16(half(block, 0) / 16) if upper and metal else half(block, 0)
            dl, ml = mul(d, scales[sub]), mul(half(block, 2), minima[sub])
            for byte in block[16 + sub // 2 * 32 :][:32]:
                code = byte >> 4 if upper else byte & 15
                found.append(fma(dl, code * 16 if upper and metal else code, -ml))
    return found


def q6_k_numbers(row: bytes) -> Row:
    found = []
    for at in range(0, len(row), 210):
        block = row[at : at + 210]
        scales = struct.unpack_from("16b", block, 192)
        for item, code in enumerate(q6_k_codes(block)):
            dl = mul(half(block, 208), scales[item // 16])
            found.append(mul(dl, code))
    return found


def ext(x: Row, w: Row, m: int, *, sixteens: bool) -> float:
    """kernel_mul_mv_ext_q4_f32_impl, and with ``sixteens`` _q4x4_."""
    lanes = 16 if len(x) % 256 == 0 and m < 3 else 8 if len(x) % 128 == 0 else 4
    width = 16 if sixteens else 4
    sums = []
    for tx in range(lanes):
        total = 0.0
        for at in range(tx * width, len(x), lanes * width):
            dots = [dot4(x[i : i + 4], w[i : i + 4]) for i in range(at, at + width, 4)]
            total = add(total, in_order(dots))
        sums.append(total)
    return tree(sums)


def tiles(x: Row, w: Row, *, weights: Callable[[float], float], inputs: Callable[[float], float]) -> float:
    return dot4([inputs(one) for one in x], [weights(one) for one in w])


def same(value: float) -> float:
    return value


# CUDA, dense.


def floats_mv(x: Row, w: Row, *, halves: bool, most: int = 256) -> float:
    """mul_mat_vec_f, with ``most`` threads at the most."""
    best = min(range(32, most + 1, 32), key=lambda size: ((len(x) + 2 * size - 1) // (2 * size), size))
    dtype = "float16" if halves else "float32"
    lanes = []
    for tid in range(best):
        sums = [0.0, 0.0]
        for column in range(2 * tid, len(x), 2 * best):
            for item in (0, 1):
                at = item if halves else 0
                sums[at] = fma_in(x[column + item], w[column + item], sums[at], dtype)
        lanes.append(add(sums[0], sums[1]) if halves else sums[0])
    return tree(lanes) if best == 32 else with_missing(lanes)
