"""Times the reference kernels against MLX's own matmul: ``python -m benchmarks.kernels``.

The two run in turn, so that whatever else the machine does falls on both; figures are medians, and the ratio
is the median of the pairs' ratios. Weights are staged beforehand, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from tabulate import tabulate

from detdiff_kernels import kernel, kernel_names

PAIRS = 15
# (k, n), rows: the decode shapes that have a target, then the linear layers and the head of SmolLM2-135M.
CASES = [
    ((2048, 2048), (1, 8)),
    ((576, 576), (1, 2, 3, 4, 40)),
    ((576, 1536), (1, 2, 3, 4, 40)),
    ((1536, 576), (1, 2, 3, 4, 40)),
    ((576, 49152), (1, 2, 3, 4)),
]


def _seconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _pairs(first: Callable[[], Any], second: Callable[[], Any]) -> list[tuple[float, float]]:
    first(), second()
    return [(_seconds(first), _seconds(second)) for _ in range(PAIRS)]


def run() -> list[dict[str, Any]]:
    """One row per kernel and shape: medians in milliseconds, and kernel time divided by MLX's."""
    random = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for (k, n), sizes in CASES:
        weight = random.standard_normal((n, k), dtype=np.float32)
        native_weight = mx.array(weight)
        for name in kernel_names():
            reference, staged = kernel(name), kernel(name).stage(weight)
            for m in sizes:
                x = random.standard_normal((m, k), dtype=np.float32)
                native_x = mx.array(x)
                pairs = _pairs(
                    lambda x=x, w=staged, reference=reference: reference(x, w),  # type: ignore[misc]
                    lambda x=native_x, w=native_weight: mx.eval(mx.matmul(x, w.T)),  # type: ignore[misc]
                )
                ours, native = (median(side) for side in zip(*pairs, strict=True))
                ratio = median(mine / theirs for mine, theirs in pairs)
                found.append(
                    {"kernel": name, "m": m, "k": k, "n": n}
                    | {"kernel_ms": 1e3 * ours, "mlx_ms": 1e3 * native, "ratio": ratio}
                )
    return found


def main() -> None:
    print(tabulate(run(), headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
