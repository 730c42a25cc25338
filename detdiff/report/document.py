"""What a report is made of: a document of sections of blocks, which say nothing about how they look.

Strings are ready to be shown: nothing in them that a terminal would obey or hide (``words.escaped``). A format escapes only
what its own syntax needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from detdiff.compare.divergence import Divergence, Origin
from detdiff.explain.verdict import Verdict

if TYPE_CHECKING:
    from detdiff.compare.series import RequestSeries, Series

    from .svg import Drawing

Mark = Literal["", "near", "flip", "after"]


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
class MarkedToken:
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
    a: tuple[MarkedToken, ...]
    b: tuple[MarkedToken, ...]


@dataclass(frozen=True)
class Code:
    """Lines to be kept as they are; ``language`` is the one that Markdown would be told."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class View:
    """A picture of the report's series, of the sort ``name`` of ``views.VIEWS``; ``sentence`` is what it shows.

    ``request`` is the id of the request that it is of, None for the whole run.
    """

    name: str
    sentence: str
    request: str | None = None


@dataclass(frozen=True)
class Blank:
    """Room between two blocks of a plain text."""


Block = Prose | Item | Table | Texts | Code | View | Blank
_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?|-|nan|[-+]?inf")


def is_numeric(table: Table, column: int) -> bool:
    """Whether every cell of a column is a number, or the dash that stands for none."""
    return all(_NUMBER.fullmatch(row[column]) for row in table.rows)


@dataclass(frozen=True)
class Section:
    """``id`` names it in links; ``folded`` says that a reader in a hurry does without it."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


@dataclass(frozen=True, eq=False)
class Report:
    """``kind`` is a verdict's, or ``identical``, ``different`` or ``inconclusive`` where no verdict was asked for.

    ``headline`` is one sentence, ``advice`` what to do, empty where there is nothing. ``series`` is None where the traces
    were not at hand. ``command`` runs both sides again. ``runs`` says what either run was.
    """

    kind: str
    headline: str
    advice: str
    sections: tuple[Section, ...]
    divergence: Divergence | None
    verdict: Verdict | None
    series: Series | None
    command: str
    runs: tuple[Item, ...] = ()

    def section(self, id: str) -> Section | None:
        """The section of that name, or None where there was nothing to say."""
        return next((section for section in self.sections if section.id == id), None)


@dataclass(frozen=True, eq=False)
class ViewSubject:
    """What a view is of: a request of a series, or without one both whole runs."""

    series: Series
    request: RequestSeries | None
    divergence: Divergence | None

    @property
    def one(self) -> RequestSeries:
        """The request, in a view of one."""
        assert self.request is not None
        return self.request

    @property
    def origin(self) -> Origin | None:
        """The request's first origin, where the comparison names one."""
        found = () if self.divergence is None or self.request is None else self.divergence.requests
        return next((each.origin for each in found if self.request and each.id == self.request.id), None)


class ViewKind(Protocol):
    """A sort of picture. Each has a file below ``views`` and a line in ``views.VIEWS``, and needs nothing else.

    ``section`` is the id and title of where it stands; ``sentence`` says in a sentence what it shows.
    """

    name: str
    title: str
    sentence: str
    section: tuple[str, str]
    of_request: bool

    def shows(self, subject: ViewSubject) -> bool:
        """Whether there is anything to draw."""

    def picture(self, subject: ViewSubject, *, columns: int, standalone: bool) -> str:
        """One ``<svg>``."""

    def drawings(self, subject: ViewSubject) -> Sequence[tuple[str, Callable[[], Drawing]]]:
        """The picture and those that are opened from it by name, made when they are asked for; what is needed most first."""

    def table(self, subject: ViewSubject, most: int) -> Table:
        """Its values in at most ``most`` lines, those that matter most."""

    def words(self, subject: ViewSubject, columns: int) -> Iterable[Block]:
        """What stands for it where nothing is drawn."""


class Page:
    """Collects blocks."""

    def __init__(self) -> None:
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


BEFORE, AFTER = 12, 8


@dataclass(frozen=True)
class Excerpt:
    """``words`` of one run, with how many tokens are left out ``before`` and ``after`` them."""

    words: tuple[MarkedToken, ...]
    before: int
    after: int


def excerpts(texts: Texts) -> tuple[Excerpt, Excerpt]:
    """Of run a and of run b, cut at the same tokens; from the first token on where nothing flips."""
    flip = next((word.index for word in (*texts.a, *texts.b) if word.mark == "flip"), None)
    first = 0 if flip is None else max(0, flip - BEFORE)
    last = BEFORE + AFTER if flip is None else flip + AFTER
    return _cut(texts.a, first, last), _cut(texts.b, first, last)


def _cut(words: tuple[MarkedToken, ...], first: int, last: int) -> Excerpt:
    return Excerpt(
        tuple(word for word in words if first <= word.index <= last),
        sum(word.index < first for word in words),
        sum(word.index > last for word in words),
    )


def marked(word: MarkedToken) -> str:
    """The word's text with the characters that tell what it is: ``[flip]``, ``~near to another choice~``."""
    around = {"flip": ("[", "]"), "near": ("~", "~")}.get(word.mark, ("", ""))
    return f"{around[0]}{word.text}{around[1]}"


def legend(texts: Texts) -> str:
    """What the marks of its excerpt mean; empty where there are none."""
    marks = {word.mark for part in excerpts(texts) for word in part.words}
    known = {
        "flip": "[ ] the flip",
        "near": "~ ~ a token whose margin is no larger than what moved between the runs",
    }
    return "; ".join(meaning for mark, meaning in known.items() if mark in marks)
