"""Tables of text that fit a width: columns wrap, and where they cannot, every row becomes a paragraph."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from .blocks import Table

_GAP = 2
_PADDING = 2
"""What tabulate adds to every header."""
_NARROWEST = 8
_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?|-|nan|[-+]?inf")


def is_numeric(table: Table, column: int) -> bool:
    """Whether every cell of a column is a number, or the dash that stands for none."""
    return all(_NUMBER.fullmatch(row[column]) for row in table.rows)


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
    return cell if len(cell) <= limit else "\n".join(textwrap.wrap(cell, limit))


def _word(header: str) -> int:
    return _PADDING + max(map(len, header.split()), default=1)


def _limits(table: Table, numeric: Sequence[bool], room: int) -> list[int] | None:
    """The widths of the columns, or None where there is not room for all of them."""
    limits = [
        max(len(header) + _PADDING, *(len(row[n]) for row in table.rows), 1 + _PADDING)
        for n, header in enumerate(table.headers)
    ]
    least = [
        # Numbers are not wrapped, and their headers between words only.
        max([_word(header) if number else _NARROWEST, *(len(row[n]) for row in table.rows if number)])
        for n, (header, number) in enumerate(zip(table.headers, numeric, strict=True))
    ]
    least = [min(low, limit) for low, limit in zip(least, limits, strict=True)]
    if sum(least) > room:
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
