"""The reports of a verdict: the text of each kind, the seven parts in their order, and the JSON keys."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_verdict_rules import CASES
from verdict_facts import FAR, OUTSIDE, SPECULATION, TRIM, control, diverged, facts, found, oracle, speculated

from detdiff.compare import NotCompared
from detdiff.explain import Control, Verdict
from detdiff.explain.rules import decide
from detdiff.report import from_json, verdict_json, verdict_text
from detdiff.report.json import VERDICT as SCHEMA

PAIR = {
    "kind": "linear", "path_a": "reference/x/mv", "path_b": None, "judged": 12, "worst_a": 0.0123456, "worst_b": None,
    "nearer": "equal", "bound_a": "linear: n roundings", "bound_b": "linear: m roundings",
}  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs" / "json-schema.md"


def flat(text: str) -> str:
    return " ".join(text.split())


def verdict() -> Verdict:
    """Of a path change with speculation, in which every control ran."""
    found = facts(
        speculated(diverged()),
        oracle=oracle("inside", pairs=[PAIR]),
        minimal_change="smallest",
        patch_in="removed",
    )
    late = {**found.controls, "dtype": Control("dtype", "not_run", "the model is in float32 already", 0, 0.0)}
    return decide(replace(found, controls=late))


TITLES = (
    "The flip", "Where it arose", "What carried it", "The controls", "Against float64", "The verdict", "Margins",
    "What was compared",
)  # fmt: skip


def sections(text: str) -> dict[str, str]:
    """The parts of a text by their titles."""
    parts = re.split(r"^(.+)\n-{3,}$", text, flags=re.MULTILINE)
    return {title: flat(part) for title, part in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_parts_stand_in_their_order() -> None:
    text = verdict_text(verdict())
    assert tuple(sections(text)) == TITLES
    assert (
        flat(text).startswith('Rounding: anchor flips at token 3 from " t33" to " t93"; ')
        and "\nkind: numerics\n" in text
    )


def test_each_part_says_what_it_should() -> None:
    flip, origin, cache, controls, float64, end, _, compared = sections(
        verdict_text(verdict(), width=200)
    ).values()
    assert "generated token 3 is 33" in flip and "25.571232" in flip and "top two swapped" in flip
    assert "draft: both runs had the same draft for the flip's token (323)" in flip
    assert "kernel paths equal on both sides" in flip and "0 origins there: inherited" in flip
    assert "layers.0.attn.k_proj (linear, layer 0), position 2" in origin and "4 prefill of anchor" in origin
    assert "first cache entry: layer 0, K, head 0, position 2" in cache and "alive at the flip" in cache
    assert (
        re.search(r"pin_kernels removed .* 7 0\.2", controls)
        and "repeat equal" in controls
        and "minimal_change smallest" in controls
    )
    assert "not run: dtype: the model is in float32 already" in controls
    assert (
        "5 of 8 drafts accepted in a and 4 of 8 drafts accepted in b; the engine counted the same" in controls
    )
    assert "linear reference/x/mv native 12 0.0123 - neither" in float64 and "bound of a, linear" in float64
    assert end.startswith("numerics, by the rule `path`. Rounding:") and "what to do: Where the text" in end
    assert "equal in all that was compared: follower, quiet" in compared


def test_an_engine_that_counts_otherwise_is_told_loudly() -> None:
    assert SPECULATION.b is not None
    wrong = replace(SPECULATION, b=replace(SPECULATION.b, own_accepted=5, agrees=False))
    text = verdict_text(decide(facts(speculated(diverged(), wrong))))
    assert "THE ENGINE COUNTED OTHERWISE" in flat(text)


def test_a_flip_on_one_request_and_none_on_another() -> None:
    text = flat(verdict_text(verdict(), width=200))
    assert "request anchor: diverges in bits and flips at generated token 3" in text
    assert "equal in all that was compared: follower, quiet" in text


@pytest.mark.parametrize("name", CASES)
def test_every_kind_has_a_text_of_lines_that_fit(name: str) -> None:
    found = decide(CASES[name][0]())
    text = verdict_text(found, width=80)
    assert f"\nkind: {found.kind}\n" in text and text.endswith("\n") and "\n\n\n" not in text
    assert flat(found.sentence) in flat(text) and f"by the rule `{name}`" in flat(text)
    for each in found.deciding:
        assert f"because: {flat(each.sentence)}" in flat(text)
    if found.advice:
        assert f"what to do: {flat(found.advice)}" in flat(text)
    assert [line for line in text.splitlines() if len(line) > 80 and "  " not in line.strip()] == []


def test_what_is_missing_is_listed() -> None:
    text = flat(verdict_text(decide(facts(repeat="not_run", oracle=oracle("outside")))))
    assert "missing: the control repeat (it was not asked for)" in text
    assert "missing: the control oracle gave outside, not inside" in text


def test_what_is_outside_and_whom_it_affects_is_shown() -> None:
    outside = oracle("outside", outside_where=[OUTSIDE], pattern="only rows from 1 on (every such row)")
    text = flat(verdict_text(decide(facts(oracle=outside))))
    assert f"outside: {OUTSIDE['said']}" in text and "affected: only rows from 1 on (every such row)" in text
    assert "Affected: only rows from 1 on (every such row)." in text


def test_a_finding_says_in_which_run_and_forward() -> None:
    text = flat(verdict_text(decide(facts(found(diverged(), TRIM)))))
    assert f"{TRIM.detail} (in run b, forward 6)" in text


def test_texts_of_the_trace_cannot_break_the_lines() -> None:
    odd = control("repeat", "equal")
    text = verdict_text(decide(facts(repeat=replace(odd, sentence="a\x1b[31m b"))))
    assert "\x1b" not in text


# JSON


def keys(value: Any) -> set[str]:
    """Of every object of an answer."""
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys(item)}
    return {key for item in value for key in keys(item)} if isinstance(value, list) else set()


def documented() -> set[str]:
    section = DOCS.read_text(encoding="utf-8").partition("\n# The JSON answer of `explain`\n")[2]
    return {
        key
        for line in section.splitlines()
        if line.startswith("|")
        for key in re.findall(r"`([a-z][a-z_0-9]*)`", line)
    }


def test_json_has_the_keys_that_scripts_rely_on() -> None:
    answer = json.loads(json.dumps(verdict_json(verdict()), allow_nan=False))
    assert list(answer) == [
        "schema", "verdict", "said", "rule", "advice", "missing", "evidence", "controls", "fragile", "divergence",
    ]  # fmt: skip
    assert answer["schema"] == SCHEMA == "detdiff.verdict/2" and answer["verdict"] == "numerics"
    for each in answer["controls"]:
        assert set(each) == {"name", "result", "said", "forwards", "seconds", "detail"}
    for each in answer["evidence"]:
        assert set(each) == {"fact", "said", "decided", "detail"}
    assert from_json(answer["divergence"]) == speculated(diverged())


def test_every_key_of_the_answer_is_documented() -> None:
    answer = verdict_json(verdict())
    del answer["divergence"]
    for each in (*answer["evidence"], *(c for c in answer["controls"] if c["name"] != "oracle")):
        del each["detail"]
    assert keys(answer) - documented() == set()
    assert {"worse", "outside_where", "columns", "judged"} <= documented() and "surprise" not in documented()


@pytest.mark.parametrize("name", CASES)
def test_every_kind_is_json(name: str) -> None:
    answer = verdict_json(decide(CASES[name][0]()))
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert (answer["divergence"] is None) == (name == "nothing")


def test_numbers_that_json_does_not_have() -> None:
    odd = oracle("inside", far={**FAR, "ratio": float("inf")}, ratio=float("nan"))
    answer = verdict_json(replace(decide(facts()), controls=(odd,)))
    detail = answer["controls"][0]["detail"]
    assert (detail["far"]["ratio"], detail["ratio"]) == ("Infinity", "NaN")


def test_the_request_that_is_not_compared_stays_in_the_answer() -> None:
    left_out = replace(diverged(), not_compared=(NotCompared("late", "only run b has it"),))
    assert verdict_json(decide(facts(left_out)))["divergence"]["not_compared"][0]["id"] == "late"
