"""The false-positive test: kernels that sum alike for any number of rows leave nothing to find."""

from __future__ import annotations

import random
from typing import Any

import pytest
from runs import ARCHITECTURES, PACKABLE, Runs, events, model
from tiers import some_now
from tiny import FORMATS, VOCAB

from detdiff.compare import compare
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.scenario import Scenario

SEEDS = 20
# As long as no window is full: a ring's order of keys is another than a serial run's, see test_ring_order.py.
LONGEST = {"gemma3_text": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "static padded": {"schedule": "static", "layout": "padded"},
    "continuous padded": {"schedule": "continuous", "layout": "padded", "active": 2},
    "static packed": {"schedule": "static", "layout": "packed"},
    "continuous packed": {"schedule": "continuous", "layout": "packed", "row_budget": 6},
}
CELLS = [
    (arch, fmt, variant)
    for arch in ARCHITECTURES
    for fmt in FORMATS
    for variant in VARIANTS
    if "padded" in variant or arch in PACKABLE
]
assert len(CELLS) >= SEEDS


def drawn(arch: str, seed: int, **keys: Any) -> Scenario:
    """Three requests whose prompts, lengths and arrivals are drawn by the seed."""
    draw = random.Random(seed)
    longest = LONGEST.get(arch, 24)
    requests = [
        {
            "tokens": [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))],
            "arrival": draw.randrange(6),
        }
        for _ in range(3)
    ]
    if keys["schedule"] == "static":
        requests = [{"tokens": request["tokens"]} for request in requests]
    # mamba2 sums a chunk of a prompt in another order than its rows, so both sides chunk alike.
    chunk = {} if arch == "mamba2" else {"prefill_chunk": draw.choice((3, 8, 2048))}
    given = {"model": "tiny", "kernels": "batch-invariant", "max_tokens": 6, "request": requests}
    return Scenario.from_dict({**given, **chunk, **keys})


@pytest.mark.parametrize(
    ("arch", "fmt", "variant", "seed"),
    some_now(
        [(*cell, number % SEEDS) for number, cell in enumerate(CELLS)],
        *range(0, len(CELLS), 15),
        ci=range(0, len(CELLS), 2),
    ),
)
def test_no_composition_matters(runs: Runs, arch: str, fmt: str, variant: str, seed: int) -> None:
    of = model(arch, fmt)
    serial = runs.record(of, drawn(arch, seed, schedule="serial"))
    other = runs.record(of, drawn(arch, seed, **VARIANTS[variant]))
    found = compare(serial, other)
    assert found.identical, [(r.id, r.stage, r.origin) for r in found.requests]
    assert sum(count.count for request in found.requests for count in request.origins) == 0
    assert found.compared.unattributed == 0 and not found.not_compared
    assert events(serial) == events(other) == []
    kinds = {site.kind: number for number, site in enumerate(other.sites)}
    for kind, name in (("linear", "mm"), ("switch", "mm"), ("attention", "attention")):
        if kind in kinds:
            call = other.call(len(other.forwards()) - 1, kinds[kind])
            assert call is not None and call["path"] == f"reference/batch-invariant/{name}"


@pytest.mark.parametrize("seed", some_now(range(3), 0))
def test_a_fault_is_still_found(runs: Runs, seed: int) -> None:
    of = model("qwen3_moe", "q4")
    serial = runs.record(of, drawn("qwen3_moe", seed, schedule="serial"))
    injected_fault = InjectedFault("layers.1.self_attn.attention", 1, 0, seed)
    asked = drawn("qwen3_moe", seed, **VARIANTS["continuous packed"])
    found = compare(serial, runs.record(of, asked, RecordOptions(observe=0, faults=(injected_fault,))))
    (hit,) = [request for request in found.requests if request.origin is not None]
    assert hit.origin is not None
    assert (hit.id, hit.origin.site, hit.origin.position) == ("r1", "layers.1.self_attn.attention", 0)
