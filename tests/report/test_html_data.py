"""What a page's script draws: the series, exactly where there is room, and a word about what there was none for."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from page_tree import Node, of, tree
from series_samples import hostile, large, small

from detdiff.report.document import Item, Report, View
from detdiff.report.html import LARGEST, html
from detdiff.report.html_data import payload


def data_of(page: Node) -> Any:
    return json.loads(page.one("script", type="application/json").text)


def unpacked(packed: str) -> bytes:
    return zlib.decompress(base64.b64decode(packed))


def drawing(series: Any) -> Report:
    views = (View("map", "said", series.requests[0].id), View("timeline", "said"))
    return of(*views, series=series)


def test_the_scripts_data_are_the_series() -> None:
    series = small()
    data = data_of(tree(html(drawing(series))))
    for found, request in zip(data["requests"], series.requests, strict=True):
        grids = [*found["layers"], *found["sites"], *found["entries"]]
        for packed, grid in zip(grids, (request.layers, *request.sites, *request.entries), strict=True):
            assert (packed["name"], data["rows"][packed["rows"]]) == (grid.name, list(grid.rows))
            assert unpacked(packed["state"]) == grid.state.tobytes()
            assert unpacked(packed["share"]) == grid.share.tobytes()
            assert ("ulp" in packed) == (grid.ulp is not None and bool(np.isfinite(grid.ulp).any()))
            if "ulp" in packed:
                assert grid.ulp is not None and grid.rel is not None
                assert unpacked(packed["ulp"]) == grid.ulp.tobytes()
                rel = np.frombuffer(unpacked(packed["rel"]), "<f4").reshape(grid.rel.shape)
                np.testing.assert_allclose(rel, grid.rel, rtol=1e-3)
    lists = json.loads(unpacked(data["lists"]))
    assert lists["runs"]["b"]["rows"] == [point.rows for point in series.b]
    assert lists["requests"][0]["tokens"]["margin"] == [token.margin for token in series.requests[0].tokens_a]


@pytest.mark.parametrize("room", [0, 3_000, 20_000, 60_000, 400_000])
def test_the_data_keep_to_their_room_and_say_what_is_missing(room: int) -> None:
    series = large(600, 8)
    made = payload(series, None, room)
    kinds = {"which cells differ", "the share of differing digests"}
    missing = [said for said in made.left_out if any(kind in said for kind in kinds)]
    assert len(made.text) <= room or any("which cells differ" in said for said in missing)
    whole = payload(series, None, 10_000_000)
    assert whole.left_out == () and (made.text == whole.text) == (room >= len(whole.text))


def test_groups_of_positions_show_the_strongest_of_each() -> None:
    series = large(600, 8)
    draw = np.random.default_rng(1)
    request = series.requests[0]
    sites = tuple(
        replace(grid, state=draw.integers(4, size=grid.state.shape, dtype=np.uint8)) for grid in request.sites
    )
    series = replace(series, requests=(replace(request, sites=sites),))
    made = payload(series, None, 22_000)
    assert len(made.text) <= 22_000
    (said,) = [said for said in made.left_out if "in groups of" in said]
    data = json.loads(made.text)
    packed = data["requests"][0]["sites"][3]
    assert f"groups of {packed['step']} positions" in said and packed["step"] > 1
    state = np.frombuffer(unpacked(packed["state"]), np.uint8).reshape(len(data["rows"][packed["rows"]]), -1)
    for column in range(state.shape[1]):
        whole = sites[3].state[:, column * packed["step"] : (column + 1) * packed["step"]]
        assert (state[:, column] == whole.max(axis=1)).all()


def test_hostile_series_stay_small_and_text() -> None:
    series = hostile()
    views = [View(name, "said", request.id) for request in series.requests for name in ("map", "margins")]  # type: ignore[arg-type]
    text = html(of(*views, View("timeline", "said"), series=series))
    assert len(text.encode()) < LARGEST
    page = tree(text)
    assert len(page.all("script")) == 2 and len(page.all("svg")) == 5
    assert "alert(1)</script>" not in text


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


@pytest.mark.parametrize("room", [60_000, 150_000, 2_000_000])
def test_of_many_requests_the_first_ones_are_kept(room: int) -> None:
    made = payload(many(40), None, room)
    data = json.loads(made.text)
    assert 1 <= len(data["requests"]) <= 40 and len(made.text) <= room
    lists = json.loads(unpacked(data["lists"]))
    assert [each["id"] for each in lists["requests"]] == [f"r{n}" for n in range(len(data["requests"]))]
    missing = any("of 40 can be zoomed into" in said for said in made.left_out)
    assert missing == (len(data["requests"]) < 40) == (room < 2_000_000)


def test_a_page_of_many_requests_is_small_and_says_what_it_left_out() -> None:
    series = many(90)
    names: tuple[Any, ...] = ("map", "margins", "lens")
    items = [Item("  birth: ", "x" * 300) for _ in range(400)]
    views = [View(name, "said", request.id) for request in series.requests for name in names]
    text = html(of(*items, *views, series=series))
    assert len(text.encode()) <= LARGEST
    page = tree(text)
    assert "no room for the rest of this section" in page.one("section").text
    assert 0 < len(page.all("figure")) < len(views) and all(
        figure.all("table") for figure in page.all("figure")
    )
