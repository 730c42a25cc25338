"""The pictures of a report: one file for a view; as SVG in a page and as files, as tables, and in words and characters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import numpy as np

from ..document import Block, Prose, Report, Table, View, ViewKind, ViewSubject
from .lens import LensView
from .map import MapView
from .map_cells import EQUAL, ORIGIN
from .map_picture import COLUMNS, frame_of, grid_svg
from .margins import MarginsView
from .timeline import TimelineView

if TYPE_CHECKING:
    from detdiff.compare.divergence import Divergence
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import RequestSeries, Series

VIEWS: Final[Mapping[str, ViewKind]] = {
    kind.name: kind for kind in (MapView(), TimelineView(), MarginsView(), LensView())
}
"""Every sort of picture by its name, in the order in which sections that hold nothing else are read."""
_MOST: Final = 120


def subject_of(view: View, report: Report) -> ViewSubject | None:
    """What a view is of, or None where the report has no series or not that request."""
    series = report.series
    found = (
        None if series is None else next((each for each in series.requests if each.id == view.request), None)
    )
    if series is None or (found is None and view.request is not None):
        return None
    return ViewSubject(series, found, report.divergence)


def plot(series: Series, view: View, *, columns: int = COLUMNS, standalone: bool = False) -> str:
    """One ``<svg>`` of a view. About 900 pixels wide with 240 ``columns``, about 330 with 72.

    ``standalone`` is a document of its own: with light colours, a white ground and a heading, for any program that
    shows SVG. Raises KeyError for a request that the series does not have.
    """
    found = next((each for each in series.requests if each.id == view.request), None)
    if found is None and view.request is not None:
        raise KeyError(view.request)
    subject = ViewSubject(series, found, None)
    return VIEWS[view.name].picture(subject, columns=columns, standalone=standalone)


def plots(report: Report) -> dict[str, str]:
    """File names, such as ``map-anchor.svg``, and documents: every view of a report, and a zoom into the first origin.

    The zoom is ``sites-*`` of the layer of the first origin, and ``entries-*`` of the first layer from there on whose
    cache entries differ. Empty where a report has no series.
    """
    series = report.series
    if series is None:
        return {}
    slugs = _slugs([request.id for request in series.requests])
    files = {}
    for section in report.sections:
        for block in section.blocks:
            if isinstance(block, View):
                of = "" if block.request is None else f"-{slugs[block.request]}"
                files[f"{block.name}{of}.svg"] = plot(series, block, standalone=True)
    for request, kind, grid in _zooms(series, report.divergence):
        file = f"{kind}-{slugs[request.id]}-{re.sub('[^a-z0-9]+', '-', grid.name[:60].lower())}.svg"
        files[file] = grid_svg(grid, frame_of(request), standalone=True)
    return files


def _zooms(series: Series, divergence: Divergence | None) -> Iterator[tuple[RequestSeries, str, Grid]]:
    """The sites of the layer in which the first origin lies, and the first cache entries from there on that differ."""
    first = None if divergence is None else divergence.first
    request = next((each for each in series.requests if each.id == first), None)
    if request is None or divergence is None:
        return
    origin = divergence.request(request.id).origin
    with_origin = [grid for grid in request.sites if (grid.state == ORIGIN).any()]
    if origin is not None:
        with_origin.sort(key=lambda grid: not _has(grid, origin.site, origin.position))
    for layer in with_origin[:1]:
        yield request, "sites", layer
        # What arises behind a layer's cache writes is carried by those of the next layer.
        later = [grid.name for grid in request.sites[request.sites.index(layer) :]]
        carried = [grid for grid in request.entries if grid.name in later and (grid.state > EQUAL).any()]
        for grid in carried[:1]:
            yield request, "entries", grid


def _has(grid: Grid, site: str, position: int) -> bool:
    """Whether that site was an origin at that position, by this grid: a draft has sites of the same names."""
    if position >= grid.state.shape[1]:
        return False
    rows = [n for n, row in enumerate(grid.rows) if row == site]
    return bool((np.asarray(grid.state)[rows, position] == ORIGIN).any())


def _slugs(ids: list[str]) -> dict[str, str]:
    """A part of a file name for each id: letters, digits, ``_`` and ``-``, and no two alike on any file system."""
    slugs: dict[str, str] = {}
    taken: set[str] = set()
    for id in ids:
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", id[:200]).strip("-")[:40]
        if slug != id or slug.casefold() in taken:
            slug = f"{slug or 'request'}-{sha256(id.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
        slugs[id] = slug
        taken.add(slug.casefold())
    return slugs


def values(view: View, subject: ViewSubject, most: int = _MOST) -> Table:
    """The table of a view, of at most ``most`` lines."""
    return replace(VIEWS[view.name].table(subject, min(most, _MOST)), level=0)


def view_blocks(view: View, report: Report, columns: int) -> tuple[Block, ...]:
    """The blocks that stand for a view; a map is at most ``columns`` characters wide."""
    subject = subject_of(view, report)
    return (Prose(view.sentence),) if subject is None else tuple(VIEWS[view.name].words(subject, columns))
