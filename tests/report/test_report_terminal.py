"""The report as text: what matters first, nothing wider than the terminal, and colour that says nothing by itself."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_reports import explained, flips, long_text

from detdiff.compare.series import LensPoint
from detdiff.report.document import MarkedToken, Report, Table, Texts, View, excerpts, is_numeric
from detdiff.report.text import cells, printed, report_text, styled, table_lines, wrapped
from detdiff.report.views import view_blocks

WIDTHS = (40, 60, 80, 99, 100, 160)
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
CELL = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=60)


def flat(text: str) -> str:
    return " ".join(text.split())


def block(text: str, title: str) -> str:
    """A section, without its title."""
    return re.split(r"\n\n(?=[^\n]+\n-+\n)", text.partition(f"{title}\n{'-' * len(title)}\n")[2])[0]


def test_it_begins_with_what_a_busy_reader_wants() -> None:
    report = explained(flips())
    text = report_text(report)
    assert flat(text).startswith(
        f"{report.headline} kind: numerics what to do: Hold the path, see `detdiff probe`. a: a, "
    )
    assert report.headline.startswith("Rounding: anchor flips at token 3")


def test_every_section_is_there_in_order_under_its_title() -> None:
    report = explained(flips())
    titles = re.findall(r"^(.+)\n-{3,}$", report_text(report), re.MULTILINE)
    assert titles == [section.title for section in report.sections] and len(titles) > 8


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal_unless_one_word_is(width: int) -> None:
    lines = report_text(explained(flips()), width=width).splitlines()
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []
    assert max(map(len, lines)) > width * 0.8


def test_it_is_never_narrower_than_forty_characters() -> None:
    assert report_text(flips(), width=1) == report_text(flips(), width=40)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [flips, long_text])
def test_without_its_colours_it_is_the_same_text(make: object, width: int) -> None:
    assert callable(make)
    plain, coloured = (report_text(make(), width=width, colour=colour) for colour in (False, True))
    assert "\x1b" not in plain and ESCAPES.search(coloured)
    assert ESCAPES.sub("", coloured) == plain


def test_the_flip_is_in_brackets_and_red() -> None:
    assert "[ t33]" in report_text(flips()) and "[ t93]" in report_text(flips())
    assert "\x1b[0;1;31m[ t33]" in report_text(flips(), colour=True)


# The two texts


def test_the_texts_stand_side_by_side_where_there_is_room() -> None:
    for width, beside in ((100, True), (99, False)):
        (line,) = [line for line in report_text(flips(), width=width).splitlines() if "[ t33]" in line]
        assert ("[ t93]" in line) == beside


def test_a_long_text_is_cut_around_its_flip() -> None:
    part = block(report_text(long_text(), width=200), "The flip")
    a, b = part.splitlines()[1:3][0].split(" | ")
    assert a.strip() == "a: tokens 13 to 33 of 40" and b.strip() == "b: tokens 13 to 33 of 40"
    text = flat(part)
    assert "(13 before) … t313 t314" in text and "[ t325] t326" in text and "t333 … (6 more)" in text
    assert "t312" not in text and "t334" not in text


def test_where_no_token_differs_the_text_is_shown_once() -> None:
    part = block(report_text(flips()), "The flip")
    assert "both: tokens 0 to 2 of 3" in part and part.count(" t50 t51 t52") == 1


def test_a_run_that_stopped_has_nothing_at_the_flip() -> None:
    words = tuple(MarkedToken(n, n, f" w{n}", None, "flip" if n == 2 else "") for n in range(3))
    a, b = excerpts(Texts("r", words[:2], words))
    assert [word.mark for word in a.words] == ["", ""] and b.words[-1].mark == "flip"
    report = flips()
    section = replace(report.sections[0], blocks=(Texts("r", words[:2], words),))
    text = report_text(replace(report, sections=(section,)), width=60)
    assert "a: tokens 0 to 1 of 2\n   w0 w1\n" in text and "b: tokens 0 to 2 of 3\n   w0 w1[ w2]\n" in text


def test_a_token_near_to_another_choice_is_marked_and_explained() -> None:
    words = (MarkedToken(0, 5, " near", 0.1, "near"), MarkedToken(1, 6, " far", 2.0, ""))
    report = flips()
    section = replace(report.sections[0], blocks=(Texts("r", words, words),))
    text = report_text(replace(report, sections=(section,)))
    assert "~ near~ far" in text and "~ ~ a token whose margin" in text
    assert "~" not in report_text(flips())


def test_characters_of_two_cells_keep_the_columns_straight() -> None:
    words = tuple(MarkedToken(n, n, "日本", None, "flip" if n == 30 else "") for n in range(60))
    other = (*words[:30], MarkedToken(30, 99, "x", None, "flip"), *words[31:])
    report = flips()
    section = replace(report.sections[0], blocks=(Texts("r", words, other),))
    lines = [line for line in report_text(replace(report, sections=(section,))).splitlines() if " | " in line]
    places = {cells(styled([(line.partition(" | ")[0], "")])) for line in lines}
    assert len(lines) >= 3 and len(places) == 1


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"])), st.integers(4, 30))
def test_wrapping_loses_nothing_and_fits(text: str, width: int) -> None:
    lines = list(wrapped(styled([(text, "")]), width))
    assert "".join(c for line in lines for c, _ in line) == text
    assert all(cells(line) <= width for line in lines)


def test_what_is_marked_is_not_torn_apart() -> None:
    line = styled([("some words", ""), ("[ the]", "flip"), (" end", "")])
    assert [printed(part, colour=False) for part in wrapped(line, 12)] == ["some", "words[ the]", "end"]


# Tables


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(
            st.lists(CELL.map(lambda s: s or "h"), min_size=n, max_size=n),
            st.lists(st.lists(CELL, min_size=n, max_size=n), max_size=4),
        )
    ),
    st.integers(40, 130),
    st.integers(0, 2),
)
def test_a_table_fits_and_loses_no_character(
    made: tuple[list[str], list[list[str]]], width: int, level: int
) -> None:
    headers, rows = made
    table = Table(tuple(headers), tuple(map(tuple, rows)), level)
    lines = list(table_lines(table, width))
    assert all(len(line) <= width for line in lines)
    wanted = Counter("".join("".join(row) for row in rows).replace(" ", ""))
    assert not wanted - Counter("".join(lines))


def test_numbers_are_not_read_and_stand_to_the_right() -> None:
    table = Table(("name", "n"), (("007", "1,001"), ("1e3", "2"), ("a word", "-")), 0)
    assert list(table_lines(table, 40)) == [
        "name        n",
        "------  -----",
        "007     1,001",
        "1e3         2",
        "a word      -",
    ]
    assert is_numeric(table, 1) and not is_numeric(table, 0)
    assert not is_numeric(Table(("x",), (("",),)), 0)


def test_long_cells_wrap_and_too_many_columns_become_paragraphs() -> None:
    wide = Table(("control", "said"), (("pin_kernels", "with the kernels pinned nothing differs at all"),))
    assert list(table_lines(wide, 40))[2:] == [
        "pin_kernels  with the kernels pinned",
        "             nothing differs at all",
    ]
    many = Table(tuple(f"column {n}" for n in range(6)), (tuple("12345678" for _ in range(6)),))
    assert list(table_lines(many, 40))[0] == "- column 0 12345678, column 1 12345678,"


def test_names_are_torn_behind_commas_and_dots_before_anywhere_else() -> None:
    names = Table(
        ("shape", "sites", "first"), (("192,1280,bfloat16", "8", "layers.0.self_attn.q_proj twice"),)
    )
    assert list(table_lines(names, 50))[2:] == [
        "192,1280,bfloat16        8  layers.0.self_attn.",
        "                            q_proj twice",
    ]
    assert list(table_lines(names, 40))[2:] == [
        "192,1280,        8  layers.0.",
        "bfloat16            self_attn.",
        "                    q_proj twice",
    ]
    letters = Table(("n",), (("a" * 50,),))
    assert list(table_lines(letters, 40))[2:] == ["a" * 40, "a" * 10]


# The views


def view(report: Report, name: str, request: str | None = "anchor") -> str:
    assert name in ("map", "timeline", "margins", "lens")
    said = view_blocks(View(name, "", request), report, 80)  # type: ignore[arg-type]
    section = replace(report.sections[0], blocks=said)
    return report_text(replace(report, sections=(section,)), width=200).partition("--\n")[2]


def test_the_map_says_where_it_arose_and_where_it_went() -> None:
    lines = view(flips(), "map").splitlines()
    assert lines[0] == "  map of layers: anchor, 13 positions"
    # Row 2 has the fault in layer 0.
    assert lines[1:6] == [
        "    before the layers .............",
        "    layer 0           ..O##########",
        "    layer 1           ..###########",
        "    after the layers  ..###########",
        "                                | ^",
    ]
    assert "| the first after the prompt (10); ^ the flip's row (12)" in lines[6]
    zoom = lines[lines.index("  map of sites: anchor, layer 0, where the first arose") :]
    (arising,) = [line for line in zoom if "O" in line and "'O' an origin" not in line]
    assert arising.split() == ["layers.0.attn.k_proj", "..O.........."]


def test_a_map_of_many_positions_shows_the_worst_of_each_column() -> None:
    lines = view(long_text(), "map", "long").splitlines()
    (layer,) = [line for line in lines if line.startswith("    layer 1 ")]
    cells_of = layer.removeprefix("    layer 1           ")
    assert cells_of.count("O") == 1 and len(cells_of) <= 62 and "a column is 3 positions" in "\n".join(lines)
    assert cells_of.index("O") == 50 // 3


def test_the_timeline_has_the_forwards_that_matter() -> None:
    text = view(flips(), "timeline", None)
    assert re.search(r"^\s+b\s+0\s+18\s+10 prefill of anchor \+ 5 prefill of follower \+ 3 prefill of quiet\s+"
                     r"candle-metal/mm\s+18\s+origin of anchor; first$", text, re.MULTILINE)  # fmt: skip
    assert re.search(
        r"^\s+b\s+3\s+1\s+1 decode of anchor\s+candle-metal/mv\s+1\s+flip of anchor.*", text, re.MULTILINE
    )
    assert "origin of follower" in text and "threshold in b: linear calls of at most 3 rows took" in flat(
        text
    )


def test_forwards_that_are_alike_share_a_line_and_one_that_differs_has_its_own() -> None:
    report = flips()
    assert report.series is not None
    alike = tuple(replace(report.series.b[-1], forward=n, events=()) for n in range(100, 120))
    trimmed = (*alike[:9], replace(alike[9], events=("trim of anchor",)), *alike[10:])
    for points, spans in (
        (alike, {"100", "101–119"}),
        (trimmed, {"100", "101–108", "109", "110–119"}),
    ):
        series = replace(report.series, a=(), b=points)
        text = view(replace(report, series=series, divergence=None), "timeline", None)
        assert {line.split()[1] for line in text.splitlines() if line.split()[0] == "b"} == spans


def test_a_timeline_of_many_changes_keeps_origins_and_flips() -> None:
    report = flips()
    assert report.series is not None
    many = tuple(
        replace(report.series.b[0], forward=n, events=("a trim",), members=()) for n in range(100, 200)
    )
    text = view(replace(report, series=replace(report.series, b=(*report.series.b, *many))), "timeline", None)
    assert "the 24 of " in flat(text) and "that matter most" in flat(text)
    assert "origin of anchor" in text and "flip of anchor" in text


def test_margins_are_sorted_and_the_flip_is_named() -> None:
    rows = [line.split() for line in view(long_text(), "margins", "long").splitlines()[3:]]
    assert (
        rows[0][0] == "25" and rows[0][-2:] == ["the", "flip"] and rows[0][3:5] == ["0.250000", "-0.750000"]
    )
    assert [float(row[3]) for row in rows[1:]] == sorted(float(row[3]) for row in rows[1:]) and len(rows) == 8
    # What comes after the flip saw other tokens, and is not near to it.
    assert all(int(row[0]) <= 25 for row in rows)


def test_the_lens_marks_where_the_preference_turned() -> None:
    report = flips()
    assert report.series is not None
    points = tuple(LensPoint(n, -1.0 if n < 20 else 1.0, -1.0 if n < 30 else None) for n in range(40))
    requests = (replace(report.series.requests[0], lens=points), *report.series.requests[1:])
    text = view(replace(report, series=replace(report.series, requests=requests)), "lens")
    assert re.search(r"^\s+20\s+\+1\.000000\s+-1\.000000\s+the preference turns in a$", text, re.MULTILINE)
    assert re.search(r"^\s+39\s+\+1\.000000\s+-$", text, re.MULTILINE)
    assert "33 more layers are left out" in text and text.count("turns") == 1


def test_a_tie_is_no_preference() -> None:
    report = flips()
    assert report.series is not None
    points = tuple(LensPoint(n, a, b) for n, (a, b) in enumerate(((-1.0, -1.0), (0.5, 0.5), (0.0, -0.5))))
    requests = (replace(report.series.requests[0], lens=points), *report.series.requests[1:])
    lines = view(replace(report, series=replace(report.series, requests=requests)), "lens").splitlines()
    assert [line.partition("turns in ")[2] for line in lines[3:]] == ["", "a", "b"]


def test_where_there_is_nothing_to_draw_the_words_stand() -> None:
    report = replace(flips(), series=None)
    assert "Which layers and positions differ" in flat(report_text(report))


@pytest.mark.parametrize("width", WIDTHS)
def test_headers_of_numbers_are_broken_between_words_only(width: int) -> None:
    headers = ("kind", "layer", "path in a", "path in b", "moved by", "origins")
    path = "reference/candle-metal/mv"
    table = Table(headers, (("linear", "0", path, path, "+0.5", "5"),))
    words = {word for line in table_lines(table, width) for word in re.findall(r"\w+", line)}
    assert {"layer", "moved", "by", "origins"} <= words
