"""Both texts of a request in a page: token by token, once where they are equal, folded where it is long."""

from __future__ import annotations

from dataclasses import replace

from page_tree import Node, of, tree

from detdiff.report.document import MarkedToken, Texts
from detdiff.report.html import LARGEST, NEARBY, html, side_by_side


def texts(count: int, flip: int | None, text: str = "w{}") -> Texts:
    def words(run: str) -> tuple[MarkedToken, ...]:
        def word(n: int) -> MarkedToken:
            changed = flip is not None and n >= flip
            mark = "" if not changed else "flip" if n == flip else "after"
            token = n + 1000 if changed and run == "b" else n
            return MarkedToken(n, token, text.format(token), 1.0, mark)  # type: ignore[arg-type]

        return tuple(word(n) for n in range(count))

    return Texts("r", words("a"), words("b"))


def tokens(node: Node) -> list[str]:
    return [each.text for each in node.all("span", "mark", class_="t")]


def test_a_long_text_is_folded_around_its_flip() -> None:
    page = tree(html(of(texts(1000, 500))))
    before, *after = page.one("section").all("details")
    assert before.one("summary").text == f"{500 - NEARBY} tokens before, equal in both runs"
    assert tokens(before) == [f"w{n}" for n in range(500 - NEARBY)]
    columns = page.all("div", class_="column")
    for column, fold, shift in zip(columns, after, (0, 1000), strict=True):
        whole = tokens(column)
        assert whole[:NEARBY] == [f"w{n}" for n in range(500 - NEARBY, 500)]
        assert whole[NEARBY:] == [f"w{n + shift}" for n in range(500, 1000)]
        assert column.one("mark").text == f"w{500 + shift}"
        assert tokens(fold) == whole[2 * NEARBY :]


def test_a_short_text_is_shown_whole() -> None:
    page = tree(html(of(texts(40, 20))))
    assert not page.one("section").all("details")
    assert [tokens(column) for column in page.all("div", class_="column")] == [
        [f"w{n + shift * (n >= 20)}" for n in range(40)] for shift in (0, 1000)
    ]


def test_a_text_without_a_flip_is_there_once() -> None:
    page = tree(html(of(texts(200, None))))
    (column,) = page.all("div", class_="column")
    (fold,) = page.one("section").all("details")
    assert tokens(column) + tokens(fold) == [f"w{n}" for n in range(200)]


def test_texts_of_any_length_leave_room_for_the_rest() -> None:
    made = side_by_side(texts(5000, 4900, "<" * 80 + "{}"), 20_000)
    assert made.shared.count == 4900 - NEARBY and len(made.shared.html.encode()) <= 10_000
    assert 0 < made.shared.missing < made.shared.count
    # Those next to the flip are kept.
    assert made.shared.html.endswith(f"{4900 - NEARBY - 1}</span>")
    blocks = [replace(texts(5000, 4900, "<" * 80 + "{}"), request=f"r{n}") for n in range(6)]
    text = html(of(*blocks))
    assert len(text.encode()) < LARGEST / 2
    assert "are not in this page" in text
