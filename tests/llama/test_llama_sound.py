"""Sound models of many types, settings and schedules: whatever differs is never called a bug, and pinned rows are equal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from models import KINDS, need_llama, tiny_gguf
from tiers import some_now

from detdiff import Scenario, explain

PROMPTS = ("The capital of France is", "Once upon a time there was a", "def f(n):", "W")
SCHEDULES = (
    "schedule=serial", "schedule=static", "schedule=continuous arrivals=0,2,4,6", "schedule=serial prefill_chunk=4",
    "schedule=continuous arrivals=0,0,3,3 row_budget=6", "schedule=continuous arrivals=0,1,2,3 prefill_chunk=3",
)  # fmt: skip
SETTINGS = (
    "", "engine.unified=true", "engine.flash_attention=off", "engine.unified=true engine.flash_attention=off",
    "engine.cache_type_k=bf16 engine.cache_type_v=bf16", "engine.cache_type_k=q8_0 engine.cache_type_v=q8_0",
    "engine.cache_type_k=f32 engine.cache_type_v=f32 engine.flash_attention=off", "engine.cache_type_v=bf16", "engine.ubatch=8",
)  # fmt: skip


@pytest.mark.parametrize("seed", some_now(range(16), 3))
def test_a_sound_model_is_never_called_a_bug(seed: int, tmp_path: Path) -> None:
    need_llama()
    draw = random.Random(seed)
    file = tiny_gguf(
        tmp_path / "tiny.gguf", draw.choice((*KINDS, "BF16")), width=128, seed=seed, tied=draw.random() < 0.3
    )
    schedules, settings = draw.sample(SCHEDULES, 2), [draw.choice(SETTINGS)] * 2
    if draw.random() < 0.25:
        settings[1] = draw.choice(SETTINGS)
    a, b = (
        Scenario.from_flags(
            str(file), PROMPTS, f"engine=llama.cpp max_tokens=12 ignore_stop {schedule} {mine}"
        )
        for schedule, mine in zip(schedules, settings, strict=True)
    )
    verdict = explain(a, b)
    assert verdict.kind in ("identical", "numerics", "undetermined", "configuration"), verdict.sentence
    results = {each.name: each.result for each in verdict.controls}
    assert results.get("repeat", "equal") == "equal" and results.get("neighbour_content") != "differs"
    if settings[0] == settings[1]:
        assert verdict.kind != "configuration" and results.get("pin_kernels") != "remains", verdict.sentence
        assert results.get("oracle") != "outside"
