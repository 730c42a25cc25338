"""The demonstration on this machine: one case flips, one is held, one parts without a flip."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from command_line import run

from detdiff import demo
from detdiff.demo import cases_json, run_demo, text
from detdiff.report import from_json


def test_the_demo_shows_what_it_promises() -> None:
    cases = list(run_demo(lambda _: nullcontext()))
    *tries, held, quiet = cases
    flipped = tries[-1].divergence
    assert not any(case.flips for case in tries[:-1]) and tries[-1].flips
    for request in flipped.requests:
        if request.flip is None:
            continue
        assert request.origin is not None and request.origin.kind == "linear"
        assert request.origin.path_a != request.origin.path_b
        assert (request.origin.rows_a or 0) <= 4 < (request.origin.rows_b or 0)
        assert (
            request.cache_entry is not None
            and request.differing_entries is not None
            and request.differing_entries.count > 0
        )
        assert request.inherited
    assert held.divergence.identical
    assert not quiet.divergence.identical and not quiet.flips
    out = "".join(text(cases))
    for words in (
        "and flips",
        "origin:",
        "first cache entry:",
        "differing cache entries:",
        "inherited",
        "no token flips",
        "are identical",
    ):
        assert words in out, words
    assert "No token flipped" not in out
    assert "\n    detdiff compare --model DIR" in out
    answer = json.loads(json.dumps(cases_json(cases), allow_nan=False))
    assert answer["schema"] == "detdiff.demo/2"
    assert [from_json(case["divergence"]) for case in answer["cases"]] == [case.divergence for case in cases]


@pytest.mark.thorough
def test_where_nothing_flips_the_demo_tries_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ANCHORS", (("In the beginning", 2), ("My son", 2)))
    monkeypatch.setattr(demo, "QUIET", ("And he", 2))
    result = run("demo")
    assert result.exit_code == 0, result.output
    titles = [line for line in result.output.splitlines() if "; anchor " in line]
    assert ["In the beginning" in titles[0], "My son" in titles[1], "pinned" in titles[2]] == [True] * 3
    assert "No token flipped in any of these runs on this machine" in " ".join(result.output.split())


@pytest.mark.thorough
def test_the_demo_answers_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ANCHORS", (("In the beginning", 2),))
    monkeypatch.setattr(demo, "QUIET", ("And he", 2))
    result = run("demo", "--json")
    assert result.exit_code == 0
    assert [case["anchor"] for case in json.loads(result.stdout)["cases"]] == ["In the beginning"] * 2 + [
        "And he"
    ]
