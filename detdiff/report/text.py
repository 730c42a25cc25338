"""Documents and blocks as text: what matters first, tables and texts that fit the width of a terminal."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Final, Literal

from tabulate import tabulate

from detdiff.compare.divergence import (
    Divergence,
)
from detdiff.explain.verdict import Verdict

from .build import build
from .document import (
    Blank,
    Block,
    Code,
    Excerpt,
    Item,
    Prose,
    Report,
    Section,
    Table,
    Texts,
    View,
    excerpts,
    is_numeric,
    legend,
    marked,
)
from .views import view_blocks
from .words import count

NARROWEST = 40
_BESIDE = 100
"""From this width on two texts stand side by side."""
_INDENT = 2
_STYLES: dict[str, Style] = {"flip": "flip", "near": "near", "after": "after"}


def report_text(report: Report, *, width: int = 100, colour: bool = False, brief: bool = False) -> str:
    """The whole report in lines of at most ``width`` (at least 40) characters; only a word that is longer stands out.

    ``colour`` adds escape sequences, and nothing that is not said in characters too. ``brief`` leaves out the settings and
    environments of the runs.
    """
    width = max(NARROWEST, width)
    return "".join(f"{line.rstrip()}\n" for line in _report_lines(report, width, colour, brief))


def divergence_text(divergence: Divergence, *, width: int = 100) -> str:
    """What a comparison found, without pictures and settings."""
    return report_text(build(divergence), width=width, brief=True)


def verdict_text(verdict: Verdict, *, width: int = 100) -> str:
    """What a verdict says, without pictures and settings."""
    return report_text(build(None, verdict), width=width, brief=True)


def _report_lines(report: Report, width: int, colour: bool, brief: bool) -> Iterator[str]:
    for line in _fill(report.headline, width):
        yield _title(line, colour)
    yield from _fill(f"kind: {report.kind}", width)
    if report.advice:
        yield from _fill(f"what to do: {report.advice}", width)
    yield from plain(report.runs, width=width).splitlines() if report.runs else ()
    for section in report.sections:
        if brief and section.folded and section.id != "compared":
            continue
        yield ""
        yield from _section(section, report, width, colour)


def _section(section: Section, report: Report, width: int, colour: bool) -> Iterator[str]:
    yield _title(section.title, colour)
    yield "-" * len(section.title)
    before: Block | None = None
    for block in section.blocks:
        shown = view_blocks(block, report, width - 4) if isinstance(block, View) else (block,)
        for each in shown:
            if isinstance(before, Table) and isinstance(each, Table):
                yield ""
            yield from _block(each, width, colour)
            before = each


def plain(blocks: Iterable[Block], *, width: int) -> str:
    """Blocks alone, in lines of at most ``width`` (at least 40) characters, as far as words let them."""
    width = max(NARROWEST, width)
    return "".join(f"{line}\n" for block in blocks for line in _block(block, width))


def _block(block: Block, width: int, colour: bool = False) -> Iterator[str]:
    match block:
        case Prose(text) | View(_, text):
            yield from _fill(text, width)
        case Item(lead, text):
            yield from _fill(lead + text, width, " " * min(len(lead), 6))
        case Table():
            yield from table_lines(block, width)
        case Texts():
            yield from _two_texts(block, width, colour)
        case Code(text):
            # A command is copied as one line, whatever the width.
            yield from textwrap.indent(text, "    ").splitlines()
        case Blank():
            yield ""


def _two_texts(texts: Texts, width: int, colour: bool) -> Iterator[str]:
    a, b = excerpts(texts)
    indent = " " * _INDENT
    if [word.token for word in texts.a] == [word.token for word in texts.b]:
        yield from _text_column(_excerpt("both", a, len(texts.a)), width, colour)
    elif width >= _BESIDE:
        room = (width - _INDENT - 3) // 2
        columns = [
            [line for part in _excerpt(run, of, len(words)) for line in wrapped(part, room)]
            for run, of, words in (("a", a, texts.a), ("b", b, texts.b))
        ]
        for left, right in zip_longest(*columns, fillvalue=[]):
            yield (f"{indent}{printed(left, colour=colour, width=room)} | {printed(right, colour=colour)}")
    else:
        for run, of, words in (("a", a, texts.a), ("b", b, texts.b)):
            yield from _text_column(_excerpt(run, of, len(words)), width, colour)
    if marks := legend(texts):
        yield from textwrap.wrap(marks, width, initial_indent=indent, subsequent_indent=indent)


def _text_column(parts: list[Line], width: int, colour: bool) -> Iterator[str]:
    for part in parts:
        for line in wrapped(part, width - _INDENT):
            yield " " * _INDENT + printed(line, colour=colour)


def _excerpt(run: str, of: Excerpt, total: int) -> list[Line]:
    """A heading, and the words with how many are left out before and after."""
    if not of.words:
        return [styled([(f"{run}: {count(total, 'token')}, none of them here", "head")])]
    first, last = of.words[0].index, of.words[-1].index
    heading = f"{run}: tokens {first} to {last} of {total:,}"
    body: list[tuple[str, Style]] = [(marked(word), _STYLES.get(word.mark, "")) for word in of.words]
    if of.before:
        body.insert(0, (f"({of.before:,} before) … ", ""))
    if of.after:
        body.append((f" … ({of.after:,} more)", ""))
    return [styled([(heading, "head")]), styled(body)]


def _fill(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _title(text: str, colour: bool) -> str:
    return printed(styled([(text, "head")]), colour=colour)


_GAP = 2
_PADDING = 2
"""What tabulate adds to every header."""
_NARROWEST = 8
_WORDS: Final = re.compile(r"(\s*)(\S+)")
_PIECES: Final = re.compile(r"[^,./]*[,./]|[^,./]+")


def table_lines(table: Table, width: int) -> Iterator[str]:
    """No line is longer than ``width`` (from 40 characters on)."""
    indent = "  " * table.level
    numeric = [is_numeric(table, n) for n in range(len(table.headers))]
    limits = _limits(table, numeric, width - len(indent) - _GAP * (len(numeric) - 1))
    if limits is None:
        yield from _records(table, width)
        return
    # Cells are wrapped here and are text already: tabulate would read "1,001", "1e3" and "007" as numbers.
    headers = [_wrap(header, limit - _PADDING) for header, limit in zip(table.headers, limits, strict=True)]
    rows = [[_wrap(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in table.rows]
    made = tabulate(
        rows,
        headers=headers,
        tablefmt="simple",
        disable_numparse=True,
        colalign=["right" if one else "left" for one in numeric] if rows else None,
    )
    yield from (f"{indent}{line}".rstrip() for line in made.splitlines())


def _wrap(cell: str, limit: int) -> str:
    """``cell`` in lines of ``limit`` characters; a longer word is torn behind a comma, dot or slash, if it has one."""
    lines: list[str] = []
    for gap, word in _WORDS.findall(cell):
        for piece in [word] if len(word) <= limit else _PIECES.findall(word):
            if lines and len(lines[-1]) + len(gap) + len(piece) <= limit:
                lines[-1] += gap + piece
            else:
                lines += [piece[at : at + limit] for at in range(0, len(piece), limit)]
            gap = ""
    return "\n".join(lines)


def _word(header: str) -> int:
    return _PADDING + (_longest(header) or 1)


def _longest(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _longest_piece(cell: str) -> int:
    return max(map(len, _PIECES.findall(cell)), default=0)


def _limits(table: Table, numeric: Sequence[bool], room: int) -> list[int] | None:
    """The widths of the columns, or None where there is not room for all of them."""
    limits = [
        max(len(header) + _PADDING, *(len(row[n]) for row in table.rows), 1 + _PADDING)
        for n, header in enumerate(table.headers)
    ]
    # Names stay whole as long as there is room, then what their commas, dots and slashes part.
    for longest in (_longest, _longest_piece, lambda cell: 0):
        # Numbers are not wrapped, and their headers between words only.
        least = [
            max(
                _word(header) if number else _NARROWEST,
                *(len(row[n]) if number else longest(row[n]) for row in table.rows),
                0,
            )
            for n, (header, number) in enumerate(zip(table.headers, numeric, strict=True))
        ]
        least = [min(low, limit) for low, limit in zip(least, limits, strict=True)]
        if sum(least) <= room:
            break
    else:
        return None
    while sum(limits) > room:
        widest = max(range(len(limits)), key=lambda n: (limits[n] > least[n], limits[n]))
        limits[widest] -= 1
    return limits


def _records(table: Table, width: int) -> Iterator[str]:
    indent = "  " * table.level
    for row in table.rows:
        cells = ", ".join(f"{header} {cell}" for header, cell in zip(table.headers, row, strict=True))
        yield from textwrap.wrap(
            cells,
            width,
            initial_indent=f"{indent}- ",
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )


Style = Literal["", "head", "flip", "near", "after"]
Line = list[tuple[str, Style]]
"""Characters, each with its style."""
_CODES: Final[dict[Style, str]] = {"head": "1", "flip": "1;31", "near": "33", "after": "2"}


def styled(parts: Sequence[tuple[str, Style]]) -> Line:
    """Pieces of text, character by character."""
    return [(character, style) for text, style in parts for character in text]


def cells(line: Sequence[tuple[str, Style]]) -> int:
    """How many cells of a terminal these characters take."""
    return sum(_cells(character) for character, _ in line)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(line: Line, width: int) -> Iterator[Line]:
    """Lines of at most ``width`` cells, broken at spaces where there are any; the space itself is kept."""
    start = 0
    while start < len(line):
        used, end, space = 0, start, None
        while end < len(line) and used + _cells(line[end][0]) <= width:
            used += _cells(line[end][0])
            end += 1
            # What is marked is not torn apart.
            if line[end - 1][0] == " " and line[end - 1][1] not in ("flip", "near"):
                space = end
        if end < len(line) and line[end] not in ((" ", ""), (" ", "after")) and space is not None:
            end = space
        end = max(end, start + 1)
        yield line[start:end]
        start = end


def printed(line: Line, *, colour: bool, width: int = 0) -> str:
    """The line as characters, with escape sequences where ``colour`` is asked for.

    It is filled up to ``width`` cells, or without a width ends with its last character that is no space.
    """
    while not width and line and line[-1][0] == " ":
        line = line[:-1]
    out, now = [], ""
    for character, style in line:
        if colour and style != now:
            out.append(_switch(style))
            now = style
        out.append(character)
    if now:
        out.append("\x1b[0m")
    return "".join(out) + " " * (width - cells(line))


def _switch(style: Style) -> str:
    return f"\x1b[0;{_CODES[style]}m" if style else "\x1b[0m"
