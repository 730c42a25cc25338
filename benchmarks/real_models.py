"""SmolLM2-135M-Instruct for the measurements, laid out once by ``tools/real_model.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from detdiff.engines.mlx.model import LoadedModel, load

ROOT = Path(__file__).parents[1]
LAYOUTS = {
    "f32": ("--dtype", "f32"),
    "bf16": ("--dtype", "bf16"),
    "packed-f32": ("--packed", "--dtype", "f32"),
    "packed-bf16": ("--packed", "--dtype", "bf16"),
}


def smollm2(layout: str) -> LoadedModel:
    """The model in one of LAYOUTS, from $DETDIFF_BENCH_MODELS or the folder of fetched models.

    Raises subprocess.CalledProcessError when it is not there and cannot be fetched.
    """
    directory = _folder() / f"smol-{layout}"
    if not (directory / "config.json").exists():
        _lay_out(directory, LAYOUTS[layout])
    return load(str(directory))


def smollm2_gguf(kind: str) -> Path:
    """The model as one GGUF file: f16, f32, q8_0 or q4_1. Raises as ``smollm2`` does."""
    path = _folder() / f"smol-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _lay_out(path, ("--gguf", kind))
    return path


def _folder() -> Path:
    cache = Path(os.environ.get("DETDIFF_MODEL_CACHE") or Path.home() / ".cache" / "detdiff")
    return Path(os.environ.get("DETDIFF_BENCH_MODELS") or cache / "benchmarks")


def _lay_out(target: Path, options: tuple[str, ...]) -> None:
    command = [sys.executable, "tools/real_model.py", "smollm2", str(target), *options]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
