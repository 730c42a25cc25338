"""Six faults behind an address, each named as far as it can be from outside, and servers without any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from local_servers import SmallModel

from detdiff import Scenario, explain
from detdiff.compare.tokens import Steps
from detdiff.explain import Verdict, outside

PROMPTS = ["the first prompt", "another one", "a third, which is longer", "and the last"]


def verdict(
    fault: str,
    *,
    body: Mapping[str, Any] | None = None,
    prompts: list[str] = PROMPTS,
    schedule: str = "serial",
    **how: Any,
) -> Verdict:
    """The verdict on serial, or another ``schedule``, against one batch of a small model with a fault."""
    with SmallModel(fault, **how).at() as address:
        alone = Scenario.from_flags(f"{address}/v1", prompts, f"{schedule} max_tokens=5 engine.retries=0")
        if body:
            alone = alone.with_changes(**{"engine.body": dict(body)})
        size = {"size": len(prompts), **(body or {})}
        return explain(alone, alone.with_changes(**{"schedule": "static", "engine.body": size}))


def test_a_healthy_server_is_identical() -> None:
    found = verdict("")
    assert found.kind == "identical"


def test_rounding_is_never_called_a_bug() -> None:
    found = verdict("rounding")
    assert (found.kind, found.rule) == ("undetermined", "outside-only")
    assert found.sentence.startswith("As rounding would look: log-probabilities move by ")
    assert any("a server shows answers alone" in each for each in found.missing)
    results = {control.name: control.result for control in found.controls}
    assert results["repeat"] == results["served"] == results["other_neighbours"] == "equal"
    assert results["answers"] == "own" and results["cached"] == "none"
    assert results["fresh"] == "not_run"


def test_answers_that_are_swapped() -> None:
    found = verdict("swapped")
    assert (found.kind, found.rule) == ("bug", "another-answer")
    assert "got the text that" in found.sentence


def test_log_probabilities_of_the_neighbour() -> None:
    found = verdict("neighbour_scores")
    assert (found.kind, found.rule) == ("bug", "another-answer")
    assert "got the log-probabilities that" in found.sentence


def test_what_is_kept_between_requests() -> None:
    found = verdict("state")
    assert (found.kind, found.rule) == ("nondeterminism", "served")
    assert "depends on the request that was served before it" in found.sentence


def test_what_is_random_in_batches() -> None:
    found = verdict("random")
    assert (found.kind, found.rule) == ("nondeterminism", "repeat")
    assert found.sentence.startswith("Requests that the server is sent together do not repeat")
    assert "Not as rounding would look" in found.sentence
    found = verdict("random", schedule="static:2", body={"size": 2})
    assert found.sentence.startswith("Requests that the server is sent together do not repeat")


@pytest.mark.parametrize("owner", ["other"])
def test_a_prefix_cache_with_the_wrong_page(owner: str) -> None:
    found = verdict("wrong_page", owner=owner)
    assert (found.kind, found.rule) == ("configuration", "cached")
    assert "It does not look as rounding would: a wrong or a stale page" in found.sentence
    assert "from outside it cannot be told which" in found.sentence


def test_a_prefix_cache_without_fault_changes_nothing() -> None:
    assert verdict("", owner="other").kind == "identical"


def test_a_penalty_that_is_dropped_in_a_batch() -> None:
    found = verdict("no_penalty", body={"repetition_penalty": 1.2})
    assert (found.kind, found.rule) == ("bug", "dropped")
    assert "Without repetition_penalty, side a gives bit for bit what side b gives with it" in found.sentence


def test_a_penalty_that_is_kept() -> None:
    found = verdict("rounding", body={"repetition_penalty": 1.2})
    assert found.rule == "outside-only"
    assert next(each.result for each in found.controls if each.name == "unset") == "kept"


def test_the_content_of_neighbours() -> None:
    found = verdict("leak")
    assert (found.kind, found.rule) == ("bug", "content")
    assert "follows the content of its neighbours" in found.sentence


def test_text_alone_says_what_cannot_be_known() -> None:
    found = verdict("rounding", owner="other")
    assert found.kind == "undetermined"
    assert any("neighbours of the same number of tokens cannot be made" in each for each in found.missing)


def steps(tokens: list[int], scores: list[list[float]], ids: list[list[int]]) -> Steps:
    """The answer to one request, token by token."""
    places = np.arange(len(tokens), dtype=np.int32)
    return Steps(
        np.array(tokens, np.int32), places, places, np.array(ids, np.int32), np.array(scores, np.float32)
    )


def test_short_answers_that_are_alike_are_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yes and no: one that flips by rounding has the text of another request, and its own numbers."""
    yes, no, dot, end = 1, 2, 3, 4
    rest, rest_ids = [[-0.01, -5.0], [-0.02, -4.0]], [[dot, end], [end, dot]]
    own = steps([no, dot, end], [[-0.693, -0.694], *rest], [[no, yes], *rest_ids])
    flipped = steps([yes, dot, end], [[-0.692, -0.695], *rest], [[yes, no], *rest_ids])
    other = steps([yes, dot, end], [[-0.05, -3.0], *rest], [[yes, no], *rest_ids])
    alone, together = {"x": own, "y": other}, {"x": flipped, "y": other}

    def found(alone: dict[str, Steps], together: dict[str, Steps]) -> list[outside.BorrowedAnswer]:
        sides = {"a": alone, "b": together}
        monkeypatch.setattr(outside, "_answers", lambda side: sides[side].items())
        return list(outside.borrowed("a", "b"))  # type: ignore[arg-type]

    assert found(alone, together) == []
    far = steps([no, dot, end], [[-0.05, -3.0], *rest], [[no, yes], *rest_ids])
    swapped = found({"x": far, "y": other}, {"x": other, "y": far})
    assert [(each.request, each.other, each.what) for each in swapped] == [
        ("x", "y", "text"),
        ("y", "x", "text"),
    ]


def test_the_same_prompt_twice_has_either_answer_by_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place of a batch has the bits of a request alone, and the other place other ones."""
    ids, tokens = [[1, 2], [2, 3], [3, 4]], [1, 2, 3]
    one = steps(tokens, [[-0.5, -1.0], [-0.6, -1.2], [-0.7, -1.5]], ids)
    other = steps(tokens, [[-0.501, -1.001], [-0.601, -1.201], [-0.701, -1.501]], ids)
    elsewhere = steps([5, 6, 7], [[-0.1, -3.0], [-0.2, -2.0], [-0.3, -2.5]], [[5, 1], [6, 1], [7, 1]])
    sides = {"a": {"x": one, "y": one, "z": elsewhere}, "b": {"x": other, "y": one, "z": elsewhere}}
    monkeypatch.setattr(outside, "_answers", lambda side: sides[side].items())
    assert [*outside.borrowed("a", "b"), *outside.borrowed("b", "a")] == []  # type: ignore[arg-type]
    sides["b"] |= {"x": elsewhere}
    (found,) = outside.borrowed("a", "b")  # type: ignore[arg-type]
    assert (found.request, found.other, found.what) == ("x", "z", "text")


def test_certain_tokens_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of zero are the same everywhere."""
    sure = [[0.0]] * 5
    sides = {
        "a": {"x": steps([1, 2, 3, 4, 5], [[-0.5], *sure[1:]], [[each] for each in (1, 2, 3, 4, 5)]),
              "y": steps([6, 7, 8, 9, 9], sure, [[each] for each in (6, 7, 8, 9, 9)])},
        "b": {"x": steps([1, 2, 3, 4, 5], sure, [[each] for each in (1, 2, 3, 4, 5)])},
    }  # fmt: skip
    monkeypatch.setattr(outside, "_answers", lambda side: sides[side].items())
    assert list(outside.borrowed("a", "b")) == []  # type: ignore[arg-type]
