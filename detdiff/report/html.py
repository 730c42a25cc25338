"""A report as one HTML file that needs nothing else: no network, no storage, and no script to be read.

Everything that comes from a model or a trace is escaped by the templates. A content security policy lets only this page's
own style and script run, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from detdiff.compare.divergence import Divergence, RequestDivergence

from .document import (
    Blank,
    Block,
    Code,
    Item,
    MarkedToken,
    Prose,
    Report,
    Section,
    Table,
    Texts,
    View,
    is_numeric,
)
from .svg import Axis, Drawing, style
from .views import VIEWS, subject_of, values
from .words import count, named, number, runs_of, short_path, shown, spans

LARGEST: Final = 2_000_000
"""Bytes of a page at most."""
_TEXTS: Final = 400_000
_PICTURES: Final = 500_000
_SECTION: Final = 60_000
_VIEWED: Final = 60
_LONGEST: Final = 2_000
_SCRIPTS: Final = ("page.js", "figure.js")


@dataclass(frozen=True)
class PageBlock:
    """A block as the template takes it: ``kind`` chooses the macro, ``of`` is what it shows.

    ``first`` says that none of its kind came before.
    """

    kind: str
    of: Any
    first: bool = False


@dataclass(frozen=True, eq=False)
class ViewFigure:
    """A view: its heading, its picture, its values, and the drawings that a script opens, the first of which it is."""

    id: str
    title: str
    sentence: str
    picture: Markup | None
    values: Table
    first: Drawing | None
    drawings: Sequence[tuple[str, Callable[[], Drawing]]]


def write_html(report: Report, path: Path) -> None:
    """Write the page. Raises OSError where that cannot be done."""
    path.write_text(html(report), encoding="utf-8", newline="\n")


def html(report: Report) -> str:
    """The whole page, at most ``LARGEST`` bytes: what does not fit is left out, and the page says so."""
    blocks = [block for section in report.sections for block in section.blocks]
    pictures = _Pictures(report, sum(isinstance(block, View) for block in blocks))
    room = _TEXTS // max(1, sum(isinstance(block, Texts) for block in blocks))
    sections = [(section, _section_parts(section, pictures, room)) for section in report.sections]
    for parts in [parts for _, parts in sections if any(part.kind == "texts" for part in parts)][:1]:
        place = next(n for n, part in enumerate(parts) if part.kind == "texts")
        parts[place] = replace(parts[place], first=True)
    context: dict[str, Any] = {
        "report": report,
        "title": cut(report.headline, 600),
        "sections": sections,
        "advice": _advice(report),
        "facts": facts(report),
        "data": None,
        "left_out": (),
    }
    page = render("report.html", _SCRIPTS, **context)
    if not pictures.figures:
        return page
    data, left_out = packed(pictures.figures, LARGEST - len(page.encode()) - 4_000)
    return render("report.html", _SCRIPTS, **{**context, "data": Markup(data), "left_out": left_out})


class _Pictures:
    """Draws ``views`` views, until they would take too much of the page; their tables are the shorter the more there are."""

    def __init__(self, report: Report, views: int) -> None:
        self._report = report
        self._room = _PICTURES
        self._lines = max(8, 2_400 // max(1, views))
        self._drawn = 0
        self.figures: list[ViewFigure] = []

    def figure(self, view: View) -> ViewFigure | None:
        """None where there is nothing to draw."""
        subject = subject_of(view, self._report)
        if subject is None or self._drawn == _VIEWED:
            return None
        self._drawn += 1
        picture, drawings = None, VIEWS[view.name].drawings(subject)
        if self._room > 0:
            picture = drawings[0][1]()
            self._room -= len(picture.svg)
        number = 0 if subject.request is None else subject.series.requests.index(subject.request)
        figure = ViewFigure(
            id=f"{view.name}-{number}",
            title=VIEWS[view.name].title + ("" if view.request is None else f" of {named(view.request, 80)}"),
            sentence=view.sentence,
            picture=None if picture is None or self._room < 0 else Markup(picture.svg),
            values=values(view, subject, self._lines),
            first=picture,
            drawings=drawings,
        )
        if figure.picture is not None:
            self.figures.append(figure)
        return figure


def packed(figures: Sequence[ViewFigure], room: int) -> tuple[str, tuple[str, ...]]:
    """What a page's script is told: JSON that may stand inside a script element, of at most ``room`` characters.

    Each drawing is zlib's, in base64, and unpacked by the browser when it is looked at; the picture in the page is the
    first and has no SVG here. Drawings that find no room are left out, the least needed first, and sentences say so.
    """
    made: dict[str, dict[str, Any]] = {}
    known: dict[str, list[Axis]] = {figure.id: [] for figure in figures}
    room -= 200 + sum(len(figure.id) + 60 for figure in figures)
    full: set[str] = set()
    for place in range(max((len(figure.drawings) for figure in figures), default=0)):
        for figure in figures:
            if figure.id in full or place >= len(figure.drawings):
                continue
            name, make = figure.drawings[place]
            drawing = figure.first if place == 0 and figure.first is not None else make()
            axes = known[figure.id]
            new = [] if drawing.axis in axes else [_deflated(vars(drawing.axis))]
            number = axes.index(drawing.axis) if drawing.axis in axes else len(axes)
            text = _deflated(_drawing(drawing, number, place > 0))
            cost = len(text) + len(json.dumps(name)) + 40 + sum(map(len, new))
            if cost > room:
                full.add(figure.id)
                continue
            room -= cost
            if new:
                axes.append(drawing.axis)
            data = made.setdefault(figure.id, {"axes": [], "drawings": []})
            data["axes"] += new
            data["drawings"].append({"name": name, "packed": text})
    return json.dumps(made, separators=(",", ":")).replace("<", "\\u003c"), tuple(_missing(figures, made))


def _missing(figures: Sequence[ViewFigure], made: Mapping[str, Any]) -> Iterator[str]:
    still = [figure.title for figure in figures if figure.id not in made]
    if still:
        which = still[0] if len(still) == 1 else f"{len(still)} of {len(figures)} views"
        yield f"To keep this page small, {which} can be looked at but not stepped through; the tables hold the values."
    for figure in figures:
        found = len(made[figure.id]["drawings"]) if figure.id in made else 0
        if 0 < found < len(figure.drawings):
            names = [name for name, _ in figure.drawings[found:]]
            more = f" to {names[-1]}" if len(names) > 1 else ""
            yield f"Left out of {figure.title} to keep this page small: {names[0]}{more} ({len(names)} of {len(figure.drawings)})."


def _drawing(drawing: Drawing, axis: int, drawn: bool) -> dict[str, Any]:
    return {
        "svg": drawing.svg if drawn else None,
        "rows": drawing.rows,
        "axis": axis,
        "cells": drawing.cells,
        "jumps": [vars(jump) for jump in drawing.jumps],
        "doors": [vars(door) for door in drawing.doors],
        "start": drawing.start,
        "parent_row": drawing.parent_row,
    }


def _deflated(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode("ascii")


def _section_parts(section: Section, pictures: _Pictures, room: int) -> list[PageBlock]:
    """Neighbouring items as one list; a line that names a request is a heading. A section has its room, too."""
    parts: list[PageBlock] = []
    items: list[Item] = []
    left = _SECTION
    for block in (*section.blocks, Blank()):
        left -= _length(block)
        if left < 0 and _length(block):
            continue
        if isinstance(block, Item):
            items.append(block)
            continue
        if items:
            parts.append(PageBlock("items", tuple(items)))
            items = []
        parts += _block_parts(block, pictures, room)
    if left < 0:
        parts.append(
            PageBlock(
                "prose", "The page has no room for the rest of this section; the report in JSON has it."
            )
        )
    return parts


def _length(block: Block) -> int:
    """About how many bytes a block takes that has no room of its own."""
    match block:
        case Prose(text) | Code(text):
            return len(text) + 40
        case Item(lead, text):
            return len(lead) + len(text) + 80
        case Table(headers, rows):
            return sum(min(len(cell), 600) + 12 for row in (headers, *rows) for cell in row)
        case Texts() | View() | Blank():
            return 0


def _block_parts(block: Block, pictures: _Pictures, room: int) -> Iterator[PageBlock]:
    match block:
        case Prose(text):
            heading = text.startswith("request ")
            yield PageBlock("heading" if heading else "prose", text.removesuffix(":") if heading else text)
        case Table():
            yield PageBlock("table", block)
        case Texts():
            yield PageBlock("texts", side_by_side(block, room))
        case Code():
            yield PageBlock("code", block)
        case View():
            figure = pictures.figure(block)
            yield PageBlock("prose", block.sentence) if figure is None else PageBlock("figure", figure)
        case Item() | Blank():
            pass


def cut(text: str, longest: int = _LONGEST) -> str:
    """``text``, or its beginning and how long it was."""
    return text if len(text) <= longest else f"{text[:longest]}… (cut, {len(text):,} in all)"


_COMMAND = re.compile(r"`([A-Za-z][^`\"]{0,200})`")


def prose(text: str) -> Markup:
    """Prose; what stands in backticks is code."""
    pieces = _COMMAND.split(cut(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if n % 2 else escape(piece) for n, piece in enumerate(pieces)
    )


def _advice(report: Report) -> Markup:
    """What to do; the name of a section leads there."""
    text = str(prose(report.advice))
    for section in report.sections:
        link = Markup('<a href="#{}">{}</a>').format(section.id, section.title)
        text = text.replace(str(Markup("<code>{}</code>").format(section.title)), str(link))
    return Markup(text)


def render(template: str, scripts: Sequence[str], **context: Any) -> str:
    """A page from one of this package's templates."""
    sheet = Markup(style() + _asset("report.css"))
    # One function around all of them: nothing of a page's script is a global name.
    script = Markup('"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in scripts) + "\n})();\n")
    policy = (
        f"default-src 'none'; style-src '{_hash(sheet)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return _environment().get_template(template).render(style=sheet, script=script, policy=policy, **context)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


@cache
def _asset(name: str) -> str:
    return files("detdiff.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"prose": prose, "cut": cut, "named": named}
    made.tests |= {"numeric": is_numeric}
    return made


NEARBY = 60
"""Tokens shown on either side of the flip before the rest is folded."""
_NAMED = {"near": "t near", "flip": "t flip", "after": "t after"}


@dataclass(frozen=True)
class Passage:
    """Tokens as markup; ``count`` of them, and ``missing`` that the page has no room for."""

    html: Markup
    count: int
    missing: int = 0


@dataclass(frozen=True)
class TokenColumn:
    """One run's tokens: before the flip those of ``shown`` alone, and from the flip on ``shown`` and then ``folded``."""

    run: str
    shown: Passage
    folded: Passage


@dataclass(frozen=True)
class SideBySide:
    """``shared`` comes before the columns and is equal in both runs. ``columns`` is empty where nothing flips."""

    request: str
    shared: Passage
    shared_shown: Passage
    columns: tuple[TokenColumn, ...]


def side_by_side(texts: Texts, room: int) -> SideBySide:
    """The tokens with their boundaries. All that is folded takes about ``room`` bytes at most."""
    same = _equal_tokens(texts)
    shared = [
        _both(a, b) if b.mark == "near" else a for a, b in zip(texts.a[:same], texts.b[:same], strict=True)
    ]
    flips = same < max(len(texts.a), len(texts.b))
    start = max(0, same - NEARBY) if flips else 0
    if start < NEARBY // 2:
        start = 0
    near, far = (shared[start:], shared[:start]) if flips else (shared[:NEARBY], shared[NEARBY:])
    folded = _passage(far, room // 2, from_end=flips)
    columns: tuple[TokenColumn, ...] = ()
    if flips:
        columns = tuple(
            _run_column(run, near, words[same:], room // 4) for run, words in (("a", texts.a), ("b", texts.b))
        )
    return SideBySide(texts.request, folded, _passage(near), columns)


def _equal_tokens(texts: Texts) -> int:
    for n, (a, b) in enumerate(zip(texts.a, texts.b, strict=False)):
        if a.token != b.token or a.mark in ("flip", "after"):
            return n
    return min(len(texts.a), len(texts.b))


def _both(a: MarkedToken, b: MarkedToken) -> MarkedToken:
    return MarkedToken(a.index, a.token, a.text, a.margin, b.mark)


def _run_column(
    run: str, near: Sequence[MarkedToken], after: Sequence[MarkedToken], room: int
) -> TokenColumn:
    cut = NEARBY if len(after) > NEARBY + NEARBY // 2 else len(after)
    return TokenColumn(run, _passage([*near, *after[:cut]]), _passage(after[cut:], room))


def _passage(words: Sequence[MarkedToken], room: int | None = None, from_end: bool = False) -> Passage:
    """As many words as there is room for; with ``from_end`` it is the first that are left out."""
    pieces: list[Markup] = []
    for word in reversed(words) if from_end else words:
        piece = _word(word)
        if room is not None:
            room -= len(piece.encode())
            if room < 0:
                break
        pieces.append(piece)
    ordered: Iterable[Markup] = reversed(pieces) if from_end else pieces
    return Passage(Markup("").join(ordered), len(words), len(words) - len(pieces))


def _word(word: MarkedToken) -> Markup:
    # An empty text, that of a special token, would be invisible.
    text = escape(word.text or "∅")
    tag = "mark" if word.mark == "flip" else "span"
    return Markup(f'<{tag} class="{_NAMED.get(word.mark, "t")}">{text}</{tag}>')


@dataclass(frozen=True)
class PageFact:
    """``section`` is where more of it stands."""

    section: str
    title: str
    what: str
    details: tuple[str, ...]


def facts(report: Report) -> tuple[PageFact, ...]:
    """The earliest origin, and the first request that flips; what was compared where nothing diverges."""
    divergence = report.divergence
    if divergence is None:
        return ()
    diverged = [each for each in divergence.requests if each.stage is not None]
    made: list[PageFact | None] = [_compared_fact(divergence)]
    if diverged:
        first = next((each for each in diverged if each.id == divergence.first), diverged[0])
        flipped = [each for each in (first, *diverged) if each.flip is not None]
        end = flipped[0] if flipped else first
        made = [_origin_fact(first), _carried_fact(end), _flipped_fact(end)]
    return tuple(fact for fact in made if fact is not None and report.section(fact.section) is not None)


def _compared_fact(divergence: Divergence) -> PageFact:
    found = divergence.compared
    details = (count(found.requests, "request"), count(found.rows, "row"), f"{found.differing:,} differ")
    return PageFact("compared", "Compared", count(found.digests, "digest"), details)


def _origin_fact(request: RequestDivergence) -> PageFact:
    origin = request.origin
    if origin is None:
        return PageFact("origin", "Origin", "no origin could be named", (f"diverges in {request.stage}",))
    details = [f"position {origin.position} of {named(request.id)}"]
    if (origin.path_a, origin.rows_a) != (origin.path_b, origin.rows_b):
        rows = ["?" if n is None else count(n, "row") for n in (origin.rows_a, origin.rows_b)]
        details.append(f"a: {rows[0]}, {short_path(origin.path_a)}")
        details.append(f"b: {rows[1]}, {short_path(origin.path_b)}")
    else:
        details.append(f"{short_path(origin.path_a)} in both")
    return PageFact("origin", "Origin", named(origin.site), tuple(details))


def _carried_fact(request: RequestDivergence) -> PageFact | None:
    found = request.differing_entries
    if found is None:
        return None
    if not found.count:
        return PageFact(
            "differing_entries", "Carried", "by no cache entry", (f"{found.entries:,} compared, all equal",)
        )
    details = (
        f"of {found.entries:,} alive at position {found.alive_at} of {named(request.id)}",
        f"positions {spans(found.positions)}",
        f"layers {spans(runs_of(found.layers))}",
    )
    return PageFact(
        "differing_entries", "Carried", count(found.count, "cache entry", "cache entries"), details
    )


def _flipped_fact(request: RequestDivergence) -> PageFact:
    flip, text = request.flip, request.text
    if text is not None:
        what, where = f"{shown(text.a)} → {shown(text.b)}", f"character {text.index} of {named(request.id)}"
        return PageFact("flip", "Flipped", what, (where,))
    if flip is None and request.scored is not None:
        scored = request.scored
        return PageFact(
            "flip",
            "Log-probability",
            f"{number(scored.a)} → {number(scored.b)}",
            (f"{count(scored.tokens, 'given token')} of {named(request.id)}",),
        )
    if flip is None and request.embedding is not None:
        vectors = request.embedding
        return PageFact("flip", "Embedding", f"{vectors.differing:,} of {vectors.width:,} numbers differ", ())
    if flip is None:
        generated = min(request.generated_a, request.generated_b)
        return PageFact("flip", "No flip", f"{count(generated, 'generated token')} alike", ())
    if flip.kind == "length":
        return PageFact("flip", "Flipped", "ends at another length", (f"token {flip.index}",))
    details = (
        f"generated token {flip.index} of {named(request.id)}",
        f"margin {number(flip.a.margin)} in a, {number(flip.b.margin)} in b",
    )
    return PageFact("flip", "Flipped", f"{shown(flip.a.text)} → {shown(flip.b.text)}", details)
