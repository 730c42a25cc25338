"""Requests that one side may answer further than the other: a difference of configuration, unless what both computed differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache
from runs import model, patched, scenario

from detdiff.explain import explain
from detdiff.scenario import Scenario

ASKED: dict[str, Any] = {"lengths": (5, 7), "max_tokens": 4}


def other(asked: Scenario, **keys: Any) -> Scenario:
    """The scenario with other keys of its last request."""
    *before, last = asked.requests
    return replace(asked, requests=(*before, replace(last, **keys)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_tokens": 2}, "r1: max_tokens is 4 in run a and 2 in run b"),
        ({"cancel": 1}, "r1: cancel is none in run a and 1 in run b"),
    ],
)
def test_a_limit_of_one_side_is_named_as_configuration(keys: dict[str, Any], said: str) -> None:
    verdict = explain(scenario(**ASKED), other(scenario("static", **ASKED), **keys), loaded=model("llama"))
    assert (verdict.kind, verdict.rule) == ("configuration", "asked"), verdict.sentence
    assert said in verdict.sentence and "nothing differs" in verdict.sentence
    assert any(each.fact == "settings" and each.decided for each in verdict.evidence)


def test_what_both_computed_is_judged_whatever_the_limits() -> None:
    native = BatchKVCache.update_and_fetch

    def lossy(self: Any, keys: mx.array, values: mx.array) -> Any:
        keys, values = native(self, keys, values)
        return keys * (mx.arange(keys.shape[2]) != 3)[:, None], values

    undo = patched(BatchKVCache, "update_and_fetch", lossy)
    try:
        asked = other(scenario("static", **ASKED), max_tokens=2)
        verdict = explain(scenario(**ASKED), asked, loaded=model("llama"))
    finally:
        undo()
    assert verdict.kind == "bug", verdict.sentence


def test_a_turn_after_a_shorter_answer_is_left_out_with_it() -> None:
    table = scenario(**ASKED).to_dict()
    table["request"][-1]["turn"] = [{"id": "r1b", "tokens": [3, 4, 5]}]
    asked = Scenario.from_dict(table)
    first, second, turn = asked.requests
    shorter = replace(asked, requests=(first, replace(second, max_tokens=2), turn))
    verdict = explain(asked, shorter, loaded=model("llama"))
    assert (verdict.kind, verdict.rule) == ("configuration", "asked"), verdict.sentence


def test_equal_limits_leave_nothing_out() -> None:
    verdict = explain(scenario(**ASKED), scenario("static", **ASKED), loaded=model("llama"))
    assert verdict.kind == "identical", verdict.sentence
