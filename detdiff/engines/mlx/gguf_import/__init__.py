"""Turn one GGUF file into a model directory that mlx-lm loads: read, translate, write beside, check,
rename."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detdiff.engines.mlx.gguf_import.metadata import GgufFile, make_config, read_gguf
from detdiff.engines.mlx.gguf_import.tokenizer import write_tokenizer
from detdiff.engines.mlx.gguf_import.weights import DTYPES, GROUP, PACKABLE, arrays, module_name, write_shards
from detdiff.engines.mlx.model import load_tokenizer, load_weights
from detdiff.errors import GgufUnsupported, ImportNotWritten, ImportTargetExists, ModelError, words_of


@dataclass(frozen=True)
class ImportSummary:
    """What an import wrote. packed: matrices whose blocks were kept. bytes: of the weights."""

    directory: Path
    architecture: str
    model_type: str
    dtype: str
    layers: int
    vocab_size: int
    tensors: int
    packed: int
    bytes: int
    chat_template: bool


def import_gguf(src: Path, dest: Path, *, dtype: str = "bf16", packed: bool = False) -> ImportSummary:
    """Write the model in the GGUF file `src` to a new directory `dest`.

    dtype: ``bf16``, ``f16`` or ``f32``, of every float array. packed: keep Q4_0, Q4_1 and Q8_0 matrices as
    MLX affine groups of 32 with the same values (exactly so for f32; other dtypes round scales and offsets),
    and unpack the rest.

    `dest` appears only when it is complete and mlx-lm has accepted it; it must not exist before, or be empty.

    Raises:
        GgufMissing, GgufCorrupt, GgufUnsupported, GgufPackageMissing: about `src`.
        ImportTargetExists, ImportNotWritten: about `dest`.
        ValueError: `dtype` is not one of the three.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    file = read_gguf(src)
    config = make_config(file) | {"torch_dtype": DTYPES[dtype]}
    kept = _kept_blocks(file) if packed else {}
    if kept:
        config["quantization"] = config["quantization_config"] = _quantization(kept)
    with _new_directory(dest) as directory:
        chat_template = write_tokenizer(file, directory)
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        size = write_shards(directory, arrays(file, config, packed), dtype)
        _check_loads(file, directory)
    return ImportSummary(
        directory=dest,
        architecture=file.metadata["general.architecture"],
        model_type=config["model_type"],
        dtype=dtype,
        layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        tensors=len(file.tensors),
        packed=len(kept),
        bytes=size,
        chat_template=chat_template,
    )


def _kept_blocks(file: GgufFile) -> dict[str, int]:
    """Module name and bits of every matrix whose blocks stay packed."""
    kept = {}
    for tensor in file.tensors.values():
        name = module_name(tensor.name, file.metadata["general.architecture"])
        if name and tensor.kind in PACKABLE and len(tensor.shape) == 2:
            kept[name.removesuffix(".weight")] = PACKABLE[tensor.kind]
    if not kept:
        kinds = Counter(tensor.kind for tensor in file.tensors.values() if len(tensor.shape) == 2)
        raise GgufUnsupported(
            f"{str(file.path)!r} has no matrix whose blocks could stay packed: it holds "
            f"{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}, and "
            f"{', '.join(PACKABLE)} can. Import it without packing."
        )
    return kept


def _quantization(kept: dict[str, int]) -> dict[str, Any]:
    (usual, _), *_ = Counter(kept.values()).most_common()
    exceptions = {
        name: {"group_size": GROUP, "bits": bits, "mode": "affine"}
        for name, bits in kept.items()
        if bits != usual
    }
    return {"group_size": GROUP, "bits": usual, "mode": "affine"} | exceptions


@contextmanager
def _new_directory(dest: Path) -> Iterator[Path]:
    """A directory beside `dest` that becomes `dest` when the block ends well and is removed when it does
    not."""
    if dest.is_symlink() or (dest.exists() and not (dest.is_dir() and not any(dest.iterdir()))):
        raise ImportTargetExists(
            f"{str(dest)!r} is already there, and an import writes a new directory. Give another name, or "
            f"remove it first."
        )
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", suffix=".partial", dir=dest.parent))
    except OSError as error:
        raise _not_written(dest, error) from error
    try:
        yield staging
        staging.chmod(0o777 & ~_umask())
        staging.rename(dest)
    except OSError as error:
        raise _not_written(dest, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _not_written(dest: Path, error: Exception) -> ImportNotWritten:
    return ImportNotWritten(
        f"The model directory {str(dest)!r} could not be written: {words_of(error)}. Nothing "
        f"was left behind; check the space and the permissions in {str(dest.parent)!r}."
    )


def _umask() -> int:
    # The only way to read it is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_loads(file: GgufFile, directory: Path) -> None:
    try:
        _, config = load_weights(directory, lazy=True)
        load_tokenizer(directory, config)
    except ModelError as error:
        raise GgufUnsupported(
            f"{str(file.path)!r} was translated, but mlx-lm does not load the result: {error} The file may "
            f"lack tensors, or its architecture may have a variant that detdiff does not know."
        ) from error
