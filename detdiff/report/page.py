"""A page that is being written: the blocks so far."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import Blank, Block, Item, Prose, Table
from .plain import plain


class Page:
    """Collects blocks, and gives them as plain text."""

    def __init__(self, width: int = 100) -> None:
        self._width = width
        self._blocks: list[Block] = []

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What was written so far."""
        return tuple(self._blocks)

    def prose(self, text: str) -> None:
        """A paragraph."""
        self._blocks.append(Prose(text))

    def item(self, lead: str, text: str) -> None:
        """``lead`` (indentation, label, colon and space) and then ``text``."""
        self._blocks.append(Item(lead, text))

    def table(self, rows: Sequence[Sequence[str]], headers: Sequence[str], indent: str) -> None:
        """A table, indented."""
        self._blocks.append(Table(tuple(headers), tuple(tuple(row) for row in rows), len(indent) // 2))

    def add(self, *blocks: Block) -> None:
        """Blocks of any sort."""
        self._blocks += blocks

    def blank(self) -> None:
        """Room, and never twice as much."""
        if self._blocks and not isinstance(self._blocks[-1], Blank):
            self._blocks.append(Blank())

    def text(self) -> str:
        """All blocks as plain text."""
        return plain(self._blocks, width=self._width)
