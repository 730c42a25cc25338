"""Times every linear reference kernel against stock MLX on the CPU, at the shapes of three models.

Kernel and MLX take turns on the same rows; where MLX needs longer than a moment its time of the same case, taken in
the same run, serves several kernels. Weights are random and staged beforehand, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from detdiff_kernels import Affine, Dense, Kernel, UnsupportedFormat, Weight, kernel, kernel_names

# (k, n) of SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-7B; the 7B head is left out, it is 5 GB in float32 with its copy.
SHAPES = (
    *((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49152)),
    *((896, 896), (896, 128), (896, 4864), (4864, 896), (896, 151936)),
    *((3584, 3584), (3584, 512), (3584, 18944), (18944, 3584)),
)
ROWS = (1, 2, 4, 8, 32)
PAIRS = 5
FEW = 2  # pairs of what takes longer than SLOW seconds
SLOW = 0.1


@dataclass(frozen=True)
class Case:
    """A weight, both as MLX multiplies by it and as kernels stage it."""

    k: int
    n: int
    format: str
    native: Callable[[mx.array], mx.array]
    weight: Weight


def _cases() -> Iterator[Case]:
    random = np.random.default_rng(0)
    for k, n in SHAPES:
        dense = random.standard_normal((n, k), dtype=np.float32)
        held = mx.array(dense)
        yield Case(k, n, "float32", lambda x, w=held: x @ w.T, Dense(dense))  # type: ignore[misc]
        packed, scales, biases = mx.quantize(held, 64, 4)
        affine = Affine(np.asarray(packed), np.asarray(scales), np.asarray(biases), 4, 64)
        parts = (packed, scales, biases)
        yield Case(k, n, "4-bit", partial(_quantised, *parts), affine)


def _quantised(packed: mx.array, scales: mx.array, biases: mx.array, x: mx.array) -> mx.array:
    return mx.quantized_matmul(x, packed, scales, biases, transpose=True, group_size=64, bits=4)


def _seconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _ratios(case: Case) -> Iterator[tuple[str, int, float]]:
    """(kernel, rows, MLX's time divided by the kernel's) of every kernel that takes the weight."""
    random = np.random.default_rng(1)
    slow: dict[int, float] = {}
    for reference in (kernel(name) for name in kernel_names()):
        if not isinstance(reference, Kernel):
            continue
        try:
            staged = reference.stage(case.weight)
        except UnsupportedFormat:
            continue
        for m in ROWS:
            x = random.standard_normal((m, case.k), dtype=np.float32)
            held = mx.array(x)
            ours = lambda x=x, w=staged, k=reference: k(x, w)  # noqa: E731
            native = lambda x=held: mx.eval(case.native(x))  # noqa: E731
            count = FEW if _seconds(ours) > SLOW else PAIRS
            if m not in slow and (first := _seconds(native)) > SLOW:
                slow[m] = median([first, _seconds(native), _seconds(native)])
            if m in slow:
                pairs = [(_seconds(ours), slow[m]) for _ in range(count)]
            else:
                pairs = [(_seconds(ours), _seconds(native)) for _ in range(count)]
            yield reference.name, m, median(theirs / mine for mine, theirs in pairs)


def run() -> list[dict[str, Any]]:
    """One row per kernel and format: how many times MLX's speed at each M, the median of the shapes; and the lowest."""
    found: dict[tuple[str, str], dict[int, list[tuple[float, str]]]] = {}
    for case in _cases():
        for name, m, ratio in _ratios(case):
            at = found.setdefault((name, case.format), {})
            at.setdefault(m, []).append((ratio, f"M {m}, {case.k} to {case.n}"))
    return rows(found)


def rows(found: dict[tuple[str, str], dict[int, list[tuple[float, str]]]]) -> list[dict[str, Any]]:
    """The table of (kernel, weight), M and (ratio, shape)."""
    table = []
    for (name, form), by_rows in sorted(found.items()):
        lowest, where = min(ratio for ratios in by_rows.values() for ratio in ratios)
        medians = {f"M {m}": median(ratio for ratio, _ in ratios) for m, ratios in by_rows.items()}
        shapes = len(by_rows[min(by_rows)])
        table.append(
            {"kernel": name, "weight": form, **medians, "lowest": lowest, "at": where, "shapes": shapes}
        )
    return table
