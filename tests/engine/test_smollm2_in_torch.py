"""SmolLM2 in bfloat16 on the CPU in torch: alone against one padded batch and against its own continuous batching, and with pinned kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch_models import need_torch, torch_or_skip

from detdiff import Scenario, compare, record
from detdiff.engines.base import Overrides, RunOptions
from detdiff.engines.registry import open_engine

PROMPTS = (
    "The quick brown fox",
    "In the beginning",
    "Write a short story",
    "def fibonacci(n):",
    "The capital of France is",
    "Once upon a time there was",
    "Water boils at",
    "List three colours:",
)


@pytest.mark.thorough
@pytest.mark.real_model
def test_smollm2_alone_against_a_padded_batch_of_eight(smollm2_bf16: Path, tmp_path: Path) -> None:
    need_torch()
    torch_or_skip()
    asked = Scenario.from_dict(
        {
            "model": str(smollm2_bf16),
            "engine": {"name": "transformers", "threads": 1},
            "request": [{"prompt": prompt} for prompt in PROMPTS],
            "max_tokens": 1,
            "ignore_stop": True,
        }
    )
    engine = open_engine(asked)
    for pin in (True, False):
        options = RunOptions(observe=2, overrides=Overrides(pin_kernels=pin), durable=False)
        a = record(asked, tmp_path / f"a{pin}", engine=engine, options=options)
        b = record(
            asked.with_changes(schedule="static"), tmp_path / f"b{pin}", engine=engine, options=options
        )
        assert a.header["observer"]["equal"] is True and b.header["observer"]["equal"] is True
        found = compare(a, b)
        if pin:
            assert found.identical
            paged = asked.with_changes(schedule="continuous", active=5, row_budget=16)
            assert compare(a, record(paged, tmp_path / "paged", engine=engine, options=options)).identical
    if found.identical:
        pytest.skip(
            "this processor's kernels give a row the same bits alone and in a batch of 8 with padding"
        )
    first = next(request for request in found.requests if request.id == found.first)
    assert first.origin is not None
    site = [each.name for each in a.sites].index(first.origin.site)
    m = [
        trace.call(forward, site, (number, first.origin.position))
        for trace, forward, number in (
            (a, first.origin.forward_a, [each["id"] for each in a.requests].index(first.id)),
            (b, first.origin.forward_b, [each["id"] for each in b.requests].index(first.id)),
        )
    ]
    assert all(call is not None for call in m)
    assert m[0]["rows"] < m[1]["rows"]  # type: ignore[index]
