"""What a page's script is told: every drawing with its values where there is room, and a word about what there was none for."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from page_tree import Node, of, tree
from series_samples import hostile, large, small
from svg_reader import check

from detdiff.report.document import Item, Report, View
from detdiff.report.html import LARGEST, html


def data_of(page: Node) -> Any:
    return json.loads(page.one("script", type="application/json").text)


def unpacked(packed: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def drawing(series: Any) -> Report:
    views = (View("map", "said", series.requests[0].id), View("timeline", "said"))
    return of(*views, series=series)


def test_the_scripts_data_are_the_series() -> None:
    series = small()
    request = series.requests[0]
    data = data_of(tree(html(drawing(series))))
    assert set(data) == {"map-0", "timeline-0"}
    grids = {"all layers": request.layers}
    grids |= {f"sites of {grid.name}": grid for grid in request.sites}
    grids |= {f"cache entries of {grid.name}": grid for grid in request.entries}
    drawings = data["map-0"]["drawings"]
    assert {each["name"] for each in drawings} == set(grids)
    for each in drawings:
        found, grid = unpacked(each["packed"]), grids[each["name"]]
        assert found["rows"] == list(grid.rows)
        cells = {name: (words, values) for name, words, values in found["cells"]}
        assert cells["state"][1] == grid.state.ravel().tolist()
        if grid.ulp is not None and (grid.state > 1).any():
            sizes = [
                float(x) for x, state in zip(grid.ulp.ravel(), grid.state.ravel(), strict=True) if state > 1
            ]
            told = [x for x in cells["max ULP"][1] if x is not None]
            assert told == pytest.approx(sizes, rel=6e-3)
        # The first is the picture of the page; the others are pictures like it.
        assert (found["svg"] is None) == (each["name"] == "all layers")
        if found["svg"]:
            check(found["svg"])
    (lanes,) = data["timeline-0"]["drawings"]
    cells = {name: (words, values) for name, words, values in unpacked(lanes["packed"])["cells"]}
    words, values = cells["rows M"]
    assert [words[n] for n in values if n is not None] == [
        str(point.rows) for point in (*series.a, *series.b)
    ]


def test_hostile_series_stay_small_and_text() -> None:
    series = hostile()
    views = [View(name, "said", request.id) for request in series.requests for name in ("map", "margins")]
    text = html(of(*views, View("timeline", "said"), series=series))
    assert len(text.encode()) < LARGEST
    page = tree(text)
    assert len(page.all("script")) == 2 and len(page.all("svg")) == 5
    assert "alert(1)</script>" not in text


@pytest.mark.thorough
def test_pictures_that_have_no_room_leave_their_tables() -> None:
    series = large(3000, 32)
    views = (View("map", "said", "anchor"), View("timeline", "said")) * 40
    text = html(of(*views[:1], *[replace(view, request="anchor") for view in views[::2]], series=series))
    page = tree(text)
    assert len(text.encode()) <= LARGEST
    assert 0 < len(page.all("svg")) < len(page.all("figure"))
    assert all(figure.all("table") for figure in page.all("figure"))
    assert "no room for this picture" in text


def many(count: int) -> Any:
    series = large(300, 24)
    requests = tuple(replace(series.requests[0], id=f"r{n}") for n in range(count))
    return replace(series, requests=requests)


@pytest.mark.thorough
def test_a_page_of_many_requests_is_small_and_says_what_it_left_out() -> None:
    series = many(90)
    names: tuple[Any, ...] = ("map", "margins", "lens")
    items = [Item("  origin: ", "x" * 300) for _ in range(400)]
    views = [View(name, "said", request.id) for request in series.requests for name in names]
    text = html(of(*items, *views, series=series))
    assert len(text.encode()) <= LARGEST
    page = tree(text)
    assert "no room for the rest of this section" in page.one("section").text
    figures = page.all("figure")
    assert 0 < len(figures) < len(views) and all(figure.all("table") for figure in figures)
    data = data_of(page)
    # What is needed most of every view comes before what is needed less of any.
    depths = {len(each["drawings"]) for id, each in data.items() if id.startswith("map")}
    assert len(data) == len(page.all("svg")) and max(depths) - min(depths) <= 1
    assert "to keep this page small" in page.one("main").text
