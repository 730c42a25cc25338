"""A page of plain text: wrapped prose, items and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate


class Page:
    """Lines of a text, wrapped where they are prose; ``width`` is at least 40."""

    def __init__(self, width: int) -> None:
        self._width = max(40, width)
        self._lines: list[str] = []

    def prose(self, text: str) -> None:
        """A paragraph."""
        self._lines += textwrap.wrap(text, self._width, break_long_words=False, break_on_hyphens=False)

    def item(self, lead: str, text: str) -> None:
        """``lead`` and then ``text``, wrapped under it."""
        indent = " " * min(len(lead), 6)
        self._lines += textwrap.wrap(
            lead + text,
            self._width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )

    def table(self, rows: Sequence[Sequence[Any]], headers: Sequence[str], indent: str) -> None:
        """A table as wide as it needs; columns of numbers are aligned right."""
        # Every cell is text already: tabulate must not read "1e3" or "007" as a number.
        table = tabulate(
            rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=_align(headers)
        )
        self._lines += [indent + line.rstrip() for line in table.splitlines()]

    def blank(self) -> None:
        """One empty line, and never two."""
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def text(self) -> str:
        """All lines."""
        return "\n".join(self._lines) + "\n"


def _align(headers: Sequence[str]) -> tuple[str, ...]:
    left = {"text", "kind", "path in a", "path in b"}
    return tuple(
        "left" if header.removeprefix("a ").removeprefix("b ") in left else "right" for header in headers
    )
