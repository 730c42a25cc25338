"""Statements of Candle's and ggml's kernels by kernel and format, and operands for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ggml_integer_statements as integers
import ggml_statements as floats
import harness
import numpy as np
from ggml_statements import Block
from harness import ROUND, f16
from hypothesis import strategies as st
from numpy.typing import NDArray

from detdiff_kernels import Affine, Blocks, Dense, Weight
from detdiff_kernels.weights import BLOCKS

Float32 = NDArray[np.float32]
One = Callable[[list[float], Any, int], float]
SMALL = ("Q4_0", "Q4_1", "Q8_0")
AFFINE = ("affine2", "affine3", "affine4", "affine5", "affine6", "affine8", "centred4", "centred8")


def rows_of(weight: Weight) -> list[Any]:
    """What a statement is given of an output: bytes of K blocks, blocks of 32, or numbers."""
    if isinstance(weight, Dense):
        return weight.floats().tolist()
    if isinstance(weight, Blocks):
        raw = [row.tobytes() for row in weight.raw]
        return [floats.small_blocks(weight.kind, row) for row in raw] if weight.kind in SMALL else raw
    scale, bias = (np.repeat(array, weight.group_size // 32, 1) for array in (weight.scales, weight.biases))
    return [
        [Block(codes, d, m) for codes, d, m in zip(row, ds, ms, strict=True)]
        for row, ds, ms in zip(
            weight.codes().reshape(weight.n, -1, 32).tolist(), scale.tolist(), bias.tolist(), strict=True
        )
    ]


def numbers(row: list[Block]) -> list[float]:
    """An affine row, each number rounded once."""
    return [harness.fma(block.d, code, block.m) for block in row for code in block.codes]


def signed(row: list[Block]) -> list[Block]:
    return [Block([code - 128 for code in block.codes], block.d) for block in row]


def metal(kind: str) -> Callable[[Any], list[float]]:
    if kind in SMALL:
        return partial(floats.metal_small, kind)
    if kind in AFFINE:
        return numbers
    return {"Q4_K": partial(floats.q4_k_numbers, metal=True), "Q6_K": floats.q6_k_numbers, "dense": list}[
        kind
    ]


def mv(kind: str, ggml: bool, **change: Any) -> One:
    if kind in ("Q4_0", "Q4_1", "affine4", "centred4"):
        minimum = kind in ("Q4_1", "affine4")
        change = {"minimum": minimum, "pairs": not ggml} | change
        return lambda x, row, m: floats.nibbles_mv(x, row, **change)
    if kind in ("Q8_0", "affine8", "centred8"):
        change = {"groups": 4 if ggml else 1, "minimum": kind == "affine8"} | change
        return lambda x, row, m: floats.q8_0_mv(x, signed(row) if kind == "centred8" else row, **change)
    if kind == "Q4_K":
        return lambda x, row, m: floats.q4_k_mv(x, row, **change)
    if kind == "Q6_K":
        return lambda x, row, m: floats.q6_k_mv(x, row)
    unpack: Callable[[Any], list[float]] = list if kind == "dense" else numbers
    if ggml:
        return lambda x, row, m: floats.dense_mv(x, unpack(row))
    return lambda x, row, m: gemv(x, unpack(row))


def gemv(x: list[float], w: list[float]) -> float:
    missing = [0.0] * (-len(x) % 128)
    lanes = [0.0] * 32
    for i, (a, b) in enumerate(zip(x + missing, w + missing, strict=True)):
        lanes[i // 4 % 32] = harness.fma(a, b, lanes[i // 4 % 32])
    return harness.tree(lanes)


def ext(kind: str) -> One:
    unpack = metal(kind)
    return lambda x, row, m: floats.ext(x, unpack(row), m, sixteens=kind in ("Q4_K", "Q6_K"))


def mm(
    kind: str, inputs: Callable[[float], float], unpack: Callable[[Any], list[float]] | None = None
) -> One:
    numbers_of = unpack or metal(kind)
    return lambda x, row, m: floats.tiles(x, numbers_of(row), weights=f16, inputs=inputs)


def cuda_numbers(kind: str) -> Callable[[Any], list[float]]:
    if kind == "Q4_K":
        return partial(floats.q4_k_numbers, metal=False)
    if kind == "Q4_0":
        return lambda row: [harness.mul(code - 8, block.d) for block in row for code in block.codes]
    return numbers if kind == "Q4_1" else metal(kind)


def _walked(kind: str) -> str:
    """The format whose code an affine weight runs through."""
    if kind.startswith("centred"):
        return f"Q{kind[-1]}_0"
    return kind if not kind.startswith("affine") else "Q4_1" if int(kind[-1]) <= 4 else "wide"


def mmvq(kind: str, warps: Callable[[int], int] = integers.warps_for, **change: Any) -> One:
    def one(x: list[float], row: Any, m: int) -> float:
        inputs = integers.cuda_inputs(x, **change)
        if kind in ("Q4_K", "Q6_K"):
            whole = integers.q4_k_mmvq if kind == "Q4_K" else integers.q6_k_mmvq
            return whole(inputs, row, warps=warps(m))
        blocks = signed(row) if kind == "centred8" else row
        return integers.small_mmvq(_walked(kind), inputs, blocks, warps=warps(m))

    return one


def mmq(kind: str, **change: Any) -> One:
    def one(x: list[float], row: Any, m: int) -> float:
        floating = _walked(kind) in ("Q8_0", "Q6_K")
        inputs = integers.cuda_tile_inputs(x, **({"float_scale": floating} | change))
        if kind in ("Q4_K", "Q6_K"):
            return (integers.q4_k_mmq if kind == "Q4_K" else integers.q6_k_mmq)(inputs, row)
        return integers.small_mmq(_walked(kind), inputs, signed(row) if kind == "centred8" else row)

    return one


def repacked(kind: str, **change: Any) -> One:
    return lambda x, row, m: integers.repacked(
        _walked(kind), integers.cpu_inputs(x, **change), signed(row) if kind == "centred8" else row
    )


ALL = (*BLOCKS, *AFFINE)
STATEMENTS: dict[tuple[str, str], One] = {
    **{("candle-metal/mv", kind): mv(kind, ggml=False) for kind in (*ALL, "dense")},
    **{("candle-metal/mm", kind): mm(kind, floats.same) for kind in (*ALL, "dense")},
    **{("ggml-metal/mv", kind): mv(kind, ggml=True) for kind in (*ALL, "dense")},
    **{("ggml-metal/mv_ext", kind): ext(kind) for kind in (*ALL, "dense")},
    **{("ggml-metal/mm", kind): mm(kind, f16) for kind in ALL},
    **{("ggml-cuda/mmvq", kind): mmvq(kind) for kind in ALL},
    **{("ggml-cuda/mmq", kind): mmq(kind) for kind in ALL},
    **{("ggml-cuda/cublas", kind): mm(kind, f16, cuda_numbers(kind)) for kind in ALL},
    ("ggml-cuda/cublas", "dense"): lambda x, row, m: floats.tiles(
        x, row, weights=floats.same, inputs=floats.same
    ),
    **{
        (f"ggml-cpu-repack/{name}", kind): repacked(kind)
        for kind in (*SMALL, *AFFINE)
        for name in ("gemv", "gemm")
    },
}


def backwards(one: One) -> One:
    """A statement about numbers, taken from the end of the row; of blocks of 32."""

    def other(x: list[float], row: list[Block], m: int) -> float:
        return one(x[::-1], [block.d * code for block in row for code in block.codes][::-1], m)

    return other


def stated(one: One, case: harness.Case) -> Float32:
    rows = rows_of(case.weight)
    m = len(case.x)
    found = [[ROUND[case.dtype](one(x, row, m)) for row in rows] for x in case.x.tolist()]
    return np.array(found, np.float32)


def computed(name: str, case: harness.Case) -> Float32:
    chosen = harness.linear(name)
    return chosen(case.x, chosen.stage(case.weight, case.dtype))


def blocks(kind: str, n: int, count: int, seed: int, scales: Float32 | None = None) -> Blocks:
    """Random codes; scales like a model's, or drawn from ``scales``."""
    rng = np.random.default_rng(seed)
    size = BLOCKS[kind][1]
    raw = rng.integers(0, 256, (n, count, size), dtype=np.uint8)
    for at in {"Q4_0": [0], "Q8_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[kind]:
        values = rng.uniform(-0.01, 0.02, (n, count)) if scales is None else rng.choice(scales, (n, count))
        halves = np.ascontiguousarray(values.astype(np.float16)[:, :, None])
        raw[:, :, at : at + 2] = halves.view(np.uint8)
    return Blocks(kind, raw.reshape(n, -1))


def centred(weight: Affine) -> Affine:
    middle = np.float32(-(1 << weight.bits - 1))
    return Affine(weight.packed, weight.scales, weight.scales * middle, weight.bits, weight.group_size)


EDGES = np.array(
    [0, -0.0, 1, 2.0**-24, 3 * 2.0**-24, 2.0**-14, 2.0**-11, 8200, 65504, -65504, np.inf, np.nan], np.float32
)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> harness.Case:
    size = BLOCKS[kind][0] if kind in BLOCKS else 32
    widths = st.integers(1, 3 if size == 256 else 6) | st.sampled_from(
        [5, 9] if size == 256 else [18, 40, 68]
    )
    if kind.startswith("affine"):
        wide = widths.map(lambda count: 32 * count)
        return draw(harness.affine_cases(wide, (int(kind[-1]),), most=2500))
    base = draw(harness.dense_cases(widths.map(lambda count: size * count), most=2500))
    if kind == "dense":
        return base
    n, k, seed = base.weight.n, base.weight.k, draw(st.integers(0, 2**32 - 1))
    if kind.startswith("centred"):
        weight: Weight = centred(harness.random_affine(n, k, int(kind[-1]), 32, base.dtype, seed))
    else:
        scales = draw(st.sampled_from([None, EDGES[:7], EDGES]))
        weight = blocks(kind, n, k // size, seed, scales)
    return harness.Case(base.x, weight, base.dtype)


def model_like(kind: str, m: int, n: int, k: int, dtype: str = "float32", seed: int = 0) -> harness.Case:
    x = harness.normals(m, k, seed=seed, dtype=dtype)
    if kind == "dense":
        weight: Weight = harness.dense(harness.normals(n, k, seed=seed + 1, dtype=dtype), dtype)
    elif kind in BLOCKS:
        weight = blocks(kind, n, k // BLOCKS[kind][0], seed)
    else:
        weight = harness.random_affine(n, k, int(kind[-1]), 32, dtype, seed)
        weight = centred(weight) if kind.startswith("centred") else weight
    return harness.Case(x, weight, dtype)


def floats_mv(dtype: str, x: list[float], row: list[float], m: int) -> float:
    """A row of dense weights under CUDA."""
    return floats.floats_mv(x, row, halves=dtype == "float16")
