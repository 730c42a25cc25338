"""What becomes of a unit's sums, lane by lane: the formulas that quantised kernels end a unit with.

A unit's parts are chains; an accumulator adds the same number of them in order, most formulas have one a part. With the
accumulators a, coefficients c (per output) and input sums s (per row), ``fma`` where a product is added:

chain        the lane's total is one chain over all its terms
add          total + a
affine       total + fma(c0, a, c1 * s0); c0 is the scale and c1 the bias
scale        fma(c0, a, total)

q4_0         fma(d, (fma(-8, s0, a0) + a1) + ..., total)
q4_1         total + fma(d, (a0 + a1) + ..., m * s0)
q4_k         u = b0 * c0; u = fma(b1 * c1, 1/16, u); u = fma(b2, c2, u); u = fma(b3 * c3, 1/16, u), where
             b0 = fma(1/256, a1, a0) and so on; v = s0 * c4; v = fma(s1, c5, v) ...;
             total + fma(d, u, -(dmin * v)); d, dmin are c8, c9
q6_k         u = a0 * c0; u = fma(a1, c1, u) ...; fma(d, u, total); d is c4

With inputs quantised to 8 bits, so that accumulators are whole numbers and exact; x is the scale of an input block, y
its sum of inputs, n a sum of its codes:

q8_1         fma(d, fma(a, x, -4 * y), total)
q8_1_min2    total + fma(a, half(d * x), half(m * y) / 2); two threads share a block
q8_1_min4    total + fma(a, half(d * x), half(m * y) / 4)
q8_1_scale   fma(d * x, a, total)
q8_1_k       u = fma(x1, a1 * c1, fma(x0, a0 * c0, 0)); v = fma(x1, n1 * c3, fma(x0, n0 * c2, 0));
             total + fma(d, u, -(dmin * v)); d, dmin are c4, c5
q8_1_scales  fma(d, fma(x1, a1 * c1, fma(x0, a0 * c0, 0)), total); d is c2
tile         fma(a * d, x, total)
tile_min     fma(m, y, fma(d * x, a, total))
tile_scales  u = fma(a0 * c0 + a1 * c1, x0, 0); u = fma(a2 * c2 + a3 * c3, x1, u) ...; fma(u, d, total); d is c8
"""

from __future__ import annotations

from typing import NamedTuple

# Positions of a unit's items in a lane's order: a sum is of groups, a group of runs, a run of positions.
Runs = tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


class Join(NamedTuple):
    """A formula's number in the compiled loop; coefficients, input sums and accumulators that it takes a unit.

    How the input sums are made: ``runs``, if any, else in one go; for quantised inputs ``of`` says what each one is,
    the ``scale``, the ``sum`` or the sum of ``codes``, and of which accumulator's block.
    """

    code: int
    coefficients: int = 0
    sums: int = 0
    accumulators: int = 1
    runs: Runs = ()
    of: tuple[tuple[str, int], ...] = ()


(
    CHAIN, ADD, AFFINE, SCALE, Q4_0, Q4_K, Q6_K, Q8_1, Q8_1_MIN2, Q8_1_MIN4, Q8_1_SCALE, Q8_1_K, Q8_1_SCALES, TILE,
    TILE_MIN, TILE_SCALES,
) = range(16)  # fmt: skip

# Items in the order (half, pair, which of the pair); pairs of both halves in turn.
_PAIRS = ((tuple((half + pair, half + pair + 1) for pair in (0, 2, 4, 6) for half in (0, 8)),),)
# Items in the order (half, which of the pair, pair); the halves' sums are added at the end.
_HALVES = (tuple(tuple((half + pair, half + pair + 4) for pair in range(4)) for half in (0, 8)),)
# Items in the order (sub-block, which of the pair, pair); one after the other.
_EIGHTS = tuple((tuple((8 * block + item % 2 * 4 + item // 2,) for item in range(8)),) for block in range(4))
_BLOCK = (("scale", 0), ("sum", 0))

JOINS = {
    "chain": Join(CHAIN),
    "add": Join(ADD),
    "affine": Join(AFFINE, 2, 1),
    "scale": Join(SCALE, 1),
    "q4_0": Join(Q4_0, 1, 1, 4, _HALVES),
    "q4_0_pairs": Join(Q4_0, 1, 1, 2, _PAIRS),
    "q4_1": Join(AFFINE, 2, 1, 4, _HALVES),
    "q4_1_pairs": Join(AFFINE, 2, 1, 2, _PAIRS),
    "q4_k": Join(Q4_K, 10, 4, 8, _EIGHTS),
    "q6_k": Join(Q6_K, 5, 0, 4),
    "q8_1": Join(Q8_1, 1, 2, of=_BLOCK),
    "q8_1_min2": Join(Q8_1_MIN2, 2, 2, of=_BLOCK),
    "q8_1_min4": Join(Q8_1_MIN4, 2, 2, of=_BLOCK),
    "q8_1_scale": Join(Q8_1_SCALE, 1, 1, of=_BLOCK[:1]),
    "q8_1_k": Join(Q8_1_K, 6, 4, 2, of=(("scale", 0), ("scale", 1), ("codes", 0), ("codes", 1))),
    "q8_1_scales": Join(Q8_1_SCALES, 3, 2, 2, of=(("scale", 0), ("scale", 1))),
    "tile": Join(TILE, 1, 1, of=_BLOCK[:1]),
    "tile_min": Join(TILE_MIN, 2, 2, of=_BLOCK),
    "tile_scales": Join(TILE_SCALES, 9, 4, 8, of=tuple(("scale", 2 * block) for block in range(4))),
}
