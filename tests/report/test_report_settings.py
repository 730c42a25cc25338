"""The two scenarios side by side: what the requests were asked for stands there too."""

from __future__ import annotations

from dataclasses import replace

from made_reports import flips

from detdiff.report.build import build
from detdiff.report.document import Table
from detdiff.report.words import of_requests

_ONE = {"id": "one", "prompt": "x", "max_tokens": 8, "arrival": 0, "ignore_stop": True}
_TWO = {"id": "two", "prompt": "y", "max_tokens": 8, "arrival": 5, "ignore_stop": False, "temperature": 0.8}


def test_what_differs_between_requests_or_runs_is_listed() -> None:
    a, b = {"request": [_ONE, _TWO]}, {"request": [_ONE, {**_TWO, "arrival": 0, "temperature": 0.0}]}
    assert of_requests(a, b) == [
        ("max_tokens of requests", "8", "8"),
        ("arrival of requests", "0, 5", "0"),
        ("ignore_stop of requests", "true, false", "true, false"),
        ("temperature of requests", "0, 0.8", "0"),
    ]


def test_what_nobody_asked_for_is_not_and_a_long_list_is_cut_with_a_note() -> None:
    assert of_requests({}, {"request": [{"id": "x"}, {"id": [], "arrival": 1}]}) == []
    many = {"request": [{**_ONE, "id": str(n), "arrival": n} for n in range(30)]}
    found = dict((key, (a, b)) for key, a, b in of_requests(many, {}))
    assert found["arrival of requests"] == ("0, 1, 2, 3, 4, 5, 6, 7, … (30 in all)", "-")


def test_a_report_tells_when_requests_arrive() -> None:
    divergence = flips().divergence
    assert divergence is not None
    late = replace(divergence.b, scenario={"request": [_ONE, _TWO]})
    section = build(replace(divergence, b=late)).section("scenario")
    assert section is not None
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert any(row[0] == "arrival of requests" and row[2] == "0, 5" for table in tables for row in table.rows)
