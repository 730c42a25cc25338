"""How many bytes a digest trace has beside the full trace of the same run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.scenario import Scenario

from .decoding import PROMPTS
from .real_models import smollm2

TOKENS = 24


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run() -> list[dict[str, Any]]:
    """One row: total bytes of both directories, bytes a row of the run, and digest bytes as a share of full bytes."""
    loaded = smollm2("bf16")
    requests = [{"prompt": prompt, "chat": True} for prompt in PROMPTS]
    asked = Scenario.from_dict(
        {
            "model": str(loaded.path),
            "schedule": "static",
            "layout": "padded",
            "max_tokens": TOKENS,
            "ignore_stop": True,
            "request": requests,
        }
    )
    sizes: dict[str, int] = {}
    rows = 0
    with tempfile.TemporaryDirectory() as folder:
        for level in ("digest", "full"):
            path = Path(folder) / level
            once = replace(asked, capture=replace(asked.capture, level=level))
            trace = record(once, path, loaded=loaded, options=RecordOptions(observe=0))
            rows = len(trace.row_index().request)
            sizes[level] = _bytes(path)
    return [
        {
            "model": "dense, bf16",
            "rows": rows,
            "full MB": round(sizes["full"] / 1e6, 1),
            "digest MB": round(sizes["digest"] / 1e6, 2),
            "full kB a row": round(sizes["full"] / rows / 1e3, 1),
            "digest kB a row": round(sizes["digest"] / rows / 1e3, 2),
            "share %": round(100 * sizes["digest"] / sizes["full"], 2),
        }
    ]
