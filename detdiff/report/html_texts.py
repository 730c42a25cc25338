"""A request's two texts for a page: what both share once, the flip side by side, and what is far from it folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from .blocks import Texts, Word

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
class Column:
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
    columns: tuple[Column, ...]


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
    columns: tuple[Column, ...] = ()
    if flips:
        columns = tuple(
            _column(run, near, words[same:], room // 4) for run, words in (("a", texts.a), ("b", texts.b))
        )
    return SideBySide(texts.request, folded, _passage(near), columns)


def _equal_tokens(texts: Texts) -> int:
    for n, (a, b) in enumerate(zip(texts.a, texts.b, strict=False)):
        if a.token != b.token or a.mark in ("flip", "after"):
            return n
    return min(len(texts.a), len(texts.b))


def _both(a: Word, b: Word) -> Word:
    return Word(a.index, a.token, a.text, a.margin, b.mark)


def _column(run: str, near: Sequence[Word], after: Sequence[Word], room: int) -> Column:
    cut = NEARBY if len(after) > NEARBY + NEARBY // 2 else len(after)
    return Column(run, _passage([*near, *after[:cut]]), _passage(after[cut:], room))


def _passage(words: Sequence[Word], room: int | None = None, from_end: bool = False) -> Passage:
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


def _word(word: Word) -> Markup:
    # An empty text, that of a special token, would be invisible.
    text = escape(word.text or "∅")
    tag = "mark" if word.mark == "flip" else "span"
    return Markup(f'<{tag} class="{_NAMED.get(word.mark, "t")}">{text}</{tag}>')
