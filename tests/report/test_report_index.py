"""The index over several reports: what needs attention first, and links that lead where they say."""

from __future__ import annotations

from made_reports import flips
from page_tree import tree

from detdiff.report.build import build
from detdiff.report.index import IndexEntry, index_html, index_text

ENTRIES = (
    IndexEntry("same", "x/a", "x/b", "identical", "The runs are identical.", 0, 2, "", "same.html"),
    IndexEntry('<b>"', "y/a", "y/b", "bug", "A bug: <i>", 1, 2, "layers.0.q", "a b/<i>?#.html"),
    IndexEntry("odd", "z/a", "z/b", "numerics", "Rounding.", 1, 3, "layers.1.k", "javascript:alert(1)"),
)


def test_the_index_links_every_page_and_puts_the_worst_first() -> None:
    page = tree(index_html(ENTRIES))
    assert (
        page.one("h1").text
        == page.one("head").one("title").text
        == "3 comparisons: 1 bug, 1 numerics, 1 identical."
    )
    rows = [[cell.text.strip() for cell in row.all("td")] for row in page.one("tbody").all("tr")]
    assert [row[:4] for row in rows] == [
        ['<b>\\"', "bug", "1 of 2", "layers.0.q"],
        ["odd", "numerics", "1 of 3", "layers.1.k"],
        ["same", "identical", "0 of 2", "–"],
    ]
    links = [node.attributes["href"] for node in page.one("tbody").all("a")]
    assert links == ["./a%20b/%3Ci%3E%3F%23.html", "./javascript%3Aalert%281%29", "./same.html"]
    assert len(page.all("main")) == 1 and page.one("html").attributes["lang"] == "en"


def test_the_index_as_text_fits_its_width() -> None:
    text = index_text(ENTRIES, width=80)
    assert text.startswith("3 comparisons: 1 bug, 1 numerics, 1 identical.\n")
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("bug  ") < text.index("numerics  ") < text.index("identical  ")


def test_an_index_of_nothing_says_so() -> None:
    assert tree(index_html(())).one("h1").text == "No comparison was found."


def test_an_entry_takes_its_words_from_the_report() -> None:
    entry = IndexEntry.of("pair", flips(), "pair.html")
    assert (entry.a, entry.b, entry.kind, entry.flips, entry.requests) == ("a", "b", "different", 1, 3)
    assert (entry.origin, entry.link) == ("layers.0.attn.k_proj", "./pair.html")
    assert IndexEntry.of("none", build(None)).kind == "inconclusive"
