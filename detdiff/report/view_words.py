"""What a view shows, in words, tables and characters, for formats that draw nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .blocks import Block, Code, Item, Prose, Table, View
from .forward_words import timeline_blocks
from .map_text import map_text
from .words import named, number, shown

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.points import LensPoint, TokenPoint
    from detdiff.compare.series import RequestSeries

    from .content import Report

_NEAREST = 8
_LAYERS = 12
_AROUND = 2


def view_blocks(view: View, report: Report, columns: int) -> tuple[Block, ...]:
    """The blocks that stand for a view; a map is at most ``columns`` characters wide."""
    if report.series is None:
        return (Prose(view.said),)
    if view.name == "timeline":
        return tuple(timeline_blocks(report))
    request = next((each for each in report.series.requests if each.id == view.request), None)
    if request is None:
        return (Prose(view.said),)
    match view.name:
        case "map":
            return tuple(_map(request, _birthplace(report, request), columns))
        case "margins":
            return tuple(_margins(request))
        case "lens":
            return tuple(_lens(request))


def _birthplace(report: Report, request: RequestSeries) -> int | None:
    """The row of the layers in which the request's first origin lies."""
    found = () if report.divergence is None else report.divergence.requests
    origin = next((each.origin for each in found if each.id == request.id), None)
    if origin is None:
        return None
    return next((n for n, sites in enumerate(request.sites) if origin.site in sites.rows), None)


def _map(request: RequestSeries, birthplace: int | None, columns: int) -> Iterator[Block]:
    yield from _grid("layers", request.layers, request, f"{request.positions:,} positions", columns)
    if birthplace is not None:
        zoom = request.sites[birthplace]
        yield from _grid("sites", zoom, request, f"{named(zoom.name)}, where the first was born", columns)


def _grid(of: str, grid: Grid, request: RequestSeries, said: str, columns: int) -> Iterator[Block]:
    made = map_text(grid, request, columns)
    if made is not None:
        yield Item(f"  map of {of}: ", f"{named(request.id)}, {said}")
        yield Code("\n".join(made.lines), "text")
        yield Item("    key: ", made.key)


def _margins(request: RequestSeries) -> Iterator[Block]:
    known = [token for token in request.tokens_a if token.margin is not None]
    if request.flip_index is not None:
        known = [token for token in known if token.index <= request.flip_index]
    nearest = sorted(known, key=lambda token: (token.margin, token.index))[:_NEAREST]
    if nearest:
        yield Item("  nearest tokens: ", f"{named(request.id)}, run a, the smallest margins first")
        yield Table(
            ("token", "text", "margin", "moved by", ""),
            tuple(_margin(token, request.flip_index) for token in nearest),
            2,
        )


def _margin(token: TokenPoint, flip: int | None) -> tuple[str, ...]:
    moved = "-" if token.delta is None else f"{token.delta:+.6f}"
    return (
        f"{token.index}",
        shown(token.text),
        number(token.margin),
        moved,
        "the flip" if token.index == flip else "",
    )


def _lens(request: RequestSeries) -> Iterator[Block]:
    points = request.lens
    if not points:
        return
    turns = {"a": _turn([point.a for point in points]), "b": _turn([point.b for point in points])}
    yield Item(
        "  the two tokens by layer: ",
        f"{named(request.id)}, logit of a's token minus logit of b's at the flip, in both runs",
    )
    rows = [_point(point, n, turns) for n, point in enumerate(points)]
    kept = _kept(len(points), turns.values())
    yield Table(("layer", "in a", "in b", ""), tuple(rows[n] for n in kept), 2)
    if len(kept) < len(points):
        yield Item("    ", f"and {len(points) - len(kept)} more layers")


def _point(point: LensPoint, n: int, turns: dict[str, int | None]) -> tuple[str, ...]:
    turned = [run for run, at in turns.items() if at == n]
    return (
        f"{point.layer}",
        *("-" if x is None else f"{x:+.6f}" for x in (point.a, point.b)),
        f"the preference turns in {' and '.join(turned)}" if turned else "",
    )


def _turn(values: Sequence[float | None]) -> int | None:
    """Where the last value's preference began, if there was another one before. A tie is no preference."""
    known = [(n, x > 0) for n, x in enumerate(values) if x]
    for (_, before), (n, after) in zip(reversed(known[:-1]), reversed(known[1:]), strict=True):
        if before != after:
            return n
    return None


def _kept(layers: int, turns: Iterable[int | None]) -> list[int]:
    """All of few layers; of many the first, the last and those around a turn."""
    if layers <= _LAYERS:
        return list(range(layers))
    near = {n for turn in turns if turn is not None for n in range(turn - _AROUND, turn + _AROUND + 1)}
    return sorted(n for n in near | {0, layers - 1} if 0 <= n < layers)
