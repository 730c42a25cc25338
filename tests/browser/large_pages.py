"""Pages of 5,000 tokens and 32 layers: as they usually are, and with cells in which nothing can be compressed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from drawn_pages import drawing
from series_samples import large

from detdiff.compare.grids import Grid
from detdiff.compare.series import Series
from detdiff.report.html import html


def noise(grid: Grid, rows: int, draw: np.random.Generator) -> Grid:
    """A grid of ``rows`` rows in which nothing can be compressed."""
    shape = rows, grid.state.shape[1]
    names = tuple(f"{grid.name} {n}" for n in range(rows))
    return Grid(
        grid.name,
        names,
        draw.integers(4, size=shape, dtype=np.uint8),
        draw.integers(256, size=shape, dtype=np.uint8),
        draw.random(shape, np.float32) * 1e6,
        draw.random(shape, np.float32),
    )


def noisy(series: Series, entries: int) -> Series:
    """The same with random cells, with sizes for each, 13 sites and ``entries`` cache entries a layer."""
    draw = np.random.default_rng(1)
    request = series.requests[0]
    layers = replace(noise(request.layers, len(request.layers.rows), draw), rows=request.layers.rows)
    sites = tuple(noise(grid, 13, draw) for grid in request.sites)
    found = tuple(noise(grid, entries, draw) for grid in request.entries)
    request = replace(request, layers=layers, sites=sites, entries=found)
    return replace(series, requests=(request, *series.requests[1:]))


def large_pages() -> dict[str, str]:
    """Their HTML by name."""
    series = large()
    made = {"usual": series, "noise": noisy(series, 4), "many heads": noisy(series, 16)}
    return {name: html(drawing(each)) for name, each in made.items()}
