"""What a run depends on besides its scenario: versions, machine, device, flags that change numerics."""

from __future__ import annotations

import platform
from typing import Any

import mlx.core as mx

import detdiff
from detdiff.engines.base import blas_in_use, chip, flags, imported, version


def environment() -> dict[str, Any]:
    """The environment block of a trace; no paths, no times."""
    device = mx.default_device()
    info = mx.device_info() if hasattr(mx, "device_info") else {}
    return {
        "detdiff": detdiff.__version__,
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "chip": chip(),
        "device": str(device.type).rpartition(".")[2],
        "backend": _backend(device),
        "architecture": str(info.get("architecture", "")),
        "blas": blas_in_use(),
        "flags": flags(),
        **imported(),
    }


def _backend(device: Any) -> str:
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
