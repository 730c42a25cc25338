"""A report as GitHub-flavoured Markdown that fits into an issue; text stays text: no markup, no HTML, no links, no mentions."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from .document import (
    Blank,
    Block,
    Code,
    Excerpt,
    Item,
    MarkedToken,
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
from .words import count, named

LONGEST = 65_000
"""Characters; GitHub takes 65,536 in an issue."""
_SECTION = 24_000
"""Characters of one section, so that no section takes the room of all others."""
_SCREEN = 96
"""Characters that a table's row takes at most."""
_NARROWEST = 12
_ROWS = 16
"""A longer table is folded, and one of ten times as many rows is cut."""
_CELL = 400
_NOTE = (
    "<sub>Cut here: the rest does not fit into an issue. The JSON form of this report has all of it.</sub>"
)


def markdown(report: Report) -> str:
    """The whole report, at most 65,000 characters."""
    head = _head(report)
    # The command to run it again is short, and of more use than the end of a long table.
    last = [section for section in report.sections if section.id == "reproduce"]
    parts, room = [head], LONGEST - len(head) - sum(len(_section(s, report, _SECTION)) + 1 for s in last)
    for section in (*(s for s in report.sections if s.id != "reproduce"), *last):
        made = _section(section, report, _SECTION if section in last else min(_SECTION, room))
        if section not in last:
            room -= len(made) + 1
        if made:
            parts.append(made)
    return "\n".join(parts)


def _head(report: Report) -> str:
    rows = [("result" if report.verdict is None else "verdict", report.kind)]
    if report.verdict is not None:
        rows.append(("rule", named(report.verdict.rule)))
    if report.advice:
        rows.append(("what to do", report.advice))
    rows += [(f"run {item.label}", item.text) for item in report.runs]
    table = [
        "| | |",
        "|---|---|",
        *(f"| **{inline(key)}** | {cell(_wrap(text, 80))} |" for key, text in rows),
    ]
    return f"**{inline(report.headline.strip())}**\n\n" + "\n".join(table) + "\n"


def _section(section: Section, report: Report, room: int) -> str:
    """The section, its blocks as far as ``room`` characters go; nothing where not even the title and a note fit."""
    start, end = f"### {inline(section.title)}\n", ""
    if section.folded:
        start = f"<details><summary>{in_html(section.title)}</summary>\n"
        end = "\n</details>\n"
    room -= len(start) + len(end) + len(_NOTE) + 4
    if room < 0:
        return ""
    body = ""
    for made in _blocks(section.blocks, report):
        if len(body) + len(made) > room:
            body += f"\n\n{_NOTE}\n" if body else f"\n{_NOTE}\n"
            break
        body += made
    return f"{start}{body}{end}"


def _blocks(blocks: Sequence[Block], report: Report) -> Iterator[str]:
    """Each block with the empty line that it needs before it; items that follow each other are one list."""
    listed = False
    for block in blocks:
        shown = view_blocks(block, report, _SCREEN - 4) if isinstance(block, View) else (block,)
        for each in shown:
            made = _block(each)
            if not made:
                continue
            item = isinstance(each, Item)
            yield f"{made}\n" if item and listed else f"\n{made}\n"
            listed = item


def _block(block: Block) -> str:
    match block:
        case Prose(text):
            return sentence(text.strip(), leading=True)
        case Item(_, text):
            text = text.strip()
            label = f"**{inline(block.label)}**: " if block.label else ""
            # Items under a table or a paragraph have no parent, so that all of them stand on one level.
            return f"- {label}{sentence(text, leading=not label)}"
        case Table():
            return _folded(block)
        case Texts():
            return "\n".join(_texts(block))
        case Code(text, language):
            return fenced(text, language)
        case View() | Blank():
            return ""


def _folded(table: Table) -> str:
    made = "\n".join(_table(table))
    if len(table.rows) <= _ROWS:
        return made
    caption = table.caption or f"{count(len(table.rows), 'row')}: {', '.join(table.headers[:3])}"
    return f"<details><summary>{in_html(caption)}</summary>\n\n{made}\n\n</details>"


def _table(table: Table) -> Iterator[str]:
    rows = table.rows[: 10 * _ROWS]
    limits = _limits(table.headers, rows)
    yield f"| {' | '.join(cell(header) for header in table.headers)} |"
    yield f"|{'|'.join('--:' if is_numeric(table, n) else '---' for n in range(len(limits)))}|"
    for row in rows:
        cells = (cell(_wrap(_cut_cell(text), limit)) for text, limit in zip(row, limits, strict=True))
        yield f"| {' | '.join(cells)} |"
    if len(rows) < len(table.rows):
        note = f"and {count(len(table.rows) - len(rows), 'more row')}"
        yield f"| {' | '.join([note, *[''] * (len(limits) - 1)])} |"


def _limits(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column may be for a row to fit on a screen."""
    limits = [
        max(len(text) for text in (header, *(row[n] for row in rows))) for n, header in enumerate(headers)
    ]
    while sum(limits) > _SCREEN and max(limits) > _NARROWEST:
        limits[limits.index(max(limits))] -= 1
    return [max(1, limit) for limit in limits]


def _wrap(text: str, limit: int) -> str:
    return "\n".join(textwrap.wrap(text, limit, break_on_hyphens=False)) if len(text) > limit else text


def _cut_cell(text: str) -> str:
    return text if len(text) <= _CELL else f"{text[:_CELL]}…"


def _texts(texts: Texts) -> Iterator[str]:
    """Both texts around the flip, the flip in bold and in brackets."""
    a, b = excerpts(texts)
    flips = any(word.mark == "flip" for word in (*a.words, *b.words))
    yield f"| run | {inline(texts.request)}{', around its flip' if flips else ''} |"
    yield "|---|---|"
    sides = [("a", a, texts.a), ("b", b, texts.b)]
    if [word.token for word in texts.a] == [word.token for word in texts.b]:
        sides = [("both", a, texts.a)]
    for run, of, words in sides:
        yield f"| **{run}**<br>{_places(of, words)} | {_excerpt(of)} |"
    if marks := legend(texts):
        yield f"\n<sub>{inline(marks)}</sub>"


def _places(of: Excerpt, words: Sequence[MarkedToken]) -> str:
    if not of.words:
        return f"no token here, {len(words):,} in all"
    return f"tokens {of.words[0].index} to {of.words[-1].index} of {len(words):,}"


def _excerpt(of: Excerpt) -> str:
    before = f"({of.before:,} before) … " if of.before else ""
    after = f" … ({of.after:,} more)" if of.after else ""
    # Words of one sort at once: what is harmless in two tokens may be a link in one text.
    parts = [_words(mark, tuple(words)) for mark, words in groupby(of.words, key=lambda word: word.mark)]
    return f"{before}{''.join(parts)}{after}"


def _words(mark: str, words: Sequence[MarkedToken]) -> str:
    # Bold as an element: with asterisks a text that begins with a space would not become bold.
    element = {"flip": "b", "near": "i"}.get(mark)
    text = inline("".join(marked(word) for word in words))
    return text if element is None else f"<{element}>{text}</{element}>"


_BREAK: Final = "&#8203;"
"""A space without width, which parts what GitHub would turn into a link, a mention or an emoji."""
_CODE: Final = re.compile(r"(?<!`)`([^`]{1,120})`(?!`)")
_LEADING: Final = re.compile(r"^(?:(?P<mark>[-+=>#*~:|])|(?P<number>\d{1,9})(?P<end>[.)]))")
_FENCE: Final = re.compile(r"`+")
_LINKED: Final = r"""
      @
    | \#(?=\w)
    | \bGH(?=-\d)
    | :(?=//)
    | :(?=[\w+-]+:)
    | \bwww(?=\.)
    | (?<![0-9a-f])[0-9a-f]{7}(?=[0-9a-f]{33}(?![0-9a-f]))  # a commit's name
"""
"""What GitHub makes a link, a mention, a reference or a picture of, if the next character follows at once."""
_PARTED: Final = re.compile(_LINKED, re.VERBOSE | re.IGNORECASE)
_SPECIAL: Final = re.compile(
    rf"""
      (?P<entity>[&<>])
    | (?P<escaped>[\\`*\[\]|~]
        | (?<![^\W_])_|_(?![^\W_]))  # an underscore inside a word is no markup
    | (?P<dollar>\$)
    | (?P<diverged>{_LINKED})
    """,
    re.VERBOSE | re.IGNORECASE,
)


def inline(text: str) -> str:
    """``text``, which has no line break, as inline Markdown that shows every character of it."""
    return _SPECIAL.sub(_replaced, text)


def sentence(text: str, *, leading: bool = False) -> str:
    """Prose as inline Markdown; what stands in single backquotes becomes code, in which nothing is active either.

    ``leading`` says that it begins a line, where a character may make a list or a heading.
    """
    out, at = [], 0
    for found in _CODE.finditer(text):
        # A pipe would end a table's cell even in code.
        code = "|" in found[1] or not found[1].strip()
        out += [inline(text[at : found.start()]), inline(found[0]) if code else found[0]]
        at = found.end()
    made = "".join([*out, inline(text[at:])])
    return _led(made) if leading else made


def cell(text: str) -> str:
    """``text`` in one cell of a table; it may hold ``\\n``, which breaks the line."""
    return "<br>".join(sentence(line) for line in text.split("\n"))


def in_html(text: str) -> str:
    """``text`` inside an HTML element, where Markdown is not read; GitHub still looks for mentions and links there."""
    diverged = _PARTED.sub(lambda found: f"{found[0]}\0", text)
    return html.escape(diverged, quote=True).replace("\0", _BREAK)


def fenced(text: str, language: str = "") -> str:
    """A block of code, in a fence that is longer than any run of backquotes in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in _FENCE.findall(text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _replaced(found: re.Match[str]) -> str:
    kind, character = found.lastgroup, found[0]
    if kind == "entity":
        return html.escape(character)
    if kind == "escaped":
        return f"\\{character}"
    if kind == "dollar":
        # What GitHub's manual gives for a dollar sign that begins no formula.
        return "<span>$</span>"
    return f"{character}{_BREAK}"


def _led(text: str) -> str:
    found = _LEADING.match(text.lstrip(" "))
    text = text.lstrip(" ")
    if found is None:
        return text
    if found["mark"]:
        return f"\\{text}"
    return f"{found['number']}\\{text[len(found['number']) :]}"
