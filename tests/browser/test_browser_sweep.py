"""The page of a sweep: chosen by axis, flips, first origin and verdict, with small multiples that follow the choice."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

from detdiff.report.index import IndexEntry, OriginPlace, index_html
from detdiff.sweep.summary import SweepSummary, junit, lines_text

HOSTILE = '"><img src=x onerror=alert(1)></title>\x00\x1b\udc80'


def _entry(schedule: str, layout: str, kind: str, flips: int, site: str, since: str = "") -> IndexEntry:
    places = (
        (OriginPlace("r1", site, 2 if "layers" in site else None, 12, 14 if flips else None),) if site else ()
    )
    name = f"schedule={schedule},layout={layout}"
    labels = {"schedule": schedule, "layout": layout}
    return IndexEntry(
        name, f"{name}-a", name, kind, "Said.", flips, 2, site, "answers/x.json", labels, places, since
    )


ENTRIES = (
    _entry("static", "padded", "identical", 0, "", "same"),
    _entry("static", "packed", "different", 0, "layers.2.q_proj", "new"),
    _entry(HOSTILE, "padded", "different", 1, "embed_tokens", "was identical"),
    _entry(HOSTILE, "packed", "failed", 0, "", "was different"),
)


def test_a_sweeps_page_is_chosen_by_axis_flips_origin_and_verdict(show: Any) -> None:
    opened = show(index_html(ENTRIES))

    def shown() -> tuple[int, int]:
        rows = opened.page.locator("table.index tbody tr:not([hidden])").count()
        pictures = opened.page.locator(".multiples figure:visible").count()
        return rows, pictures

    assert shown() == (4, 2)
    assert opened.page.locator(".multiples svg").first.is_visible()
    labels = [text.split("\n")[0].strip() for text in opened.page.locator(".filters label").all_inner_texts()]
    assert [label.split(" ")[0] for label in labels] == ["schedule", "layout", "flips", "first", "since"]
    choices = {"schedule": ("static", (2, 1)), "layout": ("packed", (2, 1)), "flips": ("some", (1, 1))}
    for name, (value, expected) in choices.items():
        select = opened.page.locator(".filters label", has_text=name).locator("select")
        select.select_option(label=value)
        assert shown() == expected, name
        select.select_option(label="all")
    opened.page.locator(".filters label", has_text="first origin").locator("select").select_option(
        label="embed_tokens"
    )
    assert shown() == (1, 1)
    opened.page.locator('.filters button[data-kind="different"]').click()
    assert shown() == (0, 0) and opened.page.locator("#shown").text_content() == "0 of 4 shown"
    opened.page.locator('.filters button[data-kind="different"]').click()
    opened.page.locator(".filters label", has_text="first origin").locator("select").select_option(
        label="all"
    )
    assert shown() == (4, 2) and opened.page.locator("img").count() == 0


def test_junit_and_lines_hold_whatever_a_name_is() -> None:
    found = SweepSummary(HOSTILE, ENTRIES)
    suite = ElementTree.fromstring(junit(found))[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["4", "2", "1"]
    assert [[each.tag for each in case] for case in suite] == [[], ["failure"], ["failure"], ["error"]]
    assert [json.loads(each)["verdict"] for each in lines_text(found).splitlines()] == [
        each.kind for each in ENTRIES
    ]
