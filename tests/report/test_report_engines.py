"""What a report says of engines that show less than all: the reason in the place of an empty section, never an empty claim."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from made_reports import flips

from detdiff.compare import Divergence, Magnitude, NotFiniteLogits, ScoreDifference, SiteDifference, TextFlip
from detdiff.report import divergence_text
from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.headlines import headline
from detdiff.report.html import html
from detdiff.report.markdown import markdown
from detdiff.report.saved import saved
from detdiff.report.words import size

REASON = "a function gives tokens and nothing of its layers"
SCORES = ScoreDifference(40, 3, 1, 31, -0.5, -0.53, 0.03, 12, "bfloat16")


def flat(text: str) -> str:
    return " ".join(text.split())


def told(lacks: dict[str, str], **changes: object) -> Divergence:
    """A flip of ``anchor`` by an engine that lacks something; ``changes`` are those of that request."""
    divergence = flips().divergence
    assert divergence is not None
    anchor = replace(divergence.request("anchor"), **changes)  # type: ignore[arg-type]
    run = replace(divergence.b, engine="mine", lacks=lacks)
    return replace(divergence, b=run, requests=(anchor,), first="anchor" if anchor.origin else None)


NOTHING = {"origin": None, "origins": (), "cache_entry": None, "differing_entries": None}


def section(report: Report, id: str) -> str:
    found = report.section(id)
    return "" if found is None else str(found.blocks)


def test_what_an_engine_does_not_show_is_named_where_it_would_stand() -> None:
    report = build(told({"sites": REASON, "cache": "no cache is given"}, **NOTHING))
    origin, cache = section(report, "origin"), section(report, "differing_entries")
    assert f"not shown by mine: {REASON}" in origin and "sites of b" in origin
    assert "no cache is given" in cache and "no origin could be named" not in origin
    assert REASON in report.headline and "engine mine" in str(report.runs)
    for text in (divergence_text(told({"sites": REASON}, **NOTHING)), markdown(report), html(report)):
        assert REASON in flat(text)
    # Its healthy twin shows all, and says nothing of the kind.
    whole = build(told({}))
    assert "not shown" not in str(whole.sections) and "layers.0.attn.k_proj" in section(whole, "origin")


def test_an_origin_on_one_path_shows_the_rows_that_each_side_saw() -> None:
    """An engine that does not say which kernel it took has one name for all; with equal rows, that name stands alone."""
    origin = told({}).requests[0].origin
    assert origin is not None
    for rows, shown, other in (
        ((1, 8), "a: 1 row, native", "native in both"),
        ((2, 2), "native in both", "2 rows"),
    ):
        of = replace(origin, path_a="native", path_b="native", rows_a=rows[0], rows_b=rows[1])
        facts = html(build(told({}, origin=of))).partition('<ol class="facts">')[2].partition("</ol>")[0]
        assert shown in facts and other not in facts


def test_an_origin_that_could_not_be_named_is_not_blamed_on_the_engine() -> None:
    report = build(told({"cache": "no cache is given"}, **NOTHING))
    assert (
        "no origin could be named" in section(report, "origin")
        and "no origin could be named" in report.headline
    )


@pytest.mark.parametrize("flip", [True, False], ids=["flip", "text-alone"])
def test_texts_without_tokens_part_at_a_character(flip: bool) -> None:
    changes: dict[str, Any] = {} if flip else {"flip": None}
    text_flip = TextFlip(12, "cat", "dog")
    found = told({"tokens": "a text alone"}, **NOTHING, **changes, flip_forward=None, text=text_flip)
    assert headline(found).startswith("The runs diverge: anchor says another text from character 12 on; ")
    text = flat(divergence_text(found))
    assert (
        'text: differs from character 12 on: "cat" in a, "dog" in b' in text
        and "tokens of b: not shown" in text
    )
    assert "another text from character 12 on" in text and "generated token 3" not in text
    facts = html(build(found)).partition('<ol class="facts">')[2].partition("</ol>")[0]
    assert "character 12 of anchor" in facts and "generated token" not in facts


def test_sizes_are_told_in_the_dtype_that_was_computed() -> None:
    text = flat(divergence_text(told({}, scores=SCORES)))
    assert (
        "scores: 3 of 40 of equal tokens differ, by at most 0.03 (12 ULP of bfloat16); first at token 1"
        in text
    )
    assert "scores" not in flat(divergence_text(told({}, scores=replace(SCORES, differing=0))))


@pytest.mark.parametrize(
    ("ulp", "said"), [(12, "at most 12 ULP, 3 on average"), (1_261_007_895_663_739, "over a million ULP")]
)
def test_no_distance_is_told_that_nobody_can_read(ulp: int, said: str) -> None:
    found = Magnitude("F64", "F64", (4,), (4,), 4, 2, 0, 0, 0, 0, 0, ulp, 3.0, (), 0.03, 0.06, 0, None, None)
    assert said in size(found) and "0.03 absolute, 0.06 relative" in size(found)
    assert "1,261" not in size(found)


def test_what_is_not_finite_is_named() -> None:
    text = flat(divergence_text(told({}, not_finite=(NotFiniteLogits("b", 2, 7, 1),))))
    assert "not finite in b: 7 NaN and 1 Inf among the logits of token 2" in text
    assert "not finite" not in flat(divergence_text(told({})))


def test_equal_logits_say_that_the_token_was_only_chosen_otherwise() -> None:
    for equal in (True, False, None):
        text = flat(divergence_text(told({}, logits_equal=equal)))
        assert ("the model agrees, and the token was only chosen otherwise" in text) == (equal is True)


def test_two_models_have_a_first_site_and_no_origin() -> None:
    site = SiteDifference("layers.0.mlp", "mlp", 0, 3, "out", None)
    found = replace(told({}, **NOTHING, first_site=site), across_models=True)
    text = flat(divergence_text(found))
    assert "first site that differs: layers.0.mlp (mlp, layer 0), out at position 3; no origin" in text
    assert "nothing arises anywhere" in headline(found) and "no origin could be named" not in text


def test_a_report_of_such_an_engine_is_read_back() -> None:
    from detdiff.report.json import report_json_text

    report = build(told({"sites": REASON}, **NOTHING, scores=SCORES))
    back = saved(json.loads(report_json_text(report)))
    assert back.divergence == report.divergence


def test_a_chunk_of_one_position_is_no_count() -> None:
    from detdiff.compare.divergence import Chunk

    def said(first: int, last: int, differing: tuple[tuple[int, int], ...]) -> str:
        return flat(divergence_text(told({}, chunks=(Chunk("a", 1, first, last, differing, True),))))

    assert "prefill chunk 1, position 11, which differs; earlier ones are equal" in said(11, 11, ((11, 11),))
    assert "positions 8 to 11, of which position 11 differs" in said(8, 11, ((11, 11),))
    assert "positions 8 to 11, of which positions 9-11 differ" in said(8, 11, ((9, 11),))
    assert "positions 8 to 11, of which none differs" in said(8, 11, ())
