"""The values of each view as a table: what is drawn, readable without a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from .blocks import Table, View
from .words import count, named, number, short_path, shown

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import RequestSeries, Series
    from detdiff.compare.timeline import ForwardPoint

_MOST = 120
_ORIGIN = 3


def values(series: Series, view: View, most: int = _MOST) -> Table | None:
    """The table of a view, of at most ``most`` lines, or None where the series has no such request."""
    most = min(most, _MOST)
    if view.name == "timeline":
        return _timeline(series, most)
    request = next((each for each in series.requests if each.id == view.request), None)
    if request is None:
        return None
    return {"map": _map, "margins": _margins, "lens": _lens}[view.name](request, most)


def _map(request: RequestSeries, most: int) -> Table:
    headers = ("layer", "positions", "propagated", "origins", "first", "last", "max ULP", "max relative")
    grid = request.layers
    rows = list(range(len(grid.rows)))
    caption = "Positions that differ in each layer"
    if len(rows) > most:
        caption += f"; {most} of {len(rows):,} layers, those with origins first"
        born = (grid.state == _ORIGIN).sum(axis=1)
        rows = sorted(sorted(rows, key=lambda n: (-born[n], n))[:most])
    return Table(headers, tuple(_layer(grid, n) for n in rows), caption=caption)


def _layer(grid: Grid, n: int) -> tuple[str, ...]:
    state = grid.state[n]
    differing = np.flatnonzero(state >= 2)
    ends = (str(differing[0]), str(differing[-1])) if differing.size else ("-", "-")
    return (
        named(grid.rows[n]),
        f"{np.count_nonzero(state):,}",
        f"{np.count_nonzero(state == 2):,}",
        f"{np.count_nonzero(state == _ORIGIN):,}",
        *ends,
        _largest(grid.ulp, n),
        _largest(grid.rel, n),
    )


def _largest(sizes: Any, n: int) -> str:
    if sizes is None or not np.isfinite(sizes[n]).any():
        return "-"
    return f"{np.nanmax(np.where(np.isfinite(sizes[n]), sizes[n], np.nan)):,.4g}"


def _timeline(series: Series, most: int) -> Table:
    headers = ("run", "forwards", "model", "rows", "who", "linear path", "writes", "events")
    rows = [row for run, points in (("a", series.a), ("b", series.b)) for row in _stretches(run, points)]
    caption = "Forwards, those alike in one line"
    if len(rows) > most:
        caption += f"; the first {most} of {len(rows):,} lines"
    return Table(headers, tuple(rows[:most]), caption=caption)


def _stretches(run: str, points: Sequence[ForwardPoint]) -> Iterator[tuple[str, ...]]:
    for (model, rows, who, path, _), group in groupby(points, key=_alike):
        alike = list(group)
        first, last = alike[0].forward, alike[-1].forward
        events = "; ".join(named(event) for event in alike[0].events[:3]) or "-"
        more = len(alike[0].events) - 3
        yield (
            run,
            str(first) if first == last else f"{first}–{last}",
            model,
            f"{rows:,}",
            who,
            short_path(path),
            f"{sum(point.writes for point in alike):,}",
            events if more <= 0 else f"{events}; and {more} more",
        )


def _alike(point: ForwardPoint) -> tuple[str, int, str, str | None, tuple[str, ...]]:
    who = " + ".join(f"{m.rows:,} {m.phase} of {named(m.request)}" for m in point.members[:6])
    if len(point.members) > 6:
        who += f" + {len(point.members) - 6} more"
    return point.model, point.rows, who, point.linear_path, point.events


def _margins(request: RequestSeries, most: int) -> Table:
    tokens = [token for token in request.tokens_a if token.margin is not None]
    smallest = sorted(tokens, key=lambda token: (token.margin or 0, token.index))[:most]
    caption = f"{count(len(tokens), 'token')}, the smallest margins first"
    if len(tokens) > most:
        caption += f": {most} of them"
    rows = tuple(
        (
            str(token.index),
            shown(token.text),
            number(token.margin),
            "-" if token.delta is None else f"{token.delta:+.6f}",
        )
        for token in smallest
    )
    return Table(("token", "text", "margin in a", "moved in b by"), rows, caption=caption)


def _lens(request: RequestSeries, most: int) -> Table:
    # The last layers are where it is decided.
    rows = tuple((str(point.layer), _signed(point.a), _signed(point.b)) for point in request.lens[-most:])
    caption = "Logit of a's token minus logit of b's, at the flip"
    if len(request.lens) > most:
        caption += f"; the last {most} of {len(request.lens):,} layers"
    return Table(("after layer", "in a", "in b"), rows, caption=caption)


def _signed(x: float | None) -> str:
    return "-" if x is None else f"{x:+.6f}"
