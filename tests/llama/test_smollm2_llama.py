"""SmolLM2 in the real llama.cpp, alone against as requests come in: F16 differs and is explained, blocks are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import run
from models import need_llama

pytestmark = [pytest.mark.thorough, pytest.mark.real_model]

PROMPTS = ("The capital of France is", "Once upon a time there was", "def fibonacci(n):", "Water boils at")
SAME = "this processor's llama.cpp gives a row of F16 weights the same bits alone and beside others"


class ComparedRuns(NamedTuple):
    """The exit code of ``compare``, its answer, and the folder with both traces."""

    code: int
    answer: dict[str, Any]
    folder: Path


def compared(model: Path, folder: Path, *more: str) -> ComparedRuns:
    """What the command says of four requests, each alone, and as they arrive."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    result = run(
        "compare", "--engine", "llama.cpp", "--model", str(model), *prompts, "--a", "schedule=serial",
        "--b", "schedule=continuous arrivals=0,2,4,6", *more, "--keep", str(folder), "--json",
    )  # fmt: skip
    return ComparedRuns(result.exit_code, json.loads(result.stdout), folder)


@pytest.fixture(scope="module")
def f16(smollm2_f16_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> ComparedRuns:
    need_llama()
    found = compared(smollm2_f16_gguf, tmp_path_factory.mktemp("f16"), "--both", "max_tokens=6")
    if found.answer["identical"]:
        assert found.code == 0
        pytest.skip(SAME)
    return found


def recorded_as_it_is(answer: dict[str, Any]) -> bool:
    """Whether the first forwards of both runs give the same logits without being recorded."""
    return all(answer[side]["observer"]["equal"] is True for side in "ab")


def test_the_first_difference_is_a_product_of_layer_0_that_saw_more_rows(f16: ComparedRuns) -> None:
    assert f16.code == 1 and recorded_as_it_is(f16.answer)
    first = next(each for each in f16.answer["requests"] if each["id"] == f16.answer["first"])
    origin = first["origin"]
    assert origin["site"].endswith("-0.MUL_MAT") and (origin["kind"], origin["layer"]) == ("linear", 0)
    # Its inputs are bit-equal: an operation of its own, which no other one lies before.
    assert (origin["how"], origin["between"]) == ("leaf", [])
    assert origin["rows_a"] == 1 and origin["rows_b"] == origin["composition_b"]["rows"] > 1
    entry = first["cache_entry"]
    assert entry["kind"] in "KV" and entry["position"] >= origin["position"] and entry["layer"] < 30
    assert first["differing_entries"]["entries"] > 0


def test_it_is_explained_as_rounding_and_the_page_shows_it(f16: ComparedRuns, tmp_path: Path) -> None:
    page, saved = tmp_path / "page.html", tmp_path / "report.json"
    traces = (str(f16.folder / "a"), str(f16.folder / "b"))
    result = run("report", *traces, "--explain", "--html", str(page), "--json", str(saved))
    assert result.exit_code == 0, result.stderr
    verdict = json.loads(saved.read_text())["verdict"]
    controls = {each["name"]: each for each in verdict["controls"]}
    said = {name: each["result"] for name, each in controls.items()}
    for name, expected in (
        ("repeat", "equal"), ("oracle", "inside"), ("pin_kernels", "removed"), ("neighbour_content", "equal"),
        ("dtype", "not_run"),
    ):  # fmt: skip
        assert said[name] == expected, controls[name]["said"]
    oracle = controls["oracle"]["detail"]
    assert oracle["judged"] > 0 and (oracle["outside_a"], oracle["outside_b"]) == (0, 0)
    assert (verdict["verdict"], verdict["rule"]) == ("numerics", "path"), verdict["said"]
    assert "not_run" not in (said["patch_in"], said["patch_out"])
    flipped = any(each["flip"] is not None for each in f16.answer["requests"])
    if flipped:
        # What the cache carried decides on one side at least; the other's own sums may be as far off.
        assert said["patch_in"] == "removed" or said["patch_out"] == "reproduced", controls["patch_in"][
            "said"
        ]
    text = page.read_text()
    for shown in (
        "Qcur-0.MUL_MAT",
        "numerics",
        "pin_kernels",
        "each row decoded in a call of its own",
        "patch_out",
    ):
        assert shown in text, shown


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_blocks_of_integers_are_the_same_alone_and_beside_others(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    need_llama()
    found = compared(request.getfixturevalue(f"smollm2_{kind}_gguf"), tmp_path, "--both", "max_tokens=24")
    assert found.answer["identical"] and found.code == 0
    assert found.answer["compared"]["digests"] > 10_000 and not found.answer["inconclusive"]
    assert recorded_as_it_is(found.answer)
