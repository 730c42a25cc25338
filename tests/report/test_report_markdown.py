"""The report as Markdown: it renders as what it says, fits an issue, and a longer report is cut with a note."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_reports import explained, flips, long_text
from markdown_it import MarkdownIt

from detdiff.report.document import Block, Code, Item, MarkedToken, Prose, Report, Section, Table, Texts
from detdiff.report.markdown import LONGEST, cell, fenced, in_html, inline, markdown, sentence
from detdiff.report.text import report_text

BREAK = "\u200b"
ELEMENTS = set(
    "p table thead tbody tr th td ul li h3 details summary b i sub strong br code pre span".split()
)
# What is shown in a report has no line break and nothing unprintable.
SHOWN = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" "), max_size=40
)
MARKUP = st.text("ab1 *_`~[]()<>&#@!|\\:.-+=$\"'/{}^w", max_size=30)
TRICKS = (
    "# no heading", "- no item", "1. no item", "2) no item", "> no quote", "| a | b |", "---", "===", "***", "```", "~~~",
    "[text](http://x.y)", "![text](u)", "<b>x</b>", "&lt;", "**x**", "__x__", "_x_", "*x*", "~~x~~", "`x`", "``x``", "a|b", "\\",
    "https://x.y", "www.x.y", "a@b.co", "@user", "#12", "GH-12", "owner/name#3", ":smile:", "$x$", "<!-- x -->", "[^1]",
    "<details>", "[ ] task", "a\\|b", "x<br>y", "0123456789" * 4, "![[x]]", "<https://x.y>", "[x]: /u", "\\`x\\`", "+ x",
)  # fmt: skip


class Read(HTMLParser):
    """Elements, and the text as a reader sees it, where ``<br>`` is a space."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("br", "p", "li", "td", "th", "tr", "summary", "h3", "pre"):
            self._text.append(" ")

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self._text).replace(BREAK, "").split())

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.elements}


def rendered(text: str) -> Read:
    """As GitHub's Markdown without the links that it finds by itself."""
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return Read(parser.render(text))


def flat(text: str) -> str:
    return " ".join(text.split())


def only(*blocks: Block, folded: bool = False) -> Report:
    """A report of these blocks."""
    return replace(flips(), sections=(Section("x", "Title", blocks, folded),))


# Text stays text


@pytest.mark.parametrize("text", TRICKS)
def test_markup_is_shown_and_not_obeyed(text: str) -> None:
    for made in (
        f"x {inline(text)}",
        sentence(text, leading=True),
        f"- {sentence(text, leading=True)}",
        f"**{inline(text)}**",
    ):
        found = rendered(made)
        assert found.names <= {"p", "ul", "li", "strong", "span", "code"}, made
        assert found.text.removeprefix("x ").replace("`", "") == flat(text).replace("`", ""), made
    in_cell = rendered(f"| a | b |\n|---|---|\n| {cell(text)} | x |\n")
    assert [name for name, _ in in_cell.elements].count("td") == 2
    assert in_cell.text.replace("`", "") == flat(f"a b {text} x").replace("`", "")


@pytest.mark.parametrize(
    "text",
    ["https://x.y", "www.x.y", "WWW.x.y", "a@b.co", "@user", "#12", "o/n#3", "GH-12", ":smile:", "ab12" * 10],
)
def test_what_github_links_by_itself_is_diverged(text: str) -> None:
    for made in (inline(text), in_html(text)):
        assert BREAK in html.unescape(made), made
        for link in (r"https?://", r"(?i)www\.", r"@\w", r"#\d", r":smile:"):
            assert not re.search(link, html.unescape(made))
        assert "GH-1" not in html.unescape(made)


@given(st.one_of(SHOWN, MARKUP))
@example("1234567890. x")
@example("-")
@example("a`b`c``d`")
def test_any_text_is_shown_as_it_is(text: str) -> None:
    made = {
        f"x{inline(f'{text}x')}": f"x{text}x",
        sentence(f"{text}x", leading=True): f"{text}x",
        f"- {sentence(f'{text}x', leading=True)}": f"{text}x",
    }
    for markdown_text, shown in made.items():
        found = rendered(markdown_text)
        assert found.names <= {"p", "ul", "li", "span", "code"}, markdown_text
        assert bare(found.text) == bare(shown), markdown_text


def bare(text: str) -> str:
    """Without spaces, and without the backquotes around code."""
    return re.sub(r"[\s`]", "", text)


@given(MARKUP)
def test_the_text_of_an_element_is_text(text: str) -> None:
    found = Read(f"<summary>{in_html(text)}</summary>")
    assert found.names == {"summary"} and found.text == flat(text)


@given(st.text("a`~\n", max_size=30).map(lambda text: f"x{text}x"))
def test_a_fence_is_longer_than_what_is_in_it(text: str) -> None:
    found = rendered(f"{fenced(text, 'text')}\n\nafter")
    assert [name for name, _ in found.elements] == ["pre", "code", "p"]
    assert found.text == flat(f"{text} after")


def test_prose_in_backquotes_is_code() -> None:
    assert sentence("run `detdiff explain` now") == "run `detdiff explain` now"
    assert inline("run `x`") == r"run \`x\`"
    assert sentence("`a|b`") == r"\`a\|b\`"


# The report


@pytest.mark.parametrize(
    "make", [flips, long_text, lambda: explained(flips())], ids=["flips", "long", "verdict"]
)
def test_it_says_what_the_text_says(make: object) -> None:
    assert callable(make)
    report = make()
    found = rendered(markdown(report))
    assert found.names <= ELEMENTS
    for section in report.sections:
        assert section.title in found.text
        for block in section.blocks:
            if isinstance(block, Prose | Item):
                assert flat(block.text).replace("`", "") in found.text
            elif isinstance(block, Table):
                there = found.text.replace(" ", "")
                assert all(
                    text.replace(" ", "").replace("`", "") in there for row in block.rows for text in row
                )


def test_it_begins_with_the_headline_and_a_table_of_the_verdict() -> None:
    report = explained(flips())
    text = markdown(report)
    assert text.startswith(f"**{inline(report.headline)}**\n\n| | |\n|---|---|\n| **verdict** | numerics |\n")
    assert (
        "| **rule** | path |" in text and "| **what to do** | Hold the path, see `detdiff probe`. |" in text
    )
    assert "| **run b** | b, " in text


def test_sections_come_in_order_and_what_is_folded_is_in_details() -> None:
    report = explained(flips())
    text = markdown(report)
    places = [
        text.index(f"### {s.title}\n" if not s.folded else f"<summary>{s.title}</summary>")
        for s in report.sections
    ]
    assert places == sorted(places)
    assert text.count("<details>") == text.count("</details>")
    folded = [section.title for section in report.sections if section.folded]
    assert re.findall(r"^<details><summary>([A-Z][^:;<\n]*)</summary>$", text, re.MULTILINE) == folded


def test_both_texts_with_the_flip_in_bold() -> None:
    text = markdown(long_text())
    assert (
        r"| (13 before) …  t313" in text and r"<b>\[ t325\]</b> t326" in text and r"<b>\[ t999\]</b>" in text
    )
    assert "| **both**<br>tokens 0 to 2 of 3 |" in markdown(flips())


def test_tokens_that_are_harmless_alone_are_not_a_link_together() -> None:
    words = tuple(
        MarkedToken(n, n, text, None, "")
        for n, text in enumerate(["see ", "http", ":", "//x.y ", "#", "12 ", "@", "me <", "b>"])
    )
    text = markdown(only(Texts("r", words, (*words, MarkedToken(9, 9, " end", None, "flip")))))
    assert not re.search(r"://|#\d|@m", html.unescape(text)) and text.count("<b>") == 1
    assert "see http://x.y #12 @me <b>" in rendered(text).text


def test_the_map_is_a_block_of_code() -> None:
    assert re.search(r"```text\nbefore the layers \.+\nlayer 0 +\.\.O#+\n", markdown(flips()))


def test_long_cells_are_broken_and_cut_and_tables_fit_a_screen() -> None:
    table = Table(
        ("name", "what it showed", "n"), (("x" * 150, "some words " * 12, "1,001"), ("y", "z" * 900, "-"))
    )
    text = markdown(only(table))
    rows = [line for line in text.partition("### Title")[2].splitlines() if line.startswith("|")]
    assert rows[1] == "|---|---|--:|"
    for row in rows[2:]:
        widths = [max(map(len, part.split("<br>"))) for part in row.strip("| ").split(" | ")]
        assert sum(widths) <= 100
    assert "z" * 401 not in text.replace("<br>", "") and "z…" in text


def test_a_long_table_is_folded_and_a_very_long_one_is_cut() -> None:
    rows = tuple((str(n), "x") for n in range(500))
    text = markdown(only(Table(("n", "x"), rows[:17], caption="seventeen")))
    assert "<details><summary>seventeen</summary>\n\n| n | x |" in text
    assert "<details>" not in markdown(only(Table(("n", "x"), rows[:16])))
    assert "| and 340 more rows |  |" in markdown(only(Table(("n", "x"), rows)))


def test_a_report_that_is_too_long_is_cut_with_a_note_and_keeps_its_command() -> None:
    many = tuple(Prose(f"paragraph {n} " + "word " * 40) for n in range(400))
    sections = [Section(f"s{n}", f"Title {n}", many, folded=n % 2 == 1) for n in range(5)]
    run = Section("reproduce", "Run it again", (Code("detdiff explain a b", "sh"),))
    text = markdown(replace(flips(), sections=(*sections, run)))
    assert 50_000 < len(text) <= LONGEST < 65_536
    assert text.count("Cut here") >= 2 and text.count("<details>") == text.count("</details>")
    assert text.endswith("### Run it again\n\n```sh\ndetdiff explain a b\n```\n")
    assert "Title 0" in text and "Title 1" in text


def test_one_block_that_is_too_long_is_left_out_with_a_note() -> None:
    text = markdown(only(Prose("first"), Code("x" * 70_000), folded=True))
    assert len(text) < 5_000 and "first" in text and "Cut here" in text and text.count("</details>") == 1


def test_the_texts_of_the_terminal_and_of_markdown_are_of_one_report() -> None:
    report = explained(flips())
    words = set(flat(report_text(report)).split()) - set("-| ")
    there = set(rendered(markdown(report)).text.replace("`", "").split())
    missing = {word.strip("`") for word in words if re.fullmatch(r"`?[\w./]{4,}`?", word)} - there
    assert len(missing) < 0.05 * len(words), missing
