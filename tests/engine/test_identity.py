"""On a CPU whose kernels treat each row alike, composition must not matter: every schedule and layout, one answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ARCHITECTURES, PACKABLE, Runs, events, model, scenario
from tiers import examples, some_now
from tiny import FORMATS

from detdiff.compare import compare
from detdiff.errors import ModelRunError
from detdiff.scenario import Scenario

WITHOUT_BF16 = ("qwen3_moe", "qwen3_next")  # MLX's GatherMM on the CPU takes float32 only
RINGS = ("gemma3_text",)  # rotating caches: their order differs, see test_ring_order.py
SUITS = [
    (arch, fmt)
    for arch in ARCHITECTURES
    for fmt in FORMATS
    if not (arch in WITHOUT_BF16 and fmt == "bf16") and not (arch in RINGS and fmt != "bf16")
]
# mamba2 sums a chunk of a prompt in another order than its rows, so both sides must chunk alike.
CHUNKED = ("mamba2",)

VARIANTS: dict[str, dict[str, Any]] = {
    "static padded": {"schedule": "static", "layout": "padded"},
    "continuous padded": {
        "schedule": "continuous",
        "layout": "padded",
        "arrivals": (0, 2, 5),
        "active": 2,
        "prefill_chunk": 4,
    },
    "serial packed": {"schedule": "serial", "layout": "packed"},
    "continuous packed": {
        "schedule": "continuous",
        "layout": "packed",
        "arrivals": (0, 2, 5),
        "prefill_chunk": 8,
        "row_budget": 6,
    },
}


CASES = [
    (arch, fmt, variant)
    for arch, fmt in SUITS
    for variant in VARIANTS
    # What is refused in the packed layout is refused by test: test_packed_refusals.py
    if "padded" in variant or arch in PACKABLE
]


@pytest.mark.parametrize(
    ("arch", "fmt", "variant"), some_now(CASES, *range(0, len(CASES), 9), ci=range(0, len(CASES), 2))
)
def test_composition_changes_no_bit(runs: Runs, arch: str, fmt: str, variant: str) -> None:
    keys = VARIANTS[variant]
    chunk = {"prefill_chunk": keys.get("prefill_chunk", 2048)} if arch in CHUNKED else {}
    base = runs.base(arch, fmt, **chunk)
    other = runs.record(model(arch, fmt), scenario(**keys))
    found = compare(base, other)
    assert found.identical, [(r.id, r.stage, r.origin) for r in found.requests]
    assert sum(count.count for request in found.requests for count in request.origins) == 0
    assert found.compared.rows >= sum(len(r["tokens"]) + r["max_tokens"] - 1 for r in base.requests)
    assert found.compared.digests >= found.compared.rows * len(base.sites) // 2
    assert found.compared.unattributed == 0 and not found.not_compared
    assert events(base) == events(other) == []


@pytest.mark.parametrize("arch", WITHOUT_BF16)
def test_expert_models_cannot_run_in_bf16_here(runs: Runs, arch: str) -> None:
    with pytest.raises(
        ModelRunError,
        match="GatherMM.*only supports float32.*experts in float32, quantised ones .*No schedule",
    ):
        runs.record(model(arch, "bf16"), scenario())


@st.composite
def compositions(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    arch, fmt = draw(st.sampled_from([pair for pair in SUITS if pair[0] in PACKABLE]))
    keys: dict[str, Any] = {
        "schedule": "continuous",
        "layout": draw(st.sampled_from(("padded", "packed"))),
        "arrivals": draw(st.lists(st.integers(0, 9), min_size=3, max_size=3)),
        "prefill_chunk": draw(st.sampled_from((1, 2, 5, 9, 2048))),
    }
    if draw(st.booleans()):
        keys["active"] = draw(st.integers(1, 3))
    if keys["layout"] == "packed" and draw(st.booleans()):
        keys["row_budget"] = draw(st.integers(1, 9))
    return arch, fmt, keys


@settings(max_examples=examples(12))
@given(compositions())
def test_any_arrivals_and_limits_change_no_bit(runs: Runs, drawn: tuple[str, str, dict[str, Any]]) -> None:
    arch, fmt, keys = drawn
    found = compare(runs.base(arch, fmt), runs.record(model(arch, fmt), scenario(**keys)))
    assert found.identical, [(r.id, r.stage, r.origin) for r in found.requests]


@settings(max_examples=examples(6))
@given(
    st.lists(st.sampled_from((1, 2, 3, 33, 70)), min_size=2, max_size=4),
    st.sampled_from((1, 3, 64)),
    st.integers(0, 2**16),
)
def test_prompts_of_any_length_change_no_bit(runs: Runs, lengths: list[int], chunk: int, seed: int) -> None:
    # 33 rows and more of an expert model are sorted by expert; one token is a prompt without a prefill.
    of = model("qwen3_moe", "f32")
    asked: Scenario = scenario(lengths=lengths, max_tokens=1 + seed % 5)
    base = runs.record(of, asked)
    arrivals = [seed >> (2 * i) & 3 for i in range(len(lengths))]
    for layout in ("padded", "packed"):
        other = scenario(
            "continuous",
            layout,
            arrivals=arrivals,
            lengths=lengths,
            prefill_chunk=chunk,
            max_tokens=1 + seed % 5,
        )
        found = compare(base, runs.record(of, other))
        assert found.identical, [(r.id, r.stage, r.origin) for r in found.requests]
