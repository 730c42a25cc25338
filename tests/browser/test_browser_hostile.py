"""What a trace says is shown, never obeyed: markup, scripts, control characters, directions, very long texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from drawn_pages import drawing, report
from series_samples import HOSTILE, hostile
from tiers import some_now

from detdiff.report.build import build
from detdiff.report.html import LARGEST, html
from detdiff.report.index import IndexEntry, index_html

TRICKS = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><style>*{display:none}</style>",
    "{{ 7 * 7 }}{% raw %}",
    "<!-- --> <![CDATA[ ]]> &lt;b&gt; &#x41;",
    "\x1b[31m\x00\x07 \u202e\u200f\u2066",
    "javascript:alert(1)",
    "</title><h1>x</h1>",
)
ELEMENTS = """
() => {
  const bad = document.querySelectorAll("img, iframe, object, embed, link, form, base, video, audio");
  const handlers = [...document.querySelectorAll("*")].flatMap((node) => [...node.attributes]).filter(({ name, value }) =>
    name.startsWith("on") || /^\\s*javascript:/i.test(value));
  const scripts = document.querySelectorAll("script").length, styles = document.querySelectorAll("style").length;
  return [bad.length, handlers.length, scripts, styles, document.querySelectorAll("h1").length];
}
"""


def renamed(text: str) -> Any:
    """A golden report in which the request, the tokens, a site and the settings are called ``text``."""
    found = report("reference")
    assert found.divergence is not None and found.series is not None
    first, *others = found.divergence.requests
    assert first.flip is not None and first.origin is not None
    choice = replace(first.flip.a, text=text)
    request = replace(
        first,
        id=text,
        flip=replace(first.flip, a=choice),
        origin=replace(first.origin, site=text, path_a=text, rule_a=text),
    )
    run = replace(found.divergence.a, trace=text, scenario={text: text}, environment={"os": text})
    divergence = replace(found.divergence, requests=(request, *others), first=text, notes=(text,), a=run)
    drawn, *more = found.series.requests
    tokens = tuple(replace(token, text=text) for token in drawn.tokens_a)
    series = replace(found.series, requests=(replace(drawn, id=text, tokens_a=tokens), *more))
    return build(divergence, None, series, text)


@pytest.mark.parametrize("trick", some_now(TRICKS, 0), ids=[f"{n}" for n in range(len(TRICKS))])
def test_what_a_trace_says_is_text(show: Any, trick: str) -> None:
    opened = show(html(renamed(trick)))
    assert opened.page.evaluate(ELEMENTS) == [0, 0, 2, 1, 1]
    opened.focus("map-0")
    opened.press("f", "ArrowRight", "Enter", "c")
    opened.focus("timeline-0")
    opened.press("ArrowRight", "ArrowDown")
    opened.focus("margins-0")
    opened.press("ArrowRight", "f")
    shown = trick.encode("unicode_escape").decode() if "\x1b" in trick else trick.replace('"', '\\"')
    text = opened.page.evaluate("document.body.innerText")
    if "\x1b" in trick:
        assert not set("\x1b\x07\u202e\u200f\u2066") & set(text) and "\\x1b[31m" in text
    else:
        assert shown in text
        assert shown in opened.values("margins-0")["text"]
        assert opened.page.title().count(shown) >= 1
    assert opened.page.evaluate(ELEMENTS) == [0, 0, 2, 1, 1]


def test_hostile_series_are_drawn_and_told_as_text(show: Any) -> None:
    text = html(drawing(hostile()))
    assert len(text.encode()) <= LARGEST
    opened = show(text, width=360)
    assert opened.page.evaluate(ELEMENTS) == [0, 0, 2, 1, 1]
    opened.focus("map-0")
    opened.press("b", "Enter", "Escape", "f")
    assert "<script>alert(1)</script>" in opened.values("map-0")[""]
    assert "<script>alert(1)</script>" in opened.values("map-0")["token"]
    opened.focus("timeline-0")
    opened.press("f")
    assert "<script>alert(1)</script>" in opened.values("timeline-0")["who"]
    assert HOSTILE not in text
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_configuration_stands_behind_the_escapes(show: Any) -> None:
    opened = show(html(report("bug")))
    opened.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.injected = true";
          document.body.append(script);
          document.body.append(Object.assign(new Image(), { src: "https://example.org/x.png" }));
        }"""
    )
    opened.page.wait_for_function("() => document.images[0].complete")
    assert opened.page.evaluate("window.injected") is None
    assert len(opened.trouble) == 2 and all("Content Security Policy" in said for said in opened.trouble)
    opened.trouble.clear()


def entries() -> list[IndexEntry]:
    names = [("b", "numerics", 2), ("c", "identical", 0), ("a", "bug", 10), (TRICKS[1], "different", 1)]
    return [
        IndexEntry(name, f"{name}/a", f"{name}/b", kind, "said", n, 12, "", name) for name, kind, n in names
    ]


def test_the_index_sorts_and_filters_and_is_text(show: Any) -> None:
    opened = show(index_html(entries()), width=360)
    assert opened.page.evaluate(ELEMENTS) == [0, 0, 1, 1, 1]
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 360

    def column(number: int) -> list[str]:
        cells = opened.page.locator(f"table.index tbody tr:not([hidden]) td:nth-child({number})")
        return [text.strip() for text in cells.all_text_contents()]

    assert column(2) == ["bug", "numerics", "different", "identical"]
    flips = opened.page.get_by_role("button", name="Flips")
    flips.press("Enter")
    assert column(3) == ["0 of 12", "1 of 12", "2 of 12", "10 of 12"]
    header = opened.page.locator("th", has=flips)
    assert header.get_attribute("aria-sort") == "ascending"
    flips.press("Enter")
    assert column(3) == ["10 of 12", "2 of 12", "1 of 12", "0 of 12"]
    assert header.get_attribute("aria-sort") == "descending"
    assert opened.page.locator("th[aria-sort]").count() == 1
    opened.page.locator(".filters button", has_text="bug").press("Space")
    assert column(2) == ["numerics", "different", "identical"]
    assert opened.page.locator("#shown").text_content() == "3 of 4 shown"
    links = opened.page.locator("table.index a").evaluate_all(
        "(all) => all.map((a) => a.getAttribute('href'))"
    )
    assert all(link.startswith("./") and not set('"<> ') & set(link) for link in links)
