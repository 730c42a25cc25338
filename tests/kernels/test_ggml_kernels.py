"""Candle's and ggml's block kernels against scalar statements of their sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ggml_integer_statements as integers
import ggml_statements as floats
import gguf
import harness
import numpy as np
import pytest
from ggml_statements import Block
from gguf.quants import dequantize, quantize
from harness import ROUND, f16
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from detdiff_kernels import Affine, Blocks, Dense, UnsupportedFormat, Weight, kernel
from detdiff_kernels.blocks import BLOCKS
from detdiff_kernels.errors import UnknownTensor, UnreadableGguf
from detdiff_kernels.gguf_blocks import read_blocks

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
    **{
        (f"ggml-cpu-repack/{name}", kind): repacked(kind)
        for kind in (*SMALL, *AFFINE)
        for name in ("gemv", "gemm")
    },
}


def stated(one: One, case: harness.Case) -> Float32:
    rows = rows_of(case.weight)
    m = len(case.x)
    found = [[ROUND[case.dtype](one(x, row, m)) for row in rows] for x in case.x.tolist()]
    return np.array(found, np.float32)


def computed(name: str, case: harness.Case) -> Float32:
    chosen = kernel(name)
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


@pytest.mark.parametrize(("name", "kind"), STATEMENTS)
@settings(max_examples=12)
@given(data=st.data())
def test_a_kernel_computes_what_its_statement_says(name: str, kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    with np.errstate(all="ignore"):
        expected = stated(STATEMENTS[name, kind], case)
    assert harness.differing(computed(name, case), expected) == 0


@settings(max_examples=40)
@given(case=harness.dense_cases((st.integers(1, 40) | st.integers(60, 700)).map(lambda half: 2 * half)))
def test_cuda_adds_dense_rows_in_warps(case: harness.Case) -> None:
    with np.errstate(all="ignore"):
        expected = stated(lambda x, row, m: floats.floats_mv(x, row, halves=case.dtype == "float16"), case)
    assert harness.differing(computed("ggml-cuda/mmvf", case), expected) == 0


@pytest.mark.parametrize("kind", BLOCKS)
@given(seed=st.integers(0, 2**32 - 1))
def test_blocks_stand_for_what_the_gguf_package_says(kind: str, seed: int) -> None:
    size = BLOCKS[kind][1]
    raw = np.random.default_rng(seed).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert harness.differing(Blocks(kind, raw).floats(), expected) == 0


def _tiny_scales(kind: str, name: str) -> harness.Case:
    weight = blocks(kind, 5, 2, 0, np.array([3e-4, 5e-4], np.float32))
    return harness.Case(harness.normals(3, weight.k), weight, "float32")


def _ties(kind: str, name: str) -> harness.Case:
    """Inputs halfway between two codes."""
    x = harness.normals(3, 256)
    x = np.round(x * 20) + np.float32(0.5)
    x[:, ::32] = 127
    return harness.Case(np.clip(x, -127, 127), blocks(kind, 5, 256 // BLOCKS[kind][0], 0), "float32")


def _plain(kind: str, name: str) -> harness.Case:
    # Enough rows and blocks for every lane, and for the last warp.
    return model_like(kind, 2 if name.endswith(("ext", "mmvq")) else 3, 5, 2304)


MUTATIONS: dict[str, tuple[str, str, One, Callable[[str, str], harness.Case]]] = {
    "ggml's sums for Candle's": ("candle-metal/mv", "Q4_0", mv("Q4_0", ggml=True), _plain),
    "Candle's sums for ggml's": ("ggml-metal/mv", "Q4_1", mv("Q4_1", ggml=False), _plain),
    "lanes in order": ("candle-metal/mv", "Q4_0", mv("Q4_0", ggml=False, reduce=floats.in_order), _plain),
    "no minimum": ("candle-metal/mv", "Q4_1", mv("Q4_0", ggml=False), _plain),
    "four simdgroups": ("candle-metal/mv", "Q8_0", mv("Q8_0", ggml=True), _plain),
    "one simdgroup": ("ggml-metal/mv", "Q8_0", mv("Q8_0", ggml=False), _plain),
    "other lanes": ("candle-metal/mv", "Q4_K", mv("Q4_K", ggml=False, lanes_first=False), _plain),
    "eight lanes for sixteen": ("ggml-metal/mv_ext", "Q4_0", lambda x, row, m: ext("Q4_0")(x, row, 3), _plain),
    "half inputs": ("candle-metal/mm", "Q8_0", mm("Q8_0", f16), _plain),
    "float inputs": ("ggml-metal/mm", "Q6_K", mm("Q6_K", floats.same), _plain),
    "exact halved scales": ("ggml-metal/mm", "Q4_K", mm("Q4_K", f16, cuda_numbers("Q4_K")), _tiny_scales),
    "exact halved scales of 32": ("candle-metal/mm", "Q4_0", mm("Q4_0", floats.same, cuda_numbers("Q4_0")), _tiny_scales),
    "two warps": ("ggml-cuda/mmvq", "Q4_0", mmvq("Q4_0", lambda m: 2), _plain),
    "two warps of superblocks": ("ggml-cuda/mmvq", "Q6_K", mmvq("Q6_K", lambda m: 2), _plain),
    "ties to even": ("ggml-cuda/mmvq", "Q8_0", mmvq("Q8_0", rounding=integers.even), _ties),
    "ties to even in tiles": ("ggml-cuda/mmq", "Q4_K", mmq("Q4_K", rounding=integers.even), _ties),
    "half scales": ("ggml-cuda/mmq", "Q8_0", mmq("Q8_0", float_scale=False), _plain),
    "ties away": ("ggml-cpu-repack/gemm", "Q4_0", repacked("Q4_0", rounding=integers.away), _ties),
    "tiles for vectors": ("ggml-cuda/mmvq", "Q4_K", mmq("Q4_K"), _plain),
}  # fmt: skip


@pytest.mark.parametrize("change", MUTATIONS)
def test_a_statement_of_another_order_is_told_apart(change: str) -> None:
    name, kind, other, operands = MUTATIONS[change]
    case = operands(kind, name)
    found = computed(name, case)
    assert harness.differing(found, stated(STATEMENTS[name, kind], case)) == 0
    assert harness.differing(found, stated(other, case)) > 0


def test_the_fifth_row_changes_the_warps_of_all() -> None:
    case = model_like("Q4_0", 5, 40, 2048)
    four = harness.Case(case.x[:4], case.weight, case.dtype)
    assert harness.differing(computed("ggml-cuda/mmvq", case)[:4], computed("ggml-cuda/mmvq", four)) > 0


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "affine4"])
def test_repacked_rows_are_the_same_alone_and_in_fours(kind: str) -> None:
    """Both kernels are written apart, and quantise rows in code of their own; their bits agree."""
    case = model_like(kind, 9, 40, 512)
    many, one = computed("ggml-cpu-repack/gemm", case), computed("ggml-cpu-repack/gemv", case)
    assert harness.differing(many, one) == 0


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize(
    "name", ["candle-metal/mv", "ggml-metal/mv", "ggml-cuda/mmvq", "ggml-cuda/mmq", "ggml-cpu-repack/gemv"]
)
def test_an_affine_weight_that_is_a_block_format_runs_as_one(name: str, kind: str) -> None:
    values = harness.normals(40, 256)
    weight = Blocks(kind, quantize(values, gguf.GGMLQuantizationType[kind]))
    parts, middle = weight.unpacked(), 8 if kind == "Q4_0" else 128
    codes = parts.codes.astype(np.int64) + (128 if kind == "Q8_0" else 0)
    twin = harness.affine(codes, parts.scale, parts.scale * np.float32(-middle), weight.bits)
    x = harness.normals(5, 256, seed=1)
    found, expected = (computed(name, harness.Case(x, held, "float32")) for held in (twin, weight))
    assert harness.differing(found, expected) == 0


@pytest.mark.parametrize(("name", "kind"), [("ggml-cuda/mmvq", "dense"), ("ggml-cpu-repack/gemm", "Q6_K")])
def test_a_format_without_an_order_is_refused(name: str, kind: str) -> None:
    with pytest.raises(UnsupportedFormat, match=name):
        kernel(name).stage(model_like(kind, 1, 3, 256).weight)


def _written(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    values = harness.normals(6, 64)
    writer.add_tensor("blk.0.ffn_up.weight", quantize(values, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.add_tensor("norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_blocks_are_read_from_a_file(tmp_path: Path) -> None:
    weight = read_blocks(_written(tmp_path / "m.gguf"), "blk.0.ffn_up.weight")
    expected = quantize(harness.normals(6, 64), gguf.GGMLQuantizationType.Q8_0)
    assert weight.kind == "Q8_0" and (weight.raw == expected).all()


def test_what_a_file_does_not_have_is_named(tmp_path: Path) -> None:
    path = _written(tmp_path / "m.gguf")
    with pytest.raises(UnknownTensor, match="did you mean norm.weight"):
        read_blocks(path, "norm.weigth")
    with pytest.raises(UnsupportedFormat, match="F32"):
        read_blocks(path, "norm.weight")
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:100])
    for name in ("cut.gguf", "missing.gguf"):
        with pytest.raises(UnreadableGguf, match=name):
            read_blocks(tmp_path / name, "norm.weight")
