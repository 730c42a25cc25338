"""The twin of a GGUF file whose tensors are all float32: the same numbers, in which no operand is rounded any more."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from detdiff.errors import EngineRefuses, LlamaFailed
from detdiff_kernels.errors import KernelLibraryError
from detdiff_kernels.gguf_file import open_gguf

SETTINGS: Final[Mapping[str, Any]] = {
    "cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off",
}  # fmt: skip
"""How the twin is run: flash attention would round keys and values of a float32 cache to float16 (llama-graph.cpp, build_attn_mha)."""
OPERANDS: Final = {"BF16": "bfloat16", "F16": "float16"}
"""ggml rounds a product's float32 operand to the type of its matrix (ggml-cpu.c, vec_dot_type), by the types of matrices."""


class Float32Twin:
    """A twin file in a folder of its own, which is removed with this object, and at the end of the process at the latest.

    Raises EngineRefuses for types that the ``gguf`` package cannot dequantise, LlamaFailed where the disk has no room.
    """

    def __init__(self, source: Path) -> None:
        folder = tempfile.mkdtemp(prefix="detdiff-float32-")
        self.close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        """Removes the file."""
        self.path = Path(folder) / f"{source.stem}-float32.gguf"
        try:
            write_float32(source, self.path)
        except BaseException:
            self.close()
            raise


def write_float32(source: Path, dest: Path) -> None:
    """Write the file ``source`` with all its tensors dequantised to float32, one at a time. Raises as `Float32Twin` does."""
    try:
        reader = open_gguf(source)
    except KernelLibraryError as error:
        raise EngineRefuses(str(error)) from error
    need = sum(4 * int(tensor.n_elements) for tensor in reader.tensors)
    free = shutil.disk_usage(dest.parent).free
    if free < need + (64 << 20):
        raise LlamaFailed(
            f"The float32 twin of {source.name} takes {need:,} bytes and {dest.parent} has {free:,} free; expected room for it. Free "
            "some, or set TMPDIR to another disk."
        )
    try:
        _write(reader, dest)
    except NotImplementedError as error:
        raise EngineRefuses(
            f"A tensor of {source.name} is of a type that the gguf package cannot dequantise ({error}); expected one that it can. Ask "
            "without another dtype."
        ) from error
    except OSError as error:
        raise LlamaFailed(
            f"The float32 twin of {source.name} cannot be written to {dest.parent} ({error.strerror}); expected room for {need:,} "
            "bytes. Free some, or set TMPDIR to another disk."
        ) from error


def _write(reader: Any, dest: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize

    kind = GGMLQuantizationType.F32
    metadata = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(dest, metadata["general.architecture"].contents())
    try:
        for name, field in metadata.items():
            if name == "general.alignment":
                writer.add_custom_alignment(int(field.contents()))
            elif name not in ("general.architecture", "general.file_type"):
                value = field.contents()
                writer.add_key_value(
                    name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None
                )
        # llama.h, LLAMA_FTYPE_ALL_F32.
        writer.add_file_type(0)
        for tensor in reader.tensors:
            shape = [int(length) for length in reversed(tensor.shape)]
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, values in _values(reader, dequantize):
            writer.write_tensor_data(values.reshape([int(length) for length in reversed(tensor.shape)]))
    finally:
        writer.close()


def _values(reader: Any, dequantize: Any) -> Iterator[tuple[Any, np.ndarray[Any, np.dtype[np.float32]]]]:
    for tensor in reader.tensors:
        yield tensor, np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)


def operand_dtype(path: Path, cache_types: tuple[str, str]) -> str | None:
    """The coarsest floating dtype that products' operands or cache entries are rounded to; None where all are float32.

    Of quantised matrices it is that of the cache: what their products do to an operand is no rounding to a dtype.
    """
    matrices = {tensor.tensor_type.name for tensor in open_gguf(path).tensors if len(tensor.shape) > 1}
    found = matrices | {each.upper() for each in cache_types}
    return next((OPERANDS[kind] for kind in OPERANDS if kind in found), None)
