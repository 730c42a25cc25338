"""Dispatch profiles on real weights: the comparison names both kernels and the threshold, and pinning the kernels ends it.

SmolLM2-135M with the file's own 4-bit blocks in every run with the network; Gemma 3 270M (dense bfloat16, sliding
windows, heads of 256) only where ``DETDIFF_TEST_GEMMA`` is set, since its weights come under a licence of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from tiers import only_in_full

pytestmark = pytest.mark.thorough

PROMPTS = ("How do I bake bread?", "What is gravity?", "Tell me a story about a dragon.")
# The kernels that one row and many rows take, and the condition that the report has to show with its value.
QUANTISED = {
    "mlx-metal:generation=13,letter=g": ({"qmv"}, {"qmm_splitk", "qmm_t"}, r"limit \(14\)"),
    "mlx-metal:generation=16,letter=s": (
        {"qmv"},
        {"qmv_wide", "qmm_splitk", "qmm_t"},
        r"limit \(13\)|m >= 2|2 <= m",
    ),
    "candle-metal": ({"mv"}, {"mm"}, r"second-to-last dimension"),
}
DENSE = {
    "mlx-metal:generation=13,letter=g": ({"gemv"}, {"splitk", "steel"}, r"min\(m, n\) > 1"),
    # A short prompt of its own takes gemv_wide as well, which has 16 lanes instead of 32 from 6 rows on.
    "mlx-metal:generation=16,letter=s": (
        {"gemv", "gemv_wide"},
        {"gemv_wide", "splitk", "steel"},
        r"2 <= m <= 15|min\(m, n\) > 1",
    ),
    "candle-metal": ({"mv"}, {"mm"}, r"second-to-last dimension"),
}


def _compare(model: Path, profile: str, *both: str) -> tuple[int, dict[str, Any]]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    result = run(
        "compare", "--model", str(model), *prompts, "--both", " ".join(("layout=packed max_tokens=4", *both)),
        "--kernels", profile, "--a", "schedule=serial", "--b", "schedule=continuous arrivals=0,1,2", "--json",
    )  # fmt: skip
    return result.exit_code, json.loads(result.stdout)


def _named(answer: dict[str, Any], profile: str, expected: tuple[set[str], set[str], str]) -> None:
    backend = profile.partition(":")[0]
    alone, together, threshold = expected
    origins = [request["origin"] for request in answer["requests"] if request["origin"] is not None]
    assert origins, "no request parts"
    for origin in origins:
        few, many = (
            (origin[f"rows_{side}"], origin[f"path_{side}"], origin[f"rule_{side}"]) for side in "ab"
        )
        assert few[0] < many[0]
        for (_, path, rule), kernels in ((few, alone), (many, together)):
            assert path.removeprefix(f"reference/{backend}/") in kernels
            assert rule.startswith(f"{backend}: ") and rule.endswith(f" -> {path.rpartition('/')[2]}")
        assert re.search(threshold, many[2]), many[2]


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(name, marks=() if place == 1 else only_in_full("the same weights, other kernels"))
        for place, name in enumerate(QUANTISED)
    ],
)
def test_a_real_quantised_model_parts_at_the_profiles_threshold(
    profile: str, smollm2_packed_bf16: Path
) -> None:
    code, answer = _compare(smollm2_packed_bf16, profile, "chat")
    assert code == 1
    _named(answer, profile, QUANTISED[profile])
    code, answer = _compare(smollm2_packed_bf16, profile, "chat split_rows=1024")
    assert code == 0 and answer["identical"] and answer["compared"]["differing"] == 0


@pytest.mark.parametrize("profile", DENSE)
def test_a_real_dense_model_with_windows_parts_at_the_profiles_threshold(
    profile: str, gemma270_bf16: Path
) -> None:
    code, answer = _compare(gemma270_bf16, profile)
    assert code == 1
    _named(answer, profile, DENSE[profile])
    code, answer = _compare(gemma270_bf16, profile, "split_rows=1024")
    assert code == 0 and answer["identical"] and answer["compared"]["differing"] == 0
