"""A trace whose every name was chosen to break the report: it is shown as text in every format, and never as anything else."""

from __future__ import annotations

import html as entities
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from made_reports import explained, flips, report_of
from synthetic_traces import Ask, Fault, Plan, Site, serial, site_list, together
from test_report_markdown import ELEMENTS, rendered

from detdiff.explain import Control, Evidence
from detdiff.explain.verdict import Fragility
from detdiff.report import divergence_text, verdict_text
from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.json import report_json, report_json_text
from detdiff.report.markdown import markdown
from detdiff.report.saved import saved
from detdiff.report.text import report_text
from detdiff.report.words import named

MILLION = 1_000_000
NAMES = {
    "html": "</script></td></svg><img src=x onerror=alert(1)><b>bold</b>",
    "quotes": "\"' onmouseover='alert(1)' &quot;&lt;&#60;",
    "controls": "\x1b[31mred\x07\x00\x9b2J\x1b]0;t\x07\r\n\t\v\x85end",
    "bidi": "\u202egnp.\u2066x\u200f\u200bend",
    "surrogate": "half \ud800 of a pair",
    "markdown": "**b** _i_ [l](http://x.y) ![i](u) | # h ~~~ ``` `c` @user #12 o/n#3 https://e.com www.e.com a@b.co :smile: $x$",
    "block": "# heading",
    "mermaid": 'graph TD; click A href "javascript:alert(1)" --> end %% </pre>',
    "template": "{{ 7 * 7 }} {% raw %} ${x} <%= y %>",
    "long": "L" * MILLION,
    "long html": "<i>" * (MILLION // 3),
    "backslash": "a\\",
    "spaces": "  two  spaces  ",
    "empty": "",
}  # fmt: skip
EVERYTHING = " ".join(text for name, text in NAMES.items() if not name.startswith("long"))
LIMIT = 700_000
"""Characters of a text of a dozen hostile requests; the names alone are some millions."""


def header(sites: tuple[Site, ...]) -> dict[str, Any]:
    settings = {name: text for name, text in NAMES.items()} | {
        EVERYTHING: EVERYTHING,
        "L" * MILLION: [EVERYTHING],
    }
    rule = {"site": EVERYTHING, "path": EVERYTHING}
    return {
        "sites": sites,
        "scenario": {
            "schedule": EVERYTHING,
            "layout": NAMES["html"],
            "kernels": "L" * MILLION,
            "rule": [rule],
            **settings,
        },
        "model": {"name": EVERYTHING, "config_sha256": "c" * 64, "weights_sha256": "w" * 64, **settings},
        "environment": {"detdiff": "0", **settings},
        "notes": [EVERYTHING, NAMES["long"]],
        "observer": {"checked": True},
    }


def renamed() -> tuple[Site, ...]:
    """The sites of the made-up model, in which each name holds something hostile."""
    texts = [text for text in NAMES.values() if text]
    sites = site_list(2)
    names = {site.name: f"{texts[n % len(texts)]}{site.name}" for n, site in enumerate(sites)}
    return tuple(
        replace(site, name=names[site.name], parent=site.parent and names[site.parent]) for site in sites
    )


@cache
def hostile() -> Report:
    """Requests of all these names, the first of which flips; tokens, sites, paths, settings and notes alike."""
    asks = tuple(
        Ask(name, (n + 10, n + 11, n + 12, n + 13), (70 + n, 80, 81)) for n, name in enumerate(NAMES.values())
    )
    others = tuple(replace(ask, generated=(ask.generated[0], 90 + n, 81)) for n, ask in enumerate(asks))
    faults = tuple(Fault(site, "out", n, 2) for n, site in enumerate(("layers.0.attn.k_proj",) * len(asks)))
    words = {token: text for token, text in zip((80, *range(90, 104)), NAMES.values(), strict=False)}

    def path(rows: int) -> str:
        return f"{EVERYTHING}/mv" if rows < 5 else f"{NAMES['long']}/mm"

    a = Plan(asks, serial(asks), path=path, header=header(renamed()), words=words)
    b = Plan(others, together(others), faults, path=path, header=header(renamed()), words=words)
    command = f"detdiff explain '{EVERYTHING}'"
    made = report_of(a, b, command, ("a <b>&'\" $x", "b | `c` @d #1"))
    said = f"{EVERYTHING} {NAMES['long']}"
    return explained(
        made,
        sentence=said,
        advice=said,
        rule=EVERYTHING,
        missing=(said,),
        evidence=tuple(
            Evidence(fact, said, {"run": said, "request": said}, decided=True)
            for fact in ("path", "acceptance")
        ),
        controls=tuple(Control(name, text, said, 1, 0.5, {"pattern": said}) for name, text in NAMES.items()),
        fragile=tuple(Fragility(name, 1, 80, 0.5, None, 0.5) for name in NAMES.values()),
    )


def texts() -> Iterator[tuple[str, str]]:
    """Every plain text that is made of it."""
    report = hostile()
    assert report.divergence is not None and report.verdict is not None
    for width in (40, 100, 200):
        yield f"report {width}", report_text(report, width=width)
    yield "compare", divergence_text(report.divergence)
    yield "explain", verdict_text(report.verdict)
    yield "markdown", markdown(report)


def test_the_trace_is_as_hostile_as_it_says() -> None:
    report = hostile()
    assert report.divergence is not None and report.series is not None
    assert [request.id for request in report.divergence.requests] == list(NAMES.values())
    assert all(request.flip is not None for request in report.divergence.requests)
    tokens = [t.text for request in report.series.requests for t in (*request.tokens_a, *request.tokens_b)]
    assert set(NAMES.values()) <= set(tokens)
    assert report.divergence.requests[0].origin is not None
    assert any(NAMES["long"] in (r.origin.path_b or "") for r in report.divergence.requests if r.origin)
    assert {section.id for section in report.sections} >= {
        "flip",
        "origin",
        "timeline",
        "margins",
        "verdict",
        "scenario",
    }


def test_plain_texts_have_nothing_that_a_terminal_obeys_and_are_bounded() -> None:
    for name, text in texts():
        odd = {c for c in text if not c.isprintable() and c != "\n"}
        assert not odd, (name, odd)
        assert len(text) < LIMIT and "L" * 5_000 not in text, (name, len(text))
        text.encode("utf-8")


def test_plain_texts_show_every_name() -> None:
    for name, text in texts():
        if name == "markdown":
            continue
        flat = "".join(text.split())
        for key, hostile_name in NAMES.items():
            shown = "".join(named(hostile_name).split())
            assert shown in flat, (name, key)


def test_colour_adds_no_other_escape_sequence() -> None:
    found = set(re.findall(r"\x1b[^m]*m", report_text(hostile(), colour=True)))
    assert found <= {f"\x1b[{code}m" for code in ("0", "0;1", "0;1;31", "0;33", "0;2")}


def test_markdown_has_no_element_link_or_mention_of_theirs() -> None:
    text = markdown(hostile())
    assert len(text) <= 65_000
    found = rendered(text)
    assert found.names <= ELEMENTS
    assert all(set(attributes) <= {"class", "style"} for _, attributes in found.elements)
    assert all(
        (value or "").startswith(("language-", "text-align:"))
        for _, a in found.elements
        for value in a.values()
    )
    outside = entities.unescape(re.sub(r"(`{3,})\w*\n.*?\n\1", "", text, flags=re.DOTALL))
    outside = re.sub(r"(?<![\\`])`[^`]+`(?!`)", "", outside)
    for active in (r"://", r"(?i)www\.", r"@\w", r"(?<!&)#\d", r":smile:", r"\$x\$"):
        assert not re.search(active, outside), active
    assert named(NAMES["html"]) in found.text


def test_json_has_names_whole_comes_back_and_shows_them_cut() -> None:
    report = hostile()
    answer = report_json(report)
    back = saved(answer)
    assert back.divergence == report.divergence and back.verdict == report.verdict
    sections = json.dumps(answer["sections"])
    assert len(sections) < LIMIT and "L" * 5_000 not in sections


def test_json_is_text_that_any_reader_takes() -> None:
    # A name of a million characters stands here some hundred times: as data it is not cut.
    short = build(shortened(hostile().divergence), None, None, EVERYTHING)
    text = report_json_text(short)
    assert text.isascii() and saved(json.loads(text)).divergence == short.divergence
    assert not {c for c in text if not c.isprintable() and c != "\n"}


def shortened(value: Any) -> Any:
    """The same answer with long names cut."""
    if isinstance(value, str):
        return value[:1_000]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: shortened(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, Mapping):
        return {shortened(key): shortened(item) for key, item in value.items()}
    return type(value)(map(shortened, value)) if isinstance(value, tuple | list) else value


def test_the_search_for_their_elements_finds_them_where_nothing_is_escaped() -> None:
    for name, element in (("html", "img"), ("markdown", "a"), ("markdown", "em"), ("block", "h1")):
        assert element in rendered(NAMES[name]).names - ELEMENTS


class Page(HTMLParser):
    """What a browser would make of it: elements with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_html_page_has_no_element_of_theirs() -> None:
    html = pytest.importorskip("detdiff.report.html").html
    text = html(hostile())
    text.encode("utf-8")
    assert len(text) < 2_000_000 and "L" * 5_000 not in text
    found, benign = Page(text), Page(html(explained(flips())))
    count = [tag for tag, _ in found.elements].count
    assert count("script") == [tag for tag, _ in benign.elements].count("script")
    assert (
        not {tag for tag, _ in found.elements}
        - {tag for tag, _ in benign.elements}
        - {"mark", "dl", "dt", "dd"}
    )
    for tag, attributes in found.elements:
        assert not any(key.startswith("on") for key in attributes), (tag, attributes)
        for key in ("src", "href", "xlink:href"):
            assert re.fullmatch(r"#[\w-]*|data:[\w/;+=,-]*", attributes.get(key) or "#"), (tag, attributes)
    assert not {c for c in text if not c.isprintable() and c not in "\n\t"}
    assert named(NAMES["html"]) in found.text


def test_the_pictures_are_documents_without_scripts() -> None:
    plots = pytest.importorskip("detdiff.report.views").plots
    made = plots(hostile())
    assert len(made) > 3
    for name, svg in made.items():
        assert re.fullmatch(r"[\w.-]{1,100}\.svg", name), name
        root = ElementTree.fromstring(svg)
        for element in root.iter():
            assert element.tag.rpartition("}")[2] not in ("script", "a", "image", "foreignObject"), name
            assert not any(key.startswith("on") or key.endswith("href") for key in element.attrib), name
        assert len(svg) < LIMIT and "L" * 5_000 not in svg
        assert not {c for c in svg if not c.isprintable() and c != "\n"}, name
