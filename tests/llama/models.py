"""llama.cpp's library for the tests that need it, and tiny GGUF files in milliseconds."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from detdiff.engines.llama_cpp.known_model import KnownModel

PROBLEM = "xllamacpp is not installed; `make test EXTRAS=dev,gguf,llama` installs it"
KINDS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
"""Types of matrices that the tests try."""


def need_llama() -> None:
    """Without llama.cpp's library the test is skipped, on CI it fails. Imports nothing."""
    if find_spec("xllamacpp") is None:
        if os.environ.get("CI"):
            pytest.fail(PROBLEM)
        pytest.skip(PROBLEM)


def tiny_gguf(path: Path, kind: str = "F16", *, layers: int = 2, **changes: Any) -> Path:
    """Write a llama of two layers with seeded random weights at `path`; ``changes`` are fields of `KnownModel`.

    Its tokenizer has a token for each byte, so that any text is a prompt and comes back as it was. Its logits spread over
    some ten units and depend on the whole prompt.
    """
    return KnownModel(layers=layers, kind=kind, **changes).write(path)


def tiny_k_gguf(path: Path, kind: str) -> Path:
    """The same with matrices in superblocks of 256 (Q4_K, Q6_K, …), which llama.cpp itself quantises to."""
    import ctypes

    import gguf.quants
    import numpy as np
    from gguf import GGMLQuantizationType

    from detdiff.engines.llama_cpp.layout import checked_library

    chunk = checked_library().raw("ggml_quantize_chunk")
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def quantize(values: Any, to: Any) -> Any:
        if to == GGMLQuantizationType.F32:
            return values
        rows, width = values.shape
        block, size = gguf.GGML_QUANT_SIZES[to]
        made = np.empty((rows, width // block * size), np.uint8)
        given = np.ascontiguousarray(values)
        assert chunk(int(to), given.ctypes.data, made.ctypes.data, 0, rows, width, None) == made.nbytes
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.quants, "quantize", quantize)
        return KnownModel(layers=1, kind=kind, width=256, inner=256, heads=4, kv_heads=2).write(path)
