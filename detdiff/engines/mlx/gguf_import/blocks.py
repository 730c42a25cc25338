"""Values of GGUF tensors: unpacked to float32, or 32-element blocks repacked as MLX affine groups without a
change.

A Q4_0, Q4_1 or Q8_0 block holds ``w = scale * q + offset`` with one scale for 32 elements, which is what
MLX's affine mode computes for ``group_size=32``. Only nibble order and sign convention differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.gguf_import.container import GgufTensor
from detdiff.errors import GgufPackageMissing, GgufUnsupported

GROUP = 32
PACKABLE = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


@dataclass(frozen=True)
class Packed:
    """An affine-quantised matrix. words: uint32 ``[rows, columns * bits / 32]``; scales, biases: float32
    ``[rows, columns / 32]``; element ``i`` of a group is bits ``i * bits`` and up of its words."""

    bits: int
    words: NDArray[np.uint32]
    scales: NDArray[np.float32]
    biases: NDArray[np.float32]


def unpack(tensor: GgufTensor) -> NDArray[np.float32]:
    """The values of `tensor` as float32, shape as in the model.

    Raises:
        GgufPackageMissing: the type is a block format and the `gguf` package is not installed.
        GgufUnsupported: the installed `gguf` package cannot unpack the type.
    """
    if tensor.kind == "F32":
        values = tensor.data.view(np.float32)
    elif tensor.kind == "F16":
        values = tensor.data.view(np.float16).astype(np.float32)
    elif tensor.kind == "BF16":
        values = (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = _unpack_blocks(tensor)
    return np.ascontiguousarray(values.reshape(tensor.shape))


def pack(tensor: GgufTensor) -> Packed:
    """The blocks of a two-dimensional tensor of a `PACKABLE` kind as affine groups; no value changes."""
    rows, columns = tensor.shape
    blocks = tensor.data.reshape(rows, columns // GROUP, -1)
    scales = _halves(blocks[..., 0:2])
    if tensor.kind == "Q8_0":
        # Signed bytes become unsigned ones by flipping the top bit; the offset takes the 128 back.
        return Packed(8, _words(blocks[..., 2:] ^ np.uint8(0x80), rows), scales, scales * np.float32(-128))
    if tensor.kind == "Q4_0":
        return Packed(4, _words(_nibbles(blocks[..., 2:]), rows), scales, scales * np.float32(-8))
    return Packed(4, _words(_nibbles(blocks[..., 4:]), rows), scales, _halves(blocks[..., 2:4]))


def _halves(pairs: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    # GGUF keeps elements 0..15 in the low and 16..31 in the high nibbles; MLX keeps neighbours in one byte.
    elements = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
    neighbours: NDArray[np.uint8] = elements[..., 0::2] | (elements[..., 1::2] << 4)
    return neighbours


def _words(blocks: NDArray[np.uint8], rows: int) -> NDArray[np.uint32]:
    return np.ascontiguousarray(blocks).reshape(rows, -1).view("<u4")


def _unpack_blocks(tensor: GgufTensor) -> Any:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise GgufPackageMissing(
            f"Tensor {tensor.name!r} is stored as {tensor.kind} blocks, and unpacking those needs the `gguf` "
            f"package, which is not installed. Install it with `pip install '.[gguf]'` in the folder of detdiff's source."
        ) from error
    try:
        return dequantize(tensor.data, GGMLQuantizationType[tensor.kind])
    except (NotImplementedError, KeyError) as error:
        raise GgufUnsupported(
            f"Tensor {tensor.name!r} is stored as {tensor.kind} blocks, which the installed `gguf` package "
            f"cannot unpack. Upgrade it, or requantise the file to Q8_0 or F16."
        ) from error
