"""ggml's CPU matmul over repacked weights."""

from __future__ import annotations

from .block_kernel import BlockKernel, affine_bits
from .linear import Shape
from .order import IN_ORDER, Order

_REPACK = "ggml-org/llama.cpp 0f2d806 ggml/src/ggml-cpu/arch/x86/repack.cpp"
_SCALE = Order(IN_ORDER, "q8_1_scale", "signed", 32, inputs="q8_0")
_MINIMUM = Order(IN_ORDER, "tile_min", "codes", 32, inputs="q8_0")


def _blocks(shape: Shape) -> Order | None:
    """One walk over blocks of 32, for a row alone and for four rows alike."""
    if shape.format in ("Q4_0", "Q8_0"):
        return _SCALE
    return _MINIMUM if shape.format == "Q4_1" or affine_bits(shape) else None


_NOTE = (
    "one FMA a block of a whole number with the product of both scales; Q8_0 as Q4_0, and other affine weights and Q4_1 as "
    "Q4_1 with Q8_1 inputs (inferred)"
)

LINEAR = (
    BlockKernel(
        "ggml-cpu-repack/gemv",
        _blocks,
        f"{_REPACK} gemv_q4_b32_8x8_q8_0_lut_avx, quants.c quantize_row_q8_0 with AVX2 and FMA (read): {_NOTE}",
        "inferred",
    ),
    BlockKernel(
        "ggml-cpu-repack/gemm",
        _blocks,
        f"{_REPACK} gemm_q4_b32_8x8_q8_0_lut_avx, ggml_quantize_mat_q8_0_4x8 with AVX2 and FMA, which give the bits of gemv "
        f"(read): {_NOTE}",
        "inferred",
    ),
)
