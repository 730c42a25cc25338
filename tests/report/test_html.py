"""The page of a report by its structure: nothing from elsewhere, everything in its place, and text that stays text."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_reports import explained, flips, long_text
from page_tree import of, tree
from tiers import examples

from detdiff.report.build import build
from detdiff.report.document import Code, Item, MarkedToken, Prose, Report, Table, Texts, View
from detdiff.report.html import LARGEST, html, write_html
from detdiff.report.saved import read_saved

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("reference", "kernel-switch", "bug", "configuration", "identical", "inconclusive")
KINDS = {
    "reference": "numerics",
    "kernel-switch": "numerics",
    "bug": "bug",
    "configuration": "configuration",
    "identical": "identical",
    "inconclusive": "inconclusive",
}


def golden(name: str) -> Report:
    saved = read_saved(GOLDEN / name / "report.json")
    return build(saved.divergence, saved.verdict, saved.series, saved.command)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_section_in_its_place(name: str) -> None:
    report = golden(name)
    page = tree(html(report))
    assert page.one("html").attributes["lang"] == "en"
    assert page.one("head").one("title").text == page.one("h1").text == report.headline
    badge = page.one("p", class_="badge")
    assert badge.text == KINDS[name] and f"kind-{KINDS[name]}" in badge.attributes["class"]
    main = page.one("main")
    assert [node.attributes["id"] for node in main.all("section")] == [each.id for each in report.sections]
    assert [node.text for node in main.all("h2")] == [each.title for each in report.sections]
    links = page.one("nav").all("a")
    assert [node.attributes["href"] for node in links] == [f"#{each.id}" for each in report.sections]
    folded = {node.parent.attributes["id"] for node in page.all("details", class_="section") if node.parent}
    assert folded == {each.id for each in report.sections if each.folded}
    if report.advice:
        assert report.advice.replace("`", "") in page.one("p", class_="advice").text


@pytest.mark.parametrize("name", NAMES)
def test_headings_go_down_one_level_at_a_time_and_names_are_unique(name: str) -> None:
    page = tree(html(golden(name)))
    levels = [int(node.tag[1]) for node in page.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in page.all():
        for name_ in ("aria-labelledby", "aria-describedby"):
            assert node.attributes.get(name_, ids[0]) in ids
    targets = [node.attributes["href"] for node in page.all("a")]
    assert targets and all(target.removeprefix("#") in ids for target in targets)


@pytest.mark.parametrize("name", NAMES)
def test_every_view_has_a_heading_a_picture_and_its_values(name: str) -> None:
    report = golden(name)
    views = [block for section in report.sections for block in section.blocks if isinstance(block, View)]
    figures = tree(html(report)).all("figure")
    assert len(figures) == len(views) > 0
    for figure, view in zip(figures, views, strict=True):
        assert figure.one("h3").text.endswith("" if view.request is None else f" of {view.request}")
        assert figure.attributes["id"].startswith(f"{view.name}-")
        pictures = figure.all("svg")
        assert len(pictures) == 1
        assert all(picture.one("desc").text for picture in pictures)
        assert {"data-left", "data-step", "data-rows"} <= set(pictures[0].attributes)
        assert len(figure.one("table").all("tr")) > 1
        assert {picture.attributes["role"] for picture in pictures} == {"img"}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_needs_nothing_else_and_runs_only_its_own_script(name: str) -> None:
    text = html(golden(name))
    page = tree(text)
    assert len(text.encode()) <= LARGEST
    configuration = page.one("meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"]
    rules = dict(rule.strip().split(" ", 1) for rule in configuration.split(";"))
    assert rules["default-src"] == "'none'"
    for rule, element in (("style-src", page.one("style")), ("script-src", page.all("script")[-1])):
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    scripts = page.all("script")
    assert [node.attributes.get("type", "") for node in scripts] == ["application/json", ""]
    for node in page.all():
        assert not {"src", "srcset", "style", "action"} & set(node.attributes)
        assert not [name_ for name_ in node.attributes if name_.startswith("on")]
    assert set(re.findall(r"https?://[\w./-]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and "url(" not in text


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    report = flips()
    write_html(report, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == html(report).encode()
    assert html(build(report.divergence, None, report.series, report.command)) == html(report)


def test_the_three_steps_lead_to_their_sections() -> None:
    page = tree(html(flips()))
    steps = [(node.attributes["href"], node.one("strong").text) for node in page.one("ol").all("a")]
    assert steps == [
        ("#origin", "layers.0.attn.k_proj"),
        ("#differing_entries", steps[1][1]),
        ("#flip", '" t33" → " t93"'),
    ]
    assert re.fullmatch(r"\d+ cache entr(y|ies)", steps[1][1])
    assert not tree(html(golden("identical"))).one("ol").all("a", href="#flip")


def test_a_verdict_has_its_controls_and_what_to_do() -> None:
    page = tree(html(explained(flips())))
    rows = [[cell.text for cell in row.all("td")] for row in page.one("section", id="controls").all("tr")]
    assert rows[1][:3] == ["pin_kernels", "removed", "With split_rows 8 nothing differs."]
    assert page.one("p", class_="advice").one("code").text == "detdiff probe"


def test_advice_that_names_a_section_leads_there() -> None:
    advice = tree(html(golden("inconclusive"))).one("p", class_="advice")
    assert [(node.attributes["href"], node.text) for node in advice.all("a")] == [
        ("#compared", "What was compared")
    ]


BLOCKS = (
    Prose("request <b>: flips"),
    Prose("see `detdiff explain` and <i>"),
    Item("  a & b: ", "one <two>"),
    Item("    ", 'quote "'),
    Table(("<n>", "text"), (("1", "</td>"), ("-", "&amp;")), caption="<caption>"),
    Code("detdiff compare '<a>' && b", "sh"),
)


def test_blocks_become_elements_and_their_texts_stay_texts() -> None:
    page = tree(html(of(*BLOCKS, headline="</title><h1>", advice="`rm` & <x>", command="")))
    assert page.one("head").one("title").text == page.one("h1").text == "</title><h1>"
    assert page.one("h3").text == "request <b>: flips"
    assert page.one("main").all("code")[-1].text == "detdiff compare '<a>' && b"
    assert [node.text for node in page.one("section").all("p")] == ["see detdiff explain and <i>"]
    items = page.one("dl")
    assert [node.text for node in items.all("dt")] == ["a & b", ""]
    assert [node.text for node in items.all("dd")] == ["one <two>", 'quote "']
    table = page.one("table")
    assert table.one("caption").text == "<caption>"
    assert [(node.text, "n" in node.attributes.get("class", "")) for node in table.all("th")] == [
        ("<n>", True),
        ("text", False),
    ]
    assert [node.text for node in table.all("td")] == ["1", "</td>", "-", "&amp;"]


@settings(max_examples=examples(30))
@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=30))
def test_any_text_is_found_again_as_it_was(text: str) -> None:
    blocks = (
        Item(f"  {text}: ", text),
        Table((text,), ((text,),)),
        Code(text),
        Texts(text, (MarkedToken(0, 1, text, None, ""),), (MarkedToken(0, 1, text, None, ""),)),
    )
    page = tree(html(of(*blocks, headline=text)))
    section = page.one("section")
    found = [
        section.one("dd"),
        section.one("td"),
        section.one("pre"),
        *section.one("p", class_="tokens").all("span"),
    ]
    assert [node.text for node in found] == [text] * 4
    assert page.one("h1").text == text and len(page.all("script")) == 1


def test_a_report_without_series_has_no_data_and_no_views() -> None:
    report = long_text()
    page = tree(html(build(report.divergence, None, None, "")))
    assert not page.all("figure") and [node.attributes for node in page.all("script")] == [{}]
