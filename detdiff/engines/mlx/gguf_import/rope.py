"""How a GGUF file says that rotary positions are scaled, in the terms of config.json.

Linear scaling is a metadata key. The llama3 kind is not: converters store only its result, a tensor
``rope_freqs.weight`` with one divisor per frequency, so its parameters are recovered from that and checked
against every divisor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.gguf_import.blocks import unpack
from detdiff.engines.mlx.gguf_import.metadata import Metadata

DIVISORS = "rope_freqs.weight"
# All published llama3 checkpoints share these; only the factor differs.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_scaling(metadata: Metadata, base: float, head_dim: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` entry of config.json, None where positions are not scaled.

    Raises:
        GgufUnsupported: a kind of scaling other than linear and llama3.
    """
    kind = metadata.get("rope.scaling.type", "none")
    if metadata.get("rope.scale_linear", 1.0) not in (0.0, 1.0):
        raise metadata.unsupported("it scales positions by the outdated key rope.scale_linear")
    if DIVISORS in metadata.file.tensors:
        if kind != "none":
            raise metadata.unsupported(f"it scales positions both by {DIVISORS} and by {kind!r}")
        return _llama3(metadata, base, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor")}
    raise metadata.unsupported(
        f"it scales positions by {kind!r}; `linear` and llama3's {DIVISORS} can be imported"
    )


def llama3_divisors(base: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """Divisor of each of the ``head_dim / 2`` frequencies under llama3 scaling, float64."""
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = (LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    # Clipping gives the two outer ranges: 1 for short wavelengths, `factor` for long ones.
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _llama3(metadata: Metadata, base: float, head_dim: int) -> dict[str, Any]:
    divisors = unpack(metadata.file.tensors[DIVISORS]).reshape(-1)
    factor = float(f"{divisors.max():.6g}")
    expected = llama3_divisors(base, head_dim, factor)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise metadata.unsupported(
            f"its {DIVISORS} does not follow llama3's rule with the published parameters"
        )
    return {"rope_type": "llama3", "factor": factor} | LLAMA3
