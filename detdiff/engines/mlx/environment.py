"""What a run depends on besides its scenario: versions, machine, device, flags that change numerics."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

import detdiff

FLAGS = (
    "MLX_ENABLE_TF32",
    "MLX_METAL_FAST_SYNCH",
    "MLX_MAX_OPS_PER_BUFFER",
    "MLX_MAX_MB_PER_BUFFER",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_CBWR",
    "VECLIB_MAXIMUM_THREADS",
    "LD_PRELOAD",
)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _chip() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def blas_in_use() -> list[str]:
    """File names of BLAS libraries mapped into this process (Linux); what MLX's f32 matmul on CPU calls."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    names = {line.rsplit("/", 1)[-1] for line in maps.splitlines() if "/" in line}
    return sorted(name for name in names if re.search(r"blas|libmkl|accelerate", name, re.IGNORECASE))


def environment() -> dict[str, Any]:
    """The environment block of a trace; no paths, no times."""
    device = mx.default_device()
    info = mx.device_info() if hasattr(mx, "device_info") else {}
    return {
        "detdiff": detdiff.__version__,
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "chip": _chip(),
        "device": str(device.type).rpartition(".")[2],
        "backend": _backend(device),
        "architecture": str(info.get("architecture", "")),
        "blas": blas_in_use(),
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
    }


def _backend(device: Any) -> str:
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
