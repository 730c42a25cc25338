"""Write named arrays as the safetensors files of an mlx-lm model: canonical bytes, a shard in memory at most.

Arrays are in name order in each file, so the same import gives the same bytes, and one weight hash,
everywhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.engines.mlx.model_directory import WEIGHTS_INDEX
from detdiff.errors import GgufUnsupported

SHARD_BYTES = 2 << 30
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def write_shards(
    directory: Path, arrays: Iterable[tuple[str, NDArray[Any]]], dtype: str, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write `arrays` (float32 or uint32) to `directory`, floats rounded to `dtype`, a key of `DTYPES`.

    One ``model.safetensors``, or numbered files of about `shard_bytes` and their index. Returns the bytes of
    all values.

    Raises:
        GgufUnsupported: a value is too large for `dtype`.
        OSError: the files cannot be written.
    """
    pending: dict[str, tuple[str, NDArray[Any]]] = {}
    shards: list[list[str]] = []
    size = total = 0
    for name, values in arrays:
        stored = ("U32", values) if values.dtype == np.uint32 else _rounded(name, values, dtype)
        pending[name] = stored
        size += stored[1].nbytes
        total += stored[1].nbytes
        if size >= shard_bytes:
            shards.append(_write(directory / f"part-{len(shards)}.safetensors", pending))
            pending, size = {}, 0
    if pending:
        shards.append(_write(directory / f"part-{len(shards)}.safetensors", pending))
    _name_shards(directory, shards, total)
    return total


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of `values` as bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # Rounding up could carry a NaN over to infinity or zero.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _rounded(name: str, values: NDArray[np.float32], dtype: str) -> tuple[str, NDArray[Any]]:
    if dtype == "f32":
        return "F32", values
    if dtype == "bf16":
        return "BF16", round_to_bfloat16(values)
    largest = float(np.abs(values).max(initial=0.0))
    if largest > float(np.finfo(np.float16).max):
        raise GgufUnsupported(
            f"{name} holds {largest:.6g}, and float16 ends at 65504. Import with dtype bf16 or f32 instead."
        )
    return "F16", values.astype(np.float16)


def _write(file: Path, arrays: dict[str, tuple[str, NDArray[Any]]]) -> list[str]:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name in sorted(arrays):
        kind, values = arrays[name]
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(arrays):
            stream.write(np.ascontiguousarray(arrays[name][1]).data)
    return sorted(arrays)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}.safetensors").rename(directory / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (directory / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
