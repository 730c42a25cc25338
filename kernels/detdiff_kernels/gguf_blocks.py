"""Weights from GGUF files, their blocks as they lie there. Needs the optional `gguf` package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .blocks import BLOCKS
from .errors import GgufPackageMissing, UnknownTensor, UnreadableGguf, UnsupportedFormat, nearest
from .weights import Blocks


def read_blocks(path: Path, tensor: str) -> Blocks:
    """The blocks of a tensor (n, k) of a GGUF file, mapped, not copied.

    Raises GgufPackageMissing without the `gguf` package, UnreadableGguf for a file that it cannot read, UnknownTensor,
    UnsupportedFormat for a tensor that is not of blocks in ``BLOCKS``, and BadOperand for one that is not a matrix.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise GgufPackageMissing(
            f"Reading {path} needs the package `gguf`, which is not installed; install it with `pip install gguf`."
        ) from error
    try:
        found = {entry.name: entry for entry in GGUFReader(path).tensors}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UnreadableGguf(
            f"{path} could not be read as a GGUF file: {error}; expected a whole file of GGUF version 2 or 3. Check that it "
            "was downloaded completely."
        ) from error
    if tensor not in found:
        raise UnknownTensor(f"{path} has no tensor named {tensor!r}; {nearest(tensor, found)}")
    kind = found[tensor].tensor_type.name
    if kind not in BLOCKS:
        raise UnsupportedFormat(
            f"The tensor {tensor} of {path} is {kind}; expected one of {', '.join(BLOCKS)}. Dequantise it, or run it native."
        )
    return Blocks(kind, np.asarray(found[tensor].data))
