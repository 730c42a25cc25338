"""The main job on real weights: SmolLM2-135M-Instruct, four chat prompts, serial against continuous, packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from tiers import only_in_full

pytestmark = pytest.mark.thorough

PROMPTS = (
    "How do I bake bread?",
    "Give me advice on learning to code.",
    "What is gravity?",
    "Tell me a story about a dragon.",
)
BOTH = "layout=packed max_tokens=14 chat"


def _compare(model: Path, split_rows: int) -> tuple[int, dict[str, Any]]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    result = run(
        "compare", "--model", str(model), *prompts, "--both", BOTH, "--kernels", "candle-metal",
        "--split-rows", str(split_rows), "--a", "schedule=serial", "--b", "schedule=continuous arrivals=0,1,3,5", "--json",
    )  # fmt: skip
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(scope="module")
def switched(smollm2_packed_bf16: Path) -> tuple[int, dict[str, Any]]:
    return _compare(smollm2_packed_bf16, 4)


def test_a_kernel_switch_flips_tokens_of_a_real_model(switched: tuple[int, dict[str, Any]]) -> None:
    code, answer = switched
    assert code == 1
    assert not answer["identical"] and not answer["inconclusive"]
    flipped = [request for request in answer["requests"] if request["flip"] is not None]
    assert flipped, "no prompt flips any more: choose others"
    for request in flipped:
        flip = request["flip"]
        assert flip["a"]["token"] != flip["b"]["token"]
        # What the two sides saw at the flip is close: the choice was a near-tie, and it is shown as one.
        assert abs(flip["a"]["logit"] - flip["b"]["logit"]) < 2
        assert flip["a"]["margin"] < 1 and flip["b"]["margin"] < 1


def test_the_origin_is_a_linear_site_where_the_row_count_changed_the_kernel(
    switched: tuple[int, dict[str, Any]],
) -> None:
    flipped = [request for request in switched[1]["requests"] if request["flip"] is not None]
    assert flipped
    for request in flipped:
        origin, entry, differing_entries = (
            request["origin"],
            request["cache_entry"],
            request["differing_entries"],
        )
        assert origin["kind"] in ("linear", "head") and origin["how"] == "leaf"
        paths = {origin["path_a"], origin["path_b"]}
        assert paths == {"reference/candle-metal/mv", "reference/candle-metal/mm"}
        for side in ("a", "b"):
            few = origin[f"rows_{side}"] <= 4
            assert origin[f"path_{side}"].endswith("mv" if few else "mm")
        assert entry["kind"] in ("K", "V") and entry["layer"] >= origin["layer"]
        assert entry["position"] >= origin["position"]
        assert differing_entries["count"] > 0
        assert request["inherited"] is True
        assert {count["kind"] for count in request["origins"]} <= {"linear", "head"}


@only_in_full("what `test_real_reference_case.py` shows on the same weights")
def test_holding_the_path_makes_the_runs_identical(smollm2_packed_bf16: Path) -> None:
    code, answer = _compare(smollm2_packed_bf16, 1024)
    assert code == 0
    assert answer["identical"]
    assert answer["compared"]["rows"] > 100 and answer["compared"]["digests"] > 50_000
    assert answer["compared"]["differing"] == 0
    assert all(request["origins"] == [] for request in answer["requests"])
