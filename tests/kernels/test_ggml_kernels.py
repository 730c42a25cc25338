"""Candle's and ggml's block kernels against scalar statements of their sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import ggml_integer_statements as integers
import ggml_statements as floats
import gguf
import harness
import numpy as np
import pytest
from ggml_cases import (
    STATEMENTS,
    One,
    backwards,
    blocks,
    cases,
    computed,
    cuda_numbers,
    ext,
    floats_mv,
    mm,
    mmq,
    mmvq,
    model_like,
    mv,
    repacked,
    stated,
)
from gguf.quants import dequantize, quantize
from harness import f16
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, first_of_each, some_now

from detdiff_kernels import Blocks, UnsupportedFormat, kernel, kernel_names
from detdiff_kernels.errors import UnknownTensor, UnreadableGguf
from detdiff_kernels.gguf_file import read_blocks
from detdiff_kernels.weights import BLOCKS


# In the first tier a format a kernel and a kernel a format: each pair compiles a loop of its own.
@pytest.mark.parametrize(
    ("name", "kind"),
    some_now(
        STATEMENTS,
        *first_of_each(name for name, _ in STATEMENTS),
        *first_of_each(kind for _, kind in STATEMENTS),
    ),
)
@settings(max_examples=examples(12))
@given(data=st.data())
def test_a_kernel_computes_what_its_statement_says(name: str, kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    with np.errstate(all="ignore"):
        expected = stated(STATEMENTS[name, kind], case)
    assert harness.differing(computed(name, case), expected) == 0


@settings(max_examples=examples(40))
@given(case=harness.dense_cases((st.integers(1, 40) | st.integers(60, 700)).map(lambda half: 2 * half)))
def test_cuda_adds_dense_rows_in_warps(case: harness.Case) -> None:
    with np.errstate(all="ignore"):
        expected = stated(partial(floats_mv, case.dtype), case)
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
    "repacked blocks backwards": (
        "ggml-cpu-repack/gemm", "Q4_0",
        lambda x, row, m: integers.repacked("Q4_0", integers.cpu_inputs(x)[::-1], row[::-1]), _plain,
    ),
    "ties away of a row": ("ggml-cpu-repack/gemv", "Q8_0", repacked("Q8_0", rounding=integers.away), _ties),
    "tiles for a repacked row": ("ggml-cpu-repack/gemv", "Q4_1", mmq("Q4_1"), _plain),
    "one simdgroup of floats": ("ggml-metal/mv", "dense", lambda x, row, m: floats.dense_mv(x, row, most=1), _plain),
    "four lanes of floats for 32": ("candle-metal/mv", "dense", ext("dense"), _plain),
    "float inputs for cuBLAS": ("ggml-cuda/cublas", "Q4_0", mm("Q4_0", floats.same, cuda_numbers("Q4_0")), _plain),
    "cuBLAS backwards": ("ggml-cuda/cublas", "Q8_0", backwards(mm("Q8_0", f16, list)), _plain),
    "tiles backwards": ("ggml-metal/mm", "Q8_0", backwards(mm("Q8_0", f16, list)), _plain),
    "one lane of 16": ("ggml-metal/mv_ext", "Q4_K", mm("Q4_K", floats.same), _plain),
    "one warp of floats": (
        "ggml-cuda/mmvf", "dense", lambda x, row, m: floats.floats_mv(x, row, halves=False, most=32), _plain,
    ),
    "a slot for each of two": (
        "ggml-cuda/mmvf", "dense", lambda x, row, m: floats.floats_mv(x, row, halves=True), _plain,
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", MUTATIONS)
def test_a_statement_of_another_order_is_told_apart(change: str) -> None:
    name, kind, other, operands = MUTATIONS[change]
    case = operands(kind, name)
    found = computed(name, case)
    right = {"ggml-cuda/mmvf": partial(floats_mv, case.dtype)}.get(name) or STATEMENTS[name, kind]
    assert harness.differing(found, stated(right, case)) == 0
    assert harness.differing(found, stated(other, case)) > 0


def test_every_kernel_has_two_mutations() -> None:
    names = [name for name in kernel_names() if name.startswith(("ggml", "candle"))]
    changed = [name for name, _, _, _ in MUTATIONS.values()]
    assert [name for name in names if kernel(name).op == "linear" and changed.count(name) < 2] == []


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
