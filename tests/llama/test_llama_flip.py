"""A real flip on llama.cpp's own kernels, with the whole story of the reference case; and the search that finds one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from models import need_llama, tiny_gguf
from tiers import only_in_full

from detdiff.cli import main
from detdiff.compare import compare
from detdiff.engines.base import RunOptions
from detdiff.engines.llama_cpp.context import LlamaModel
from detdiff.engines.llama_cpp.layout import checked_library
from detdiff.engines.record import record
from detdiff.engines.registry import open_named
from detdiff.report import verdict_text
from detdiff.report.saved import read_saved
from detdiff.scenario import Scenario

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from llama_flip import PROMPTS, FlipSearch, PromptAnswers, Step, encoded, listed, paired  # noqa: E402

CASE = ROOT / "traces" / "reference-case"
SHARED = 24
"""Tokens for which prompts are decoded together, and as many as the follower has."""


@pytest.fixture(autouse=True)
def library() -> None:
    need_llama()


# The search.


def test_prompts_that_are_computed_alike_never_flip(tmp_path: Path) -> None:
    model = LlamaModel(checked_library(), tiny_gguf(tmp_path / "m.gguf", "Q8_0"))
    texts = [text[:12] for text in PROMPTS[:4]]
    search = FlipSearch(model, [model.encode(text) for text in texts], 16)
    for neighbours in (16, 5):
        found = paired(texts, search.alone(), search.beside(neighbours))
        assert [each.flip for each in found] == [None] * 4 and {each.shift for each in found} == {0.0}
        text = listed(model, found)
        assert text.startswith("0 of 4 prompts flip") and text.count("margins moved by 0.000000 at most") == 4


def test_a_neighbour_that_leaks_is_a_flip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaModel(checked_library(), tiny_gguf(tmp_path / "m.gguf", "Q8_0"))
    texts = [text[:12] for text in PROMPTS[:3]]
    search = FlipSearch(model, [model.encode(text) for text in texts], 12)
    alone = search.alone()
    rows = FlipSearch._rows

    def swapped(self: FlipSearch, asked: Any) -> list[Step]:
        found = rows(self, asked)
        return [found[1], found[0], *found[2:]] if len(asked) == 3 and len(asked[0][1]) == 7 else found

    monkeypatch.setattr(FlipSearch, "_rows", swapped)
    found = paired(texts, alone, search.beside(12))
    assert [each.flip for each in found] == [7, 7, None]
    text = listed(model, found)
    assert text.startswith("2 of 3 prompts flip") and text.count("  token 7: ") == 2


def test_the_closest_margin_is_listed_before_a_flip_only() -> None:
    def steps(*found: tuple[int, float]) -> tuple[Step, ...]:
        return tuple(Step(token, 9, margin) for token, margin in found)

    alone = steps((1, 0.5), (2, 0.25), (3, 0.125), (4, 0.0625))
    same = PromptAnswers("p", alone, steps((1, 0.5), (2, 0.375), (3, 0.125), (4, 0.0625)))
    assert same.flip is None and same.closest == 3 and same.shift == 0.125
    flipped = PromptAnswers("p", alone, steps((1, 0.5), (2, 0.25), (9, 0.5), (5, 9.0)))
    assert flipped.flip == 2 and flipped.closest == 1 and flipped.shift == 0.0


# The real one.


@pytest.fixture(scope="module")
def found(smollm2_f16_gguf: Path) -> tuple[list[PromptAnswers], str]:
    """The prompts' answers beside others that end, and the list of what was found."""
    need_llama()
    model = LlamaModel(checked_library(), smollm2_f16_gguf)
    search = FlipSearch(model, [encoded(model, text) for text in PROMPTS], 48)
    answers = paired(PROMPTS, search.alone(), search.beside(SHARED))
    return answers, listed(model, answers)


@pytest.fixture(scope="module")
def sides(smollm2_f16_gguf: Path, smollm2_q4_1_gguf: Path) -> tuple[Scenario, Scenario]:
    """The reference case as it was found on one processor; on another it may keep its text."""
    need_llama()
    serial, continuous = (
        Scenario.from_toml(CASE / f"llama-{name}.toml") for name in ("serial", "continuous")
    )
    files = {"model": str(smollm2_f16_gguf), "draft": str(smollm2_q4_1_gguf)}
    return serial.with_changes(**files), continuous.with_changes(**files)


@pytest.fixture(scope="module")
def case(
    found: tuple[list[PromptAnswers], str], sides: tuple[Scenario, Scenario]
) -> tuple[Scenario, Scenario]:
    """The reference case with the prompt that flips first after its neighbour has ended."""
    answers, listing = found
    if not any(each.shift for each in answers):
        pytest.skip("this processor's F16 kernels compute a row alike for every number of rows")
    inherited = [each for each in answers if each.flip is not None and each.flip > SHARED]
    if not inherited:
        pytest.skip(f"no prompt flips on this processor after its neighbours have ended: {listing}")
    anchor = min(inherited, key=lambda each: each.flip or 0)
    changed = []
    for asked in sides:
        first, second = asked.requests
        follower = PROMPTS[0] if anchor.prompt == second.prompt else second.prompt
        flip = anchor.flip or 0
        requests = (
            replace(first, prompt=anchor.prompt, max_tokens=flip + 3),
            replace(second, prompt=follower, max_tokens=SHARED),
        )
        changed.append(replace(asked, requests=requests))
    return changed[0], changed[1]


def short(scenario: Scenario) -> Scenario:
    """The scenario with so few tokens that no flip is waited for."""
    return replace(scenario, requests=tuple(replace(each, max_tokens=28) for each in scenario.requests))


def toml(scenario: Scenario, path: Path) -> str:
    """The scenario as a file for the command."""
    keys = scenario.to_dict()
    requests = keys.pop("request")

    def lines(given: dict[str, Any]) -> list[str]:
        return [f"{key} = {json.dumps(value)}" for key, value in given.items()]

    path.write_text(
        "\n".join([*lines(keys), *(line for each in requests for line in ("[[request]]", *lines(each)))])
    )
    return str(path)


@only_in_full(
    "the search for a flip on SmolLM2, whose page and controls `test_smollm2_llama.py` has without a flip"
)
@pytest.mark.real_model
def test_the_page_tells_the_whole_story(
    case: tuple[Scenario, Scenario], found: tuple[list[PromptAnswers], str], tmp_path: Path
) -> None:
    files = [toml(each, tmp_path / f"{name}.toml") for each, name in zip(case, "ab", strict=True)]
    page, answer = tmp_path / "page.html", tmp_path / "answer.json"
    done = CliRunner().invoke(
        main, ["report", *files, "--explain", "--html", str(page), "--json", str(answer)]
    )
    assert done.exit_code == 0, done.output
    verdict = read_saved(answer).verdict
    assert verdict is not None and verdict.kind == "numerics" and verdict.divergence is not None
    divergence = verdict.divergence

    # 1. The flip, with the draft's proposals: what the search without a trace had found, too.
    anchor = divergence.request("anchor")
    searched = next(each for each in found[0] if each.prompt == case[0].requests[0].prompt)
    assert anchor.flip is not None and anchor.flip.index == searched.flip and anchor.swapped
    assert searched.flip is not None
    assert anchor.flip.a.token == searched.alone[searched.flip].token
    assert anchor.flip.b.token == searched.beside[searched.flip].token
    assert anchor.flip.a.margin == pytest.approx(searched.alone[searched.flip].margin, abs=1e-6)
    verification = anchor.verification
    assert verification is not None and verification.proposals_equal and not verification.choices_equal
    assert verification.flip_a is not None and verification.flip_b is not None
    assert verification.flip_a.proposal == verification.flip_b.proposal

    # 2. Nothing arose in its forward, which was alike on both sides: it was inherited.
    assert divergence.first == "anchor"
    told = verdict_text(verdict)
    text = " ".join(told.split())
    assert "(1 row: 1 verify of anchor); b: forward" in text and "0 origins there: inherited" in text

    # 3. The birth: a product of layer 0 that saw the follower's rows beside.
    origin = anchor.origin
    assert origin is not None and origin.kind == "linear" and origin.layer == 0
    assert origin.rows_a == 1 and origin.rows_b is not None and origin.rows_b > 1
    assert origin.composition_b is not None
    members = {(member.request, member.phase) for member in origin.composition_b.members}
    assert members == {("anchor", "verify"), ("follower", "prefill")}

    # 4. What carried it.
    assert anchor.cache_entry is not None and anchor.cache_entry.position == origin.position
    assert anchor.differing_entries is not None and anchor.differing_entries.alive_at == anchor.flip.position

    # 5. The controls, pinning first, and what the engine counted.
    results = {control.name: control.result for control in verdict.controls}
    assert results["repeat"] == "equal" and results["pin_kernels"] == "removed"
    assert results["neighbour_content"] == results["neighbour_length"] == "equal"
    assert results["patch_in"] == "removed" and results["patch_out"] == "reproduced"
    for request in divergence.requests:
        assert request.verification is not None
        for run in (request.verification.a, request.verification.b):
            assert run is not None and run.agrees and 0 < run.accepted <= run.proposed

    # 6. Against float64.
    assert results["oracle"] == "inside"

    # 7. The page has it all.
    html = page.read_text(encoding="utf-8")
    for title in (
        "The flip",
        "Where it arose",
        "What carried it",
        "The controls",
        "Against float64",
        "The verdict",
    ):
        assert f"\n{title}\n---" in told and title in html
    assert "inherited" in html and "acceptance" in html and "Qcur-0.MUL_MAT" in html


@pytest.mark.real_model
@pytest.mark.thorough
def test_a_draft_alone_changes_rows_and_so_bits(sides: tuple[Scenario, Scenario], tmp_path: Path) -> None:
    """Rows that verify several proposals take the kernels of several rows, with no other request near."""
    asked = short(sides[0])
    assert asked.speculation is not None
    plain = replace(asked, speculation=None)
    four = replace(asked, speculation=replace(asked.speculation, drafts=4))
    engine = open_named("llama.cpp", str(asked.model), {})
    options = RunOptions(observe=0)
    traces = [
        record(each, tmp_path / str(n), engine=engine, options=options)
        for n, each in enumerate((plain, four))
    ]
    divergence = compare(*traces)
    anchor = divergence.request("anchor")
    if anchor.identical:
        pytest.skip("this processor's F16 kernels compute a row alike for every number of rows")
    origin = anchor.origin
    assert origin is not None and origin.kind == "linear" and (origin.rows_a, origin.rows_b) == (1, 4)
    verification = anchor.verification
    assert verification is not None and verification.a is None
    assert (
        verification.b is not None
        and verification.b.agrees
        and verification.b.accepted < verification.b.proposed
    )
    assert not divergence.bookkeeping
    trims = [event for event in traces[1].events() if event["event"] == "trim"]
    assert trims and all(event["done"] == event["asked"] for event in trims)


@pytest.mark.real_model
@pytest.mark.thorough
def test_weights_that_are_computed_alike_give_one_text(
    sides: tuple[Scenario, Scenario], smollm2_q8_0_gguf: Path, tmp_path: Path
) -> None:
    serial, continuous = (short(each).with_changes(model=str(smollm2_q8_0_gguf), drafts=4) for each in sides)
    engine = open_named("llama.cpp", str(smollm2_q8_0_gguf), {})
    options = RunOptions(observe=0)
    traces = [
        record(each, tmp_path / str(n), engine=engine, options=options)
        for n, each in enumerate((serial, continuous, replace(serial, speculation=None)))
    ]
    found = compare(traces[0], traces[1])
    assert found.identical and not found.bookkeeping
    assert compare(traces[2], traces[1]).identical
