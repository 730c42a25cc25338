"""The margins: by how much each token was chosen, beside by how much the other run moved that choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Final

from ..document import Block, Item, Table, ViewSubject
from ..svg import (
    AREA,
    Axis,
    Canvas,
    CursorJump,
    CursorPlaces,
    Drawing,
    LinearScale,
    Log,
    Symbol,
    coordinate,
    cross,
    log_range,
    mark,
    shortened,
    stroke,
)
from ..words import count, named, number, shown, spans

if TYPE_CHECKING:
    from detdiff.compare.series import RequestSeries, TokenPoint

_HEIGHT: Final = 200
_ZERO: Final = 18
_NEAREST: Final = 8
COLUMNS: Final = 240


def margins_svg(request: RequestSeries, *, columns: int = COLUMNS, standalone: bool = False) -> str:
    """A point for each token's margin in run a and a cross for what the other run moved; larger where that could turn it.

    More tokens than fit share places: then the smallest margin is drawn, the largest as a dash, and the largest
    movement.
    """
    data = _MarginData.of(request, columns)
    plan = _TokenScale.of(data, columns)
    canvas = Canvas()
    title = f"Margins of {shortened(request.id)}"
    top = canvas.heading(title, plan.width, standalone) + 20
    scale = Log(data.low, data.high, top + _HEIGHT, top, top + _HEIGHT + _ZERO)
    _ground(canvas, plan, data, scale)
    _marks(canvas, plan, data, scale)
    if data.flip is not None:
        x = plan.x(data.flip)
        canvas.line(x, top - 8, x, scale.floor + 4, "dd-flip")
        canvas.flip(x, top - 6, f"flip, token {data.flip:,}", plan.width)
    height = canvas.legend(8, scale.floor + 42, plan.width - 16, _legend(data)) + 6
    return canvas.svg(
        "dd-margins", title, _said(request, data), (plan.width, height), standalone, plan.places(data, scale)
    )


@dataclass(frozen=True)
class _TokenGroup:
    """Tokens that share a place: their mean index, smallest and largest margin, and the largest movement."""

    index: float
    low: float | None
    high: float | None
    moved: float | None

    @classmethod
    def of(cls, tokens: Sequence[TokenPoint]) -> _TokenGroup:
        margins = [x for token in tokens if (x := _finite(token.margin)) is not None]
        moved = [abs(x) for token in tokens if (x := _finite(token.delta)) is not None]
        index = sum(token.index for token in tokens) / len(tokens)
        ends = min(margins, default=None), max(margins, default=None)
        return cls(index, *ends, max(moved, default=None))


def _finite(x: float | None) -> float | None:
    return x if x is not None and isfinite(x) else None


@dataclass(frozen=True)
class _MarginData:
    """The tokens and what is read from them. ``moved`` is the largest movement; ``per`` the tokens of one place."""

    tokens: Sequence[TokenPoint]
    places: Sequence[_TokenGroup]
    flip: int | None
    moved: float | None
    per: int
    low: float
    high: float

    @classmethod
    def of(cls, request: RequestSeries, columns: int) -> _MarginData:
        tokens = request.tokens_a
        per = -(-len(tokens) // (2 * columns)) if tokens else 1
        places = [_TokenGroup.of(tokens[first : first + per]) for first in range(0, len(tokens), per)]
        moved = max((place.moved for place in places if place.moved is not None), default=None)
        shown = [x for place in places for x in (place.low, place.high, place.moved) if x is not None]
        low, high = log_range(shown)
        # Logits have steps of about 1e-6 of their size: what is far below is nothing.
        return cls(tokens, places, request.flip_index, moved, per, max(low, high * 1e-9), high)

    def fragile(self, token: TokenPoint) -> bool:
        """What was measured could have turned it; a movement of nothing turns no tie."""
        margin = _finite(token.margin)
        return self.moved is not None and self.moved > 0 and margin is not None and margin <= self.moved


@dataclass(frozen=True)
class _TokenScale:
    """From a token's index to its pixel."""

    left: float
    right: float
    width: float
    tokens: int

    @classmethod
    def of(cls, data: _MarginData, columns: int) -> _TokenScale:
        # Where run a stopped earlier, the flip is the token that it does not have.
        tokens = max(len(data.tokens), 0 if data.flip is None else data.flip + 1)
        left, area = 58.0, AREA * columns
        right = left + min(area, max(200.0, 30.0 * tokens))
        return cls(left, right, max(right, left + min(area, 500)) + 14, tokens)

    def x(self, index: float) -> float:
        return self.left + (self.right - self.left) * (index + 0.5) / max(1, self.tokens)

    def places(self, data: _MarginData, scale: Log) -> CursorPlaces:
        """One for each token, or for those that share a place."""
        step = (self.right - self.left) / max(1, self.tokens) * data.per
        return CursorPlaces(self.left, step, [(scale.end - 6, scale.floor + 4 - scale.end + 6)])


def _ground(canvas: Canvas, plan: _TokenScale, data: _MarginData, scale: Log) -> None:
    """Axes, and the line of the largest movement."""
    canvas.levels(scale, (plan.left, plan.right), scale.ticks(8))
    canvas.line(plan.left, scale.floor, plan.right, scale.floor, "dd-axis")
    canvas.text(plan.left - 6, scale.floor + 4, "0", "dd-t2", "end")
    tokens = LinearScale(0, max(0, plan.tokens - 1), plan.x(0), plan.x(max(0, plan.tokens - 1)))
    canvas.axis(tokens, (plan.left, plan.right), scale.floor, 60, "generated token")
    if data.moved:
        canvas.line(plan.left, scale(data.moved), plan.right, scale(data.moved), "dd-level")


def _marks(canvas: Canvas, plan: _TokenScale, data: _MarginData, scale: Log) -> None:
    reach, points, moves, near = "", "", "", ""
    for place in data.places:
        x = plan.x(place.index)
        if place.low is not None and place.high is not None:
            low, high = scale(place.low), scale(place.high)
            reach += f"M{coordinate(x - 2)} {coordinate(high)}h4" if data.per > 1 and low - high > 3 else ""
            points += f"M{coordinate(x)} {coordinate(low)}h.01"
        if place.moved is not None:
            moves += cross(x, scale(place.moved), 2.5 if data.per > 1 else 3.5)
    for token in data.tokens:
        if token.margin is not None and data.fragile(token):
            x, y = plan.x(token.index), scale(token.margin)
            near += f"M{coordinate(x - 5)} {coordinate(y - 5)}h10v10h-10z"
    canvas.path(reach, "dd-reach")
    canvas.path(moves, "dd-delta")
    # Below its point, so that the margin is read at its middle.
    canvas.path(near, "dd-near")
    canvas.path(points, "dd-margin dd-small" if data.per > 1 else "dd-margin")


def _legend(data: _MarginData) -> list[tuple[Sequence[Symbol], str]]:
    def point(canvas: Canvas, x: float, y: float) -> None:
        canvas.path(f"M{coordinate(x)} {coordinate(y)}h.01", "dd-margin")

    def near(canvas: Canvas, x: float, y: float) -> None:
        canvas.rect(x - 5, y - 5, 10, 10, "dd-near")
        point(canvas, x, y)

    least = "the smallest margin of a place, in run a" if data.per > 1 else "margin in run a"
    items: list[tuple[Sequence[Symbol], str]] = [((point,), least)]
    if data.per > 1:
        items.append(
            ((mark(lambda x, y: f"M{coordinate(x - 2)} {coordinate(y)}h4", "dd-reach"),), "the largest one")
        )
    if data.moved is not None:
        moved = mark(lambda x, y: cross(x, y, 3.5), "dd-delta")
        items.append(((moved,), "by how much the other run moved it"))
    if data.moved:
        items.append(((stroke("dd-level"),), f"the largest such movement, {data.moved:.3g}"))
    if any(data.fragile(token) for token in data.tokens):
        items.append(((near,), "a margin that such a movement can turn"))
    if data.per > 1:
        items.append(((), f"{data.per:,} tokens share a place."))
    return items


def _said(request: RequestSeries, data: _MarginData) -> str:
    """The picture in words."""
    known = [(x, token.index) for token in data.tokens if (x := _finite(token.margin)) is not None]
    parts = [f"{count(len(data.tokens), 'generated token')} of run a"]
    if known:
        parts.append(f"the smallest margin is {min(known)[0]:.6g}, at token {min(known)[1]:,}")
    if data.moved is not None:
        parts.append(f"the other run moved a margin by at most {data.moved:.6g}")
    fragile = [token.index for token in data.tokens if data.fragile(token)]
    if data.moved:
        parts.append(
            f"{count(len(fragile), 'token')} with a smaller margin: {spans([(n, n) for n in fragile])}"
        )
    if request.flip_index is None:
        parts.append("no token flips")
    else:
        parts.append(f"the flip is token {request.flip_index:,}")
    return "; ".join(parts) + "."


def margins_drawing(request: RequestSeries) -> Drawing:
    """The picture with what is told of each token; of tokens that share a place it is the one of the smallest margin."""
    data = _MarginData.of(request, COLUMNS)
    b = {token.index: token for token in request.tokens_b}
    groups = [data.tokens[n : n + data.per] for n in range(0, len(data.tokens), data.per)]
    told = [min(group, key=lambda token: inf if token.margin is None else token.margin) for group in groups]
    places = [
        next((t for t in group if t.index == data.flip), least)
        for group, least in zip(groups, told, strict=True)
    ]
    titles = [
        f"Token {token.index} of {len(data.tokens)}"
        + (f", the nearest to another choice of {len(group)} here" if len(group) > 1 else "")
        for token, group in zip(places, groups, strict=True)
    ]
    about: list[tuple[str, list[str | None]]] = [
        ("here", ["the flip" if token.index == data.flip else None for token in places]),
        ("text", [_both_texts(token, b.get(token.index)) for token in places]),
        ("chosen at", [f"position {token.position}" for token in places]),
        ("margin in a", [_known(token.margin) for token in places]),
        ("moved in b by", [_known(token.delta, "+") for token in places]),
        (
            "note",
            ["a movement as was measured can turn it" if data.fragile(token) else None for token in places],
        ),
    ]
    flip = [(0, n) for n, token in enumerate(places) if token.index == data.flip]
    known = [(token.margin, n) for n, token in enumerate(places) if token.margin is not None]
    jumps = [CursorJump("f", "Flip", flip)] if flip else []
    if known:
        order = [(0, n) for _, n in sorted(known)]
        jumps += [
            CursorJump("s", "Smallest margin", order[:1]),
            CursorJump("n", "Next larger margin", order, in_order=True),
        ]
    start = flip[0] if flip else (0, 0)
    return Drawing(margins_svg(request), [""], Axis(titles, about), (), jumps, (), start)


def _both_texts(token: TokenPoint, other: TokenPoint | None) -> str:
    if other is None or other.token == token.token:
        return shown(token.text)
    return f"{shown(token.text)} in a, {shown(other.text)} in b"


def _known(x: float | None, sign: str = "") -> str:
    return "not known" if x is None else f"{x:{sign}.6f}"


class MarginsView:
    """Each token's margin beside what moved it."""

    name = "margins"
    title = "Margins"
    sentence = "Each token's margin beside what moved it."
    section = "margins", "Margins"
    of_request = True

    def shows(self, subject: ViewSubject) -> bool:
        return subject.request is not None and any(t.margin is not None for t in subject.request.tokens_a)

    def picture(self, subject: ViewSubject, *, columns: int, standalone: bool) -> str:
        return margins_svg(subject.one, columns=columns, standalone=standalone)

    def drawings(self, subject: ViewSubject) -> Sequence[tuple[str, Callable[[], Drawing]]]:
        return [("all tokens", partial(margins_drawing, subject.one))]

    def table(self, subject: ViewSubject, most: int) -> Table:
        """The smallest margins first, those up to the flip before those after it."""
        flip = subject.one.flip_index
        tokens = [token for token in subject.one.tokens_a if token.margin is not None]
        nearest = sorted(tokens, key=lambda t: (flip is not None and t.index > flip, t.margin, t.index))[
            :most
        ]
        caption = f"{count(len(tokens), 'token')} of run a, the smallest margins first"
        if len(tokens) > most:
            caption += f": {most} of them"
        rows = tuple(
            (
                f"{token.index}",
                shown(token.text),
                number(token.margin),
                "-" if token.delta is None else f"{token.delta:+.6f}",
                "the flip" if token.index == flip else "",
            )
            for token in nearest
        )
        return Table(("token", "text", "margin in a", "moved in b by", ""), rows, 2, caption)

    def words(self, subject: ViewSubject, columns: int) -> Iterator[Block]:
        table = self.table(subject, _NEAREST)
        if table.rows and subject.request is not None:
            yield Item("  nearest to another choice: ", f"{named(subject.request.id)}, {table.caption}")
            yield replace(table, caption="")
