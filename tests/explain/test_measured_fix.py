"""What to do about a kernel path: `detdiff.invariant` by name, with its price where that was measured, in text, HTML and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from html import unescape
from typing import Any

import pytest
from test_torch_verdicts import PLACE, explained, injected
from tiny import tiny
from torch_models import torch_or_skip
from verdict_facts import FAR, PRECISION, control, facts, oracle

from detdiff import Scenario, Verdict, explain
from detdiff.engines.mlx.engine import MlxEngine
from detdiff.explain.controls.invariant import InvariantFigures
from detdiff.explain.facts import Fix
from detdiff.explain.rules import decide
from detdiff.report import verdict_json, verdict_text
from detdiff.report.build import build
from detdiff.report.html import html as page

FIX = Fix(
    "`with detdiff.invariant(model):`",
    "what that costs here was not measured; explain --measure-fix measures it",
)
PRICE = {"batch": 3, "ratio": 1.25, "low": 1.2, "high": 1.5, "rounds": 9, "native": 0.004, "pinned": 0.005}
SAID = "here a decode step of 3 requests took 1.25 of its time as it is (1.20 to 1.50 in 9 rounds)"


def flat(text: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", "", text)).replace("`", "").split())


def everywhere(verdict: Verdict, words: str) -> bool:
    """Whether text, page and JSON say it in what to do."""
    answer = json.loads(json.dumps(verdict_json(verdict)))
    report = build(verdict.divergence, verdict, None, "")
    found = [
        flat(verdict_text(verdict, width=90)),
        flat(page(report)),
        flat(answer["advice"]),
        flat(report.advice),
    ]
    assert len({flat(words) in each for each in found}) == 1, found
    return flat(words) in found[0]


@pytest.mark.parametrize("rule", ["path", "worse-path", "precision"])
def test_what_was_measured_stands_beside_the_name_and_nothing_else_does(rule: str) -> None:
    judged = {
        "path": oracle("inside"),
        "worse-path": oracle("inside", far=FAR),
        "precision": oracle("inside", precision=PRECISION),
    }[rule]
    plain = replace(facts(oracle=judged), fix=FIX)
    assert decide(plain).rule == rule
    assert everywhere(decide(plain), "detdiff.invariant(model)") and everywhere(decide(plain), FIX.price)
    assert not everywhere(decide(replace(plain, fix=None)), "detdiff.invariant")

    def under(result: str, price: dict[str, Any], not_priced: str = "") -> Verdict:
        figures = InvariantFigures(("linear: rows",), price, not_priced, True, True)
        tried = replace(control("invariant", result), detail=figures)
        return decide(replace(plain, controls={**plain.controls, "invariant": tried}))

    assert everywhere(under("removed", PRICE), SAID) and not everywhere(under("removed", PRICE), FIX.price)
    assert everywhere(
        under("removed", {}, "kernels are emulated"), "no price was measured: kernels are emulated"
    )
    assert everywhere(under("remains", PRICE), "was tried, too") and not everywhere(
        under("remains", PRICE), SAID
    )


@pytest.mark.thorough
def test_a_price_that_was_measured_in_torch() -> None:
    torch = torch_or_skip()

    def halves(weight: Any, x: Any) -> Any:
        half = weight.shape[1] // 2
        linear = torch.nn.functional.linear
        return linear(x[..., half:], weight[:, half:]) + linear(x[..., :half], weight[:, :half])

    deciding = ("repeat", "pin_kernels", "oracle")
    run = partial(explained, torch, injected(torch, halves), controls=deciding)
    verdict = run(measure_fix=True)
    assert (verdict.kind, verdict.rule) == ("numerics", "path") and PLACE in verdict.sentence
    tried = verdict.control("invariant")
    assert tried is not None and tried.result == "removed", tried
    ratio = tried.detail["price"]["ratio"]
    assert tried.detail["price"]["batch"] == 3 and any(
        "rows" in each or "8" in each for each in tried.detail["pinned"]
    )
    assert everywhere(verdict, f"here a decode step of 3 requests took {ratio:.2f} of its time as it is")
    assert (
        everywhere(verdict, "with detdiff.invariant(model, policy='auto'):") and "serve" not in verdict.advice
    )
    assert everywhere(run(), "was not measured; explain --measure-fix measures it")


@pytest.mark.thorough
def test_emulated_kernels_have_no_price() -> None:
    keys = {"model": "tiny", "max_tokens": 3, "layout": "packed", "kernels": "candle-metal"}
    prompts = [{"tokens": [(7 * i + 5 * k) % 50 for k in range(6)]} for i in range(3)]
    serial = Scenario.from_dict({**keys, "request": prompts, "schedule": "serial"})
    engine = MlxEngine(tiny("llama", "q4"))
    run = partial(explain, serial, serial.with_changes(schedule="static"), engine=engine)
    verdict = run(controls=("repeat", "pin_kernels", "oracle"), measure_fix=True)
    assert (verdict.kind, verdict.rule) == ("numerics", "worse-path"), verdict.sentence
    tried = verdict.control("invariant")
    assert tried is not None and tried.result == "removed" and tried.detail["price"] == {}, tried
    assert everywhere(verdict, "detdiff.invariant(model, policy='auto', kernels='candle-metal')")
    assert everywhere(verdict, "detdiff serve MODEL --invariant --kernels candle-metal")
    assert everywhere(verdict, "no price was measured: the kernels of candle-metal are emulated here")
    # Where kernels are not the cause, nothing is tried, and that is said.
    same = explain(serial, serial, engine=engine, controls=("repeat",), measure_fix=True).control("invariant")
    assert same is not None and same.result == "not_run"
