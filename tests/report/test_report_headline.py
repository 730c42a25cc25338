"""The headline says no more than was found."""

from __future__ import annotations

from dataclasses import replace

from made_reports import explained, flips

from detdiff.explain.verdict import Verdict
from detdiff.report import divergence_text, verdict_text
from detdiff.report.build import build
from detdiff.report.document import Prose
from detdiff.report.headlines import headline


def test_runs_that_part_in_their_books_alone_are_not_said_to_differ_in_bits() -> None:
    divergence = flips().divergence
    assert divergence is not None
    quiet = tuple(request for request in divergence.requests if request.stage is None)
    assert quiet
    diverged = replace(divergence, stage="bookkeeping", first=None, requests=quiet)
    books = replace(diverged, compared=replace(divergence.compared, differing=0))
    assert headline(books, None).startswith("The runs diverge: no compared bit differs and no token flips; ")
    assert headline(diverged, None).startswith("The runs diverge: bits differ and no token flips; ")


def test_where_nothing_could_be_compared_no_control_is_said_to_be_needless() -> None:
    verdict = Verdict("undetermined", "Nothing can be said.", rule="nothing")
    section = build(None, verdict).section("controls")
    assert section is not None
    assert [block.text for block in section.blocks if isinstance(block, Prose)] == [
        "No control was run, as nothing could be compared."
    ]


def test_a_comparison_and_a_verdict_print_their_report() -> None:
    divergence = flips().divergence
    verdict = explained(flips()).verdict
    assert divergence is not None and verdict is not None
    assert str(divergence) == divergence_text(divergence) and "What carried it" in str(divergence)
    assert str(verdict) == verdict_text(verdict) and "The controls" in f"{verdict}"
    # What a debugger shows is still all of it.
    assert repr(divergence).startswith("Divergence(identical=False")
