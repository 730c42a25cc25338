"""What a report is made of: blocks of content that say nothing about how they look.

Strings are ready to be shown: nothing in them that a terminal would obey or hide (``words.escaped``). A format escapes only
what its own syntax needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["", "near", "flip", "after"]
ViewName = Literal["map", "timeline", "margins", "lens"]


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Item:
    """A labelled line; ``lead`` is the label as it stands in plain text: indentation, label, colon and space."""

    lead: str
    text: str

    @property
    def level(self) -> int:
        """How deep it stands, from 0."""
        return (len(self.lead) - len(self.lead.lstrip(" "))) // 2

    @property
    def label(self) -> str:
        """The label alone; empty where there is none."""
        label = self.lead.strip()
        return "" if label == "-" else label.removesuffix(":")


@dataclass(frozen=True)
class Table:
    """Cells of text. ``level`` is its depth, as that of an item."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    level: int = 0
    caption: str = ""


@dataclass(frozen=True)
class Word:
    """One generated token; ``mark`` says that it is the flip, came after it, or was near to another choice."""

    index: int
    token: int
    text: str
    margin: float | None
    mark: Mark


@dataclass(frozen=True)
class Texts:
    """What one request got in both runs, to be set side by side."""

    request: str
    a: tuple[Word, ...]
    b: tuple[Word, ...]


@dataclass(frozen=True)
class Code:
    """Lines to be kept as they are; ``language`` is the one that Markdown would be told."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class View:
    """A picture of the report's series, and in ``said`` what it shows where a format draws none.

    ``request`` is the id of the request that it is of, None for the whole run.
    """

    name: ViewName
    said: str
    request: str | None = None


@dataclass(frozen=True)
class Blank:
    """Room between two blocks of a plain text."""


Block = Prose | Item | Table | Texts | Code | View | Blank
