"""Small multiples: the first origins of each comparison of a sweep, all on the same scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .svg import Canvas, LinearScale, coordinate
from .words import count, escaped, layer

if TYPE_CHECKING:
    from markupsafe import Markup

    from .index import IndexEntry, OriginPlace

_WIDTH, _HEIGHT, _LEFT, _FLOOR = 176, 96, 26, 78
MOST = 240
"""Pictures of a page at most: the table has all comparisons."""


def origin_pictures(entries: Sequence[IndexEntry]) -> list[tuple[IndexEntry, Markup]]:
    """Each comparison that has an origin, and its picture."""
    from markupsafe import Markup

    shown = [each for each in entries if each.places][:MOST]
    places = [place for each in shown for place in each.places]
    last = max((place.layer for place in places if place.layer is not None), default=0)
    far = max((max(place.position, place.flip or 0) for place in places), default=0)
    across = LinearScale(0, max(1, far), _LEFT + 6, _WIDTH - 8)
    up = LinearScale(-1, last + 1, _FLOOR - 6, 8)
    return [(each, Markup(_picture(each, across, up, last))) for each in shown]


def _picture(entry: IndexEntry, across: LinearScale, up: LinearScale, last: int) -> str:
    canvas = Canvas()
    canvas.line(_LEFT, _FLOOR, _WIDTH - 4, _FLOOR, "dd-axis")
    canvas.line(_LEFT, 4, _LEFT, _FLOOR, "dd-axis")
    for number in sorted({0, last}):
        canvas.text(_LEFT - 4, up(number) + 4, str(number), "dd-t2", "end")
    for position in (0, int(across.high)):
        canvas.text(
            across(position), _FLOOR + 14, f"{position:,}", "dd-t2", "middle" if not position else "end"
        )
    for place in entry.places:
        if place.flip is not None:
            canvas.line(across(place.flip), 4, across(place.flip), _FLOOR, "dd-flip")
    for place in entry.places:
        x, y = across(place.position), up(_row(place, last))
        canvas.path(
            f"M{coordinate(x - 4)} {coordinate(y)}a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "dd-origin dd-under"
        )
    first = entry.places[0]
    said = (
        f"{count(len(entry.places), 'first origin')}, that of {escaped(first.request)} at {escaped(first.site)} ({layer(first.layer)}), "
        f"position {first.position}"
    )
    return canvas.svg("dd-multiple", escaped(entry.name), said, (_WIDTH, _HEIGHT), False)


def _row(place: OriginPlace, last: int) -> int:
    """Sites before the layers lie below them, those behind above."""
    if place.layer is not None:
        return place.layer
    return -1 if "embed" in place.site else last + 1
