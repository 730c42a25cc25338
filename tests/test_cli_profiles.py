"""`detdiff profiles`: the list, a profile's rules, and where the kernel changes over a range of sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import paragraph, run
from profile_files import FIRST, HEAD, define, parameter, rule, written

from detdiff_kernels import profile_names

SHAPE = ("--k", "2048", "--n", "2048")


def answer(*words: str | Path) -> dict[str, Any]:
    result = run("profiles", *words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def spans(found: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [
        (band["first"], band["last"], " ".join(part["kernel"].partition("/")[2] for part in band["parts"]))
        for band in found["bands"]
    ]


def test_all_profiles_are_listed() -> None:
    result = run("profiles")
    assert result.exit_code == 0
    assert [name for name in profile_names() if name not in result.output] == []
    assert "mlx-metal, letter: last letter of the architecture's name" in result.output
    found = answer()
    assert found["schema"] == "detdiff.profiles/1"
    assert [one["name"] for one in found["profiles"]] == list(profile_names())
    metal = next(one for one in found["profiles"] if one["name"] == "mlx-metal")
    assert metal["parameters"][0]["name"] == "generation" and metal["rules"] == sum(metal["tags"].values())


def test_a_profile_without_a_size_says_its_rules() -> None:
    result = run("profiles", "candle-metal")
    assert (
        "1. linear, head: second-to-last dimension 1 -> candle-metal/mv (read: huggingface/candle"
        in " ".join(result.output.split())
    )
    found = answer("candle-metal")
    assert found["schema"] == "detdiff.profile/1" and found["spec"] == "candle-metal"
    assert found["each_rule"][0]["kernel"] == "candle-metal/mv" and found["each_rule"][0]["tag"] == "read"


def test_thresholds_are_marked_with_rule_value_source_and_tag() -> None:
    result = run("profiles", "mlx-metal", "--m", "1..32", *SHAPE)
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "mlx-metal:generation=15,letter=s,version=0.32.1" in words
    assert "Taken for granted: --bits 4, --group-size 64, --dtype bfloat16, --layout packed." in words
    assert "1 qmv_fast" in words and "2..12 qmv_wide" in words and "13..32 qmm_splitk" in words
    assert "M 13: qmv_wide -> qmm_splitk; before: quantised, 2 <= m < limit (13)" in words
    assert "qmv_wide (read): ml-explore/mlx 846d176 mlx/backend/metal/quantized.cpp dispatch_qmv" in words


def test_json_holds_the_same() -> None:
    found = answer("mlx-metal:generation=13", "--m", "1..40", *SHAPE, "--bits", "8", "--dtype", "float16")
    assert found["schema"] == "detdiff.profile/1" and found["axis"] == "m"
    assert found["spec"] == "mlx-metal:generation=13,letter=s,version=0.32.1,nax=auto,tf32=on"
    assert found["thresholds"] == [14, 33]
    assert spans(found) == [(1, 13, "qmv_fast"), (14, 32, "qmm_splitk"), (33, 40, "qmm_splitk")]
    assert found["assumed"] == ["--group-size 64", "--layout packed"]
    assert found["call"] == {
        "op": "linear", "k": 2048, "n": 2048, "dtype": "float16", "bits": 8, "group_size": 64, "format": "affine",
        "experts": 1, "sorted": False,
    }  # fmt: skip
    part = found["bands"][1]["parts"][0]
    assert (part["first_row"], part["last_row"]) == (0, 13)
    assert part["rule"].startswith("mlx-metal: quantised, m >= limit (14) and splits (8) > 1")
    assert part["tag"] == "read" and "qmm_splitk" in part["source"]


def test_the_layout_is_the_second_to_last_dimension() -> None:
    assert spans(answer("candle-metal", "--m", "1..4", *SHAPE)) == [(1, 1, "mv"), (2, 4, "mm")]
    padded = ("--layout", "padded")
    assert spans(answer("candle-metal", "--m", "1..4", *SHAPE, *padded)) == [(1, 4, "mv")]
    assert (
        "No threshold from 1 to 4." in run("profiles", "candle-metal", "--m", "1..4", *SHAPE, *padded).output
    )


def test_key_lengths_and_query_lengths_are_axes() -> None:
    heads = ("--heads", "9", "--kv-heads", "3", "--head-dim", "64")
    keys = answer("mlx-metal:letter=g", "--keys", "1..5000", *heads)
    assert keys["axis"] == "keys" and keys["thresholds"] == [4096]
    query = answer("mlx-metal:letter=g", "--op", "attention", "--keys", "300", "--query", "1..20", *heads)
    assert query["axis"] == "query" and query["thresholds"] == [9]
    assert "query length 9: sdpa_vector -> sdpa_steel" in run(
        "profiles", "mlx-metal:letter=g", "--keys", "300", "--query", "1..20", *heads
    ).output.replace("\n    ", " ")


def test_dense_weights_and_experts() -> None:
    dense = answer("mlx-metal", "--m", "1..16", *SHAPE, "--bits", "dense")
    assert spans(dense) == [(1, 1, "gemv"), (2, 5, "gemv_wide"), (6, 15, "gemv_wide"), (16, 16, "splitk")]
    assert dense["call"]["bits"] is None and dense["call"]["group_size"] is None
    sorted_rows = answer("mlx-metal", "--op", "switch", "--m", "1..64", *SHAPE, "--sorted", "--experts", "8")
    assert spans(sorted_rows) == [(1, 31, "qmv_fast"), (32, 64, "qmm_t")]


def test_rows_that_differ_by_place_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, rule("candle-metal/mm", whole=4), rule("candle-metal/mv"))
    found = answer(path, "--m", "3..9", *SHAPE)
    assert spans(found) == [(3, 3, "mv"), (4, 4, "mm"), (5, 7, "mm mv"), (8, 8, "mm"), (9, 9, "mm mv")]
    assert [(part["first_row"], part["last_row"]) for part in found["bands"][2]["parts"]] == [(0, 3), (4, 4)]
    text = " ".join(run("profiles", path, "--m", "3..9", *SHAPE).output.split())
    assert (
        "M 5: candle-metal/mm -> candle-metal/mm, then candle-metal/mv; before: whole groups of 4 rows"
        in text
    )


def test_a_file_with_parameters(tmp_path: Path) -> None:
    text = [HEAD, parameter("size", 3, range="1..9"), define("limit", "2 * size"), rule(when="m >= limit")]
    path = written(tmp_path, *text)
    assert spans(answer(f"{path}:size=2", "--m", "1..9", *SHAPE)) == [(1, 3, ""), (4, 9, "mv")]
    assert answer(path, "--m", "1..9", *SHAPE)["thresholds"] == [6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mlx-mtal"], "no dispatch profile named 'mlx-mtal'; did you mean mlx-metal"),
        (["mlx-metal:lettr=d"], "no parameter 'lettr'; did you mean letter"),
        (["mlx-metal:letter=x"], "it takes one of p, g, s, c, d"),
        (["lost.toml"], "Profile lost.toml cannot be read"),
        (["mlx-metal", "--m", "1..8"], "needs --k"),
        (["mlx-metal", *SHAPE], "needs --m"),
        (["mlx-metal", "--m", "8..1", *SHAPE], "--m is '8..1'; expected a number or a range"),
        (["mlx-metal", "--m", "0", *SHAPE], "from 1 on"),
        (["mlx-metal", "--m", "1..900000", *SHAPE], "at most 200,000 sizes"),
        (["mlx-metal", "--m", "1", *SHAPE, "--bits", "four"], "--bits is 'four'"),
        (["mlx-metal", "--m", "1", *SHAPE, "--bits", "dense", "--group-size", "64"], "has no --group-size"),
        (["mlx-metal", "--m", "1", *SHAPE, "--op", "linear", "--keys", "8"], "linear has no --keys"),
        (["mlx-metal", "--m", "1", *SHAPE, "--experts", "8"], "linear has no --experts"),
        (["mlx-metal", "--keys", "1..8", "--m", "1"], "attention has no --m"),
        (["mlx-metal", "--op", "attention"], "Attention needs --keys"),
        (["mlx-metal", "--keys", "1..8", "--query", "1..8"], "Both --query and --keys are ranges"),
        (["mlx-metal", "--keys", "8", "--heads", "9", "--kv-heads", "2"], "multiple of --kv-heads"),
    ],
)
def test_a_wrong_question_is_one_paragraph(words: list[str], message: str) -> None:
    assert message in paragraph(run("profiles", *words))


def test_a_broken_file_and_a_size_without_a_name_are_errors(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, FIRST, rule(rows=3))
    assert "rule 2 (rows 3 -> candle-metal/mv) can never be reached" in paragraph(run("profiles", path))
    result = run("profiles", "--m", "1..8", *SHAPE)
    assert result.exit_code == 2 and "give its NAME first" in result.stderr
    found = json.loads(run("profiles", path, "--json").stdout)
    assert found["schema"] == "detdiff.error/1" and found["error"] == "ProfileUnusable"
