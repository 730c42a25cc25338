"""A report as text for a terminal: what matters first, tables and texts that fit its width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import zip_longest

from .blocks import Block, Code, Table, Texts, View
from .columns import table_lines
from .content import Report, Section
from .excerpt import Excerpt, excerpts, legend, marked
from .plain import plain
from .styled import Line, Style, printed, styled, wrapped
from .view_words import view_blocks
from .words import count

NARROWEST = 40
_BESIDE = 100
"""From this width on two texts stand side by side."""
_INDENT = 2
_STYLES: dict[str, Style] = {"flip": "flip", "near": "near", "after": "after"}


def report_text(report: Report, *, width: int = 100, colour: bool = False) -> str:
    """The whole report in lines of at most ``width`` (at least 40) characters; only a word that is longer stands out.

    ``colour`` adds escape sequences, and nothing that is not said in characters too.
    """
    width = max(NARROWEST, width)
    return "".join(f"{line.rstrip()}\n" for line in _lines(report, width, colour))


def _lines(report: Report, width: int, colour: bool) -> Iterator[str]:
    for line in _fill(report.headline, width):
        yield _title(line, colour)
    yield from _fill(f"kind: {report.kind}", width)
    if report.advice:
        yield from _fill(f"what to do: {report.advice}", width)
    for section in report.sections:
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


def _block(block: Block, width: int, colour: bool) -> Iterator[str]:
    match block:
        case Table():
            yield from table_lines(block, width)
        case Texts():
            yield from _texts(block, width, colour)
        case Code(text):
            # A command is copied as one line, whatever the width.
            yield from textwrap.indent(text, "    ").splitlines()
        case _:
            yield from plain([block], width=width).splitlines()


def _texts(texts: Texts, width: int, colour: bool) -> Iterator[str]:
    a, b = excerpts(texts)
    indent = " " * _INDENT
    if [word.token for word in texts.a] == [word.token for word in texts.b]:
        yield from _column(_excerpt("both", a, len(texts.a)), width, colour)
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
            yield from _column(_excerpt(run, of, len(words)), width, colour)
    if said := legend(texts):
        yield from textwrap.wrap(said, width, initial_indent=indent, subsequent_indent=indent)


def _column(parts: list[Line], width: int, colour: bool) -> Iterator[str]:
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


def _fill(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _title(text: str, colour: bool) -> str:
    return printed(styled([(text, "head")]), colour=colour)
