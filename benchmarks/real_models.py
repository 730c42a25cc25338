"""SmolLM2-135M-Instruct for the measurements, laid out once by ``tools/real_model.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from detdiff.engines.mlx.model import LoadedModel, load

ROOT = Path(__file__).parents[1]
LAYOUTS = {
    "bf16": ("--dtype", "bf16"),
    "packed-f32": ("--packed", "--dtype", "f32"),
    "packed-bf16": ("--packed", "--dtype", "bf16"),
}


def smollm2(layout: str) -> LoadedModel:
    """The model in one of LAYOUTS, from $DETDIFF_BENCH_MODELS or the folder of fetched models.

    Raises subprocess.CalledProcessError when it is not there and cannot be fetched.
    """
    cache = Path(os.environ.get("DETDIFF_MODEL_CACHE") or Path.home() / ".cache" / "detdiff")
    folder = Path(os.environ.get("DETDIFF_BENCH_MODELS") or cache / "benchmarks")
    directory = folder / f"smol-{layout}"
    if not (directory / "config.json").exists():
        command = [sys.executable, "tools/real_model.py", "smollm2", str(directory), *LAYOUTS[layout]]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return load(str(directory))
