"""Traces of any engine are compared in what both show, what cannot be said is said, and nothing compared is no pass."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from answer_traces import Answered, answers, taps
from synthetic_traces import Ask, Fault, Plan, serial, write_trace

from detdiff.compare import compare, series
from detdiff.errors import NothingComparable
from detdiff.scenario import Scenario

TOP = [[(5, 3.0), (6, 2.5)], [(6, 4.0), (5, 1.0)]]


def test_tokens_alone_give_the_flip(tmp_path: Path) -> None:
    a, b = (answers(tmp_path / str(n), Answered(tokens)) for n, tokens in enumerate(([5, 6, 7], [5, 6, 8])))
    found = compare(a, b)
    assert (found.identical, found.stage, found.compared.tokens, found.compared.digests) == (
        False,
        "tokens",
        3,
        0,
    )
    (request,) = found.requests
    assert request.flip is not None
    assert (request.flip.index, request.flip.a.token, request.flip.b.token) == (2, 7, 8)
    assert request.origin is None and request.differing_entries is None and request.logits_equal is None
    assert "both runs: sites, cache entries and logits are not recorded: it gives tokens alone" in found.notes
    assert (found.a.engine, set(found.a.lacks)) == ("mine:engine", {"sites", "cache", "logits"})
    assert len(series(a, b, found).requests) == 1


def test_equal_tokens_are_identical_in_what_both_show(tmp_path: Path) -> None:
    a, b = (answers(tmp_path / n, Answered([5, 6], TOP)) for n in "ab")
    found = compare(a, b)
    assert found.identical and not found.inconclusive
    assert found.requests[0].scores is not None and found.requests[0].scores.differing == 0


def test_no_answer_at_all_is_no_pass(tmp_path: Path) -> None:
    a, b = (answers(tmp_path / n, Answered()) for n in "ab")
    with pytest.raises(NothingComparable, match="it gives tokens alone"):
        compare(a, b)


def test_a_request_without_an_answer_is_not_compared(tmp_path: Path) -> None:
    a, b = (answers(tmp_path / n, Answered([5]), Answered()) for n in "ab")
    found = compare(a, b)
    assert (found.identical, found.inconclusive) == (False, True)
    assert [each.id for each in found.not_compared] == ["r1"]


def test_log_probabilities_that_moved_are_a_difference_in_float32(tmp_path: Path) -> None:
    a = answers(tmp_path / "a", Answered([5, 6], [[(5, -0.25)], [(6, -1.5)]]))
    b = answers(tmp_path / "b", Answered([5, 6], [[(5, -0.25)], [(6, -1.53)]]))
    found = compare(a, b)
    assert (found.identical, found.stage) == (False, "bits")
    scores = found.requests[0].scores
    assert scores is not None and (scores.compared, scores.differing) == (2, 1)
    assert (scores.index, scores.token) == (1, 6)
    assert scores.max_abs == pytest.approx(0.03, rel=1e-4)
    assert scores.max_ulp is not None and scores.max_ulp < 1 << 20


def test_logits_that_are_not_finite_equal_nothing(tmp_path: Path) -> None:
    bad = [[(5, math.inf), (6, 2.5)]]
    a, b = (answers(tmp_path / n, Answered([5], bad)) for n in "ab")
    found = compare(a, b)
    assert (found.identical, found.inconclusive) == (False, True)
    assert [(each.run, each.index, each.inf) for each in found.requests[0].not_finite] == [
        ("a", 0, 1),
        ("b", 0, 1),
    ]
    assert any("1 infinity" in note for note in found.notes)


def test_equal_logits_and_other_tokens_are_sampling(tmp_path: Path) -> None:
    a = answers(tmp_path / "a", Answered([5, 6], TOP))
    b = answers(tmp_path / "b", Answered([5, 5], TOP))
    found = compare(a, b)
    assert found.requests[0].logits_equal is True
    other = answers(tmp_path / "c", Answered([5, 5], [TOP[0], [(5, 4.5), (6, 1.0)]]))
    assert compare(a, other).requests[0].logits_equal is False


def test_texts_alone_give_the_first_character(tmp_path: Path) -> None:
    lacks = dict.fromkeys(("tokens", "sites", "logits"), "the server gives text")
    a, b, c = (
        answers(tmp_path / str(n), Answered(text=text), lacks=lacks)
        for n, text in enumerate(("the cat sat", "the cow", "the cat sat"))
    )
    found = compare(a, b)
    text = found.requests[0].text
    assert found.stage == "tokens" and text is not None
    assert (text.index, text.a, text.b) == (5, "at sat", "ow")
    assert compare(a, c).identical
    assert "both runs: token ids, sites and logits are not recorded: the server gives text" in found.notes


def test_an_engine_with_sites_beside_one_without(tmp_path: Path) -> None:
    ask = Ask("r0", (1, 2, 3), (5, 6))
    a = write_trace(tmp_path / "a", Plan([ask], serial([ask])))
    b = answers(tmp_path / "b", Answered([5, 8]))
    found = compare(a, b)
    assert found.requests[0].flip is not None and found.requests[0].flip.index == 1
    assert found.compared.digests == 0
    assert any(note.startswith("run b: ") and "not recorded" in note for note in found.notes)


def test_taps_without_a_cache_name_the_first_site_once(tmp_path: Path) -> None:
    sound = {"embed": (1, 2, 3, 4), "layer0": (5, 6, 7, 8), "layer1": (9, 10, 11, 12)}
    a = taps(tmp_path / "a", sound)
    b = taps(tmp_path / "b", {**sound, "layer0": (5, 66, 67, 68), "layer1": (9, 70, 71, 72)})
    (request,) = compare(a, b).requests
    assert request.origin is not None and request.differing_entries is None
    assert (request.origin.site, request.origin.position) == ("layer0", 1)
    assert request.origin.between == ("embed.out", "layer0.out")
    assert [count.count for count in request.origins] == [1]
    assert compare(a, taps(tmp_path / "c", sound)).identical


def test_a_warm_run_lacks_the_rows_of_what_it_reused(tmp_path: Path) -> None:
    sound = {"embed": (1, 2, 3, 4), "layer0": (5, 6, 7, 8)}
    a = taps(tmp_path / "a", sound)
    found = compare(a, taps(tmp_path / "b", sound, first=2))
    assert found.identical
    assert (found.compared.reused_b, found.compared.only_a, found.compared.rows) == (2, 0, 2)
    assert any("the first 2 rows were computed by run a alone" in note for note in found.notes)
    wrong = compare(a, taps(tmp_path / "c", {**sound, "layer0": (5, 6, 7, 9)}, first=2))
    assert wrong.requests[0].origin is not None and wrong.requests[0].origin.position == 3


def test_two_models_are_compared_where_they_are_asked_for(tmp_path: Path) -> None:
    ask = Ask("r0", (1, 2, 3), (5, 6))
    a = write_trace(tmp_path / "a", Plan([ask], serial([ask]), header={"model": {"weights_sha256": "1"}}))
    faults = [Fault("layers.1.attn.q_proj", "out", 0, 1), Fault("layers.1.norm1", "out", 0, 2)]
    b = write_trace(
        tmp_path / "b", Plan([ask], serial([ask]), faults, header={"model": {"weights_sha256": "2"}})
    )
    with pytest.raises(NothingComparable, match="different models"):
        compare(a, b)
    found = compare(a, b, across_models=True)
    (request,) = found.requests
    assert found.across_models and not found.identical and found.stage == "bits"
    assert request.origin is None and request.origins == () and found.first is None
    assert request.first_site is not None
    assert (request.first_site.site, request.first_site.position) == ("layers.1.norm1", 2)
    assert len(series(a, b, found).requests) == 1


def test_folders_are_opened_and_scenarios_refused(tmp_path: Path) -> None:
    a, b = (answers(tmp_path / n, Answered([5, 6])) for n in "ab")
    assert compare(a.path, str(b.path)).identical
    with pytest.raises(TypeError, match="record a scenario first"):
        compare(a, Scenario.from_dict({"model": "x", "request": [{"tokens": [1]}]}))  # type: ignore[arg-type]
