"""Blocks as plain text: wrapped prose and items, tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from tabulate import tabulate

from .blocks import Blank, Block, Code, Item, Prose, Table, Texts, View


def plain(blocks: Iterable[Block], *, width: int) -> str:
    """Lines of prose are at most ``width`` (at least 40) characters, tables as wide as they need."""
    width = max(40, width)
    return "\n".join(line for block in blocks for line in _lines(block, width)) + "\n"


def _lines(block: Block, width: int) -> Iterator[str]:
    match block:
        case Prose(text):
            yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        case Item(lead, text):
            indent = " " * min(len(lead), 6)
            yield from textwrap.wrap(
                lead + text,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
                drop_whitespace=True,
            )
        case Table(headers, rows, level):
            # Every cell is text already: tabulate must not read "1e3" or "007" as a number.
            table = tabulate(
                rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=_align(headers)
            )
            yield from ("  " * level + line.rstrip() for line in table.splitlines())
        case Blank():
            yield ""
        case Code(text):
            yield from textwrap.indent(text, "    ").splitlines()
        case View(_, said):
            yield from textwrap.wrap(said, width, break_long_words=False, break_on_hyphens=False)
        case Texts():
            yield from _side_by_side(block, width)


def _side_by_side(texts: Texts, width: int) -> Iterator[str]:
    for run, words in (("a", texts.a), ("b", texts.b)):
        said = "".join(f"[{word.text}]" if word.mark == "flip" else word.text for word in words)
        yield from textwrap.wrap(f"{run}: {said}", width, subsequent_indent="   ")


def _align(headers: Sequence[str]) -> tuple[str, ...]:
    left = {"text", "kind", "path in a", "path in b"}
    return tuple(
        "left" if header.removeprefix("a ").removeprefix("b ") in left else "right" for header in headers
    )
