"""The compiled loops that the orders share: one for sums spread over lanes, one for a chain per output.

Both fill the outputs ``first`` to ``last - 1`` of every row, so that a caller can split the outputs over
threads. Four sums run side by side to hide the latency of an FMA; they share loaded weights (or inputs) and
nothing else, so a sum does not depend on its neighbours. Where fewer than four are left the last one is
computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from numba import float32, intp, types, uint16, void

from . import simd
from .simd import chain_step, halving_sum, lane_last_step, lane_step, store_first, zeros

Loop = Callable[..., None]

_FLAT_IN = types.Array(float32, 1, "C", readonly=True)
_FLAT_HALF = types.Array(uint16, 1, "C", readonly=True)
_FLAT_OUT = types.Array(float32, 1, "C")
_SIZES = (intp, intp, intp, intp, intp)
_SUM = [void(_FLAT_IN, weight, _FLAT_OUT, *_SIZES) for weight in (_FLAT_IN, _FLAT_HALF)]
_TURN = [void(_FLAT_IN, _FLAT_OUT, intp, intp)]

# numba's cache on disk sees changes of this file only; code made from older vector operations must not be
# found again.
_OPERATIONS = sha256(Path(simd.__file__).read_bytes()).hexdigest()[:12]


def _compiled(loop: Loop, signatures: list[Any]) -> Loop:
    loop.__qualname__ += f"_{_OPERATIONS}"
    made: Loop = numba.njit(signatures, cache=True, nogil=True)(loop)
    return made


@cache
def turn_loop(lanes: int, values: int) -> Loop:
    """Lays each row of x out by turn: of every step all lanes' first items, then all second ones, and so on.

    The loop takes flat x (m*k), flat out (m * k rounded up to whole steps), m, k; missing items become +0.0.
    """
    step = lanes * values

    def loop(x: Any, out: Any, m: int, k: int) -> None:
        stride = -(-k // step) * step
        for row in range(m):
            for i in range(stride):
                turn, lane = divmod(i % step, lanes)
                item = i - i % step + lane * values + turn
                out[row * stride + i] = x[row * k + item] if item < k else numba.float32(0.0)

    return _compiled(loop, _TURN)


@cache
def lane_loop(lanes: int, values: int) -> Loop:
    """Each output is a sum over ``lanes`` lanes that take ``values`` consecutive items a step, then halve.

    The loop takes flat x by turn, flat weights (n*k, float32 or float16 bits), flat out (m*n), m, n, k,
    first, last.
    """
    step = lanes * values

    def loop(x: Any, w: Any, out: Any, m: int, n: int, k: int, first: int, last: int) -> None:
        whole = k - k % step
        stride = -(-k // step) * step
        if m == 1:
            for output in range(first, last, 4):
                w0 = output * k
                w1 = min(output + 1, last - 1) * k
                w2 = min(output + 2, last - 1) * k
                w3 = min(output + 3, last - 1) * k
                sum0 = sum1 = sum2 = sum3 = zeros(lanes)
                for i in range(0, whole, step):
                    sum0 = lane_step(sum0, x, i, w, w0 + i, values)
                    sum1 = lane_step(sum1, x, i, w, w1 + i, values)
                    sum2 = lane_step(sum2, x, i, w, w2 + i, values)
                    sum3 = lane_step(sum3, x, i, w, w3 + i, values)
                if whole < k:
                    left = k - whole
                    sum0 = lane_last_step(sum0, x, whole, w, w0 + whole, values, left)
                    sum1 = lane_last_step(sum1, x, whole, w, w1 + whole, values, left)
                    sum2 = lane_last_step(sum2, x, whole, w, w2 + whole, values, left)
                    sum3 = lane_last_step(sum3, x, whole, w, w3 + whole, values, left)
                out[output] = halving_sum(sum0)
                out[min(output + 1, last - 1)] = halving_sum(sum1)
                out[min(output + 2, last - 1)] = halving_sum(sum2)
                out[min(output + 3, last - 1)] = halving_sum(sum3)
            return
        for output in range(first, last):
            place = output * k
            for row in range(0, m, 4):
                row1 = min(row + 1, m - 1)
                row2 = min(row + 2, m - 1)
                row3 = min(row + 3, m - 1)
                sum0 = sum1 = sum2 = sum3 = zeros(lanes)
                for i in range(0, whole, step):
                    sum0 = lane_step(sum0, x, row * stride + i, w, place + i, values)
                    sum1 = lane_step(sum1, x, row1 * stride + i, w, place + i, values)
                    sum2 = lane_step(sum2, x, row2 * stride + i, w, place + i, values)
                    sum3 = lane_step(sum3, x, row3 * stride + i, w, place + i, values)
                if whole < k:
                    left = k - whole
                    sum0 = lane_last_step(sum0, x, row * stride + whole, w, place + whole, values, left)
                    sum1 = lane_last_step(sum1, x, row1 * stride + whole, w, place + whole, values, left)
                    sum2 = lane_last_step(sum2, x, row2 * stride + whole, w, place + whole, values, left)
                    sum3 = lane_last_step(sum3, x, row3 * stride + whole, w, place + whole, values, left)
                out[row * n + output] = halving_sum(sum0)
                out[row1 * n + output] = halving_sum(sum1)
                out[row2 * n + output] = halving_sum(sum2)
                out[row3 * n + output] = halving_sum(sum3)

    return _compiled(loop, _SUM)


@cache
def chain_loop(width: int) -> Loop:
    """Each output is one chain of FMAs in ascending k; ``width`` neighbouring outputs run in one vector.

    The loop takes flat x (m*k), flat weights in panels (panel, k, output within the panel), flat out (m*n),
    m, n, k, first, last; first and last count panels here.
    """

    def loop(x: Any, w: Any, out: Any, m: int, n: int, k: int, first: int, last: int) -> None:
        for panel in range(first, last):
            place = panel * k * width
            output = panel * width
            count = min(width, n - output)
            if m == 1:
                total = zeros(width)
                for i in range(k):
                    total = chain_step(total, x, i, w, place + i * width)
                store_first(total, out, output, count)
                continue
            for row in range(0, m, 4):
                row1 = min(row + 1, m - 1)
                row2 = min(row + 2, m - 1)
                row3 = min(row + 3, m - 1)
                sum0 = sum1 = sum2 = sum3 = zeros(width)
                for i in range(k):
                    at = place + i * width
                    sum0 = chain_step(sum0, x, row * k + i, w, at)
                    sum1 = chain_step(sum1, x, row1 * k + i, w, at)
                    sum2 = chain_step(sum2, x, row2 * k + i, w, at)
                    sum3 = chain_step(sum3, x, row3 * k + i, w, at)
                store_first(sum0, out, row * n + output, count)
                store_first(sum1, out, row1 * n + output, count)
                store_first(sum2, out, row2 * n + output, count)
                store_first(sum3, out, row3 * n + output, count)

    return _compiled(loop, _SUM)
