"""A request's two texts, token by token, with the flip and the tokens near to another choice marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from detdiff.compare.divergence import RequestDivergence

from .blocks import Mark, Texts, Word
from .words import LONGEST, escaped, named

if TYPE_CHECKING:
    from detdiff.compare.points import TokenPoint
    from detdiff.compare.series import RequestSeries, Series


def side_by_side(series: Series | None, request: RequestDivergence) -> list[Texts]:
    """Nothing where the generated tokens are not at hand."""
    found = None if series is None else next((r for r in series.requests if r.id == request.id), None)
    if found is None or not (found.tokens_a or found.tokens_b):
        return []
    moved = _moved(found)
    a, b = (_words(tokens, found.flip_index, moved) for tokens in (found.tokens_a, found.tokens_b))
    return [Texts(named(request.id), a, b)]


def _moved(found: RequestSeries) -> float | None:
    """The most that a margin moved between the two runs: a margin below it can be reversed by what was measured."""
    return max((abs(token.delta) for token in found.tokens_a if token.delta is not None), default=None)


def _words(tokens: Sequence[TokenPoint], flip: int | None, moved: float | None) -> tuple[Word, ...]:
    return tuple(
        Word(token.index, token.token, _text(token.text), token.margin, _mark(token, flip, moved))
        for token in tokens
    )


def _mark(token: TokenPoint, flip: int | None, moved: float | None) -> Mark:
    if flip is not None and token.index >= flip:
        return "flip" if token.index == flip else "after"
    # A movement of nothing makes no token fragile, not even a tie.
    near = moved and token.margin is not None and token.margin <= moved
    return "near" if near else ""


def _text(text: str) -> str:
    # It stands in no quotes, so that those in it need no escape.
    return escaped(text if len(text) <= LONGEST else f"{text[:LONGEST]}…", "\\")
