"""The map, the timeline and the margins as they are used: by keyboard, with the right values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn_pages import drawing, page, report
from series_samples import ENTRIES, MM, MV, SITES, small

from detdiff.report.html import html
from detdiff.report.views.map import ULP_STEPS

STATES = ("not compared", "bit-equal", "propagated: its inputs differed already", "origin: born here")


@pytest.fixture(scope="module")
def views() -> str:
    return html(drawing(small()))


def ulp(x: float) -> str:
    return f"{int(x):,}"


def test_the_map_says_what_the_series_holds_in_every_layer(show: Any, views: str) -> None:
    grid = small().requests[0].layers
    assert grid.ulp is not None and grid.rel is not None
    opened = show(views)
    opened.focus("map-0")
    opened.press("Home", *["ArrowUp"] * 4)
    for row, name in enumerate(grid.rows):
        for position in range(12):
            found = opened.values("map-0")
            assert found[""] == f"{name}, position {position}"
            state = grid.state[row, position]
            assert found["state"] == STATES[state]
            if state >= 2:
                assert found["differ"] == f"{round(grid.share[row, position] / 255 * 100)} % of the digests"
                assert found["max ULP"] == ulp(grid.ulp[row, position])
                assert float(found["max relative"]) == pytest.approx(grid.rel[row, position], rel=6e-3)
            else:
                assert not {"differ", "max ULP", "max relative"} & set(found)
            opened.press("ArrowRight")
        opened.press("Home", "ArrowDown")


def test_the_map_goes_from_a_layer_into_its_sites_and_back(show: Any, views: str) -> None:
    sites = small().requests[0].sites[1]
    opened = show(views)
    opened.focus("map-0")
    opened.press("b", "Enter")
    found = opened.values("map-0")
    assert (found[""], found["in"]) == ("layers.1.attn.q_proj, position 9", "layer 1")
    assert found["state"] == STATES[3]
    opened.press(*["ArrowUp"] * 9)
    for row, site in enumerate(SITES):
        found = opened.values("map-0")
        assert found[""] == f"layers.1.{site}, position 9"
        assert found["state"] == STATES[sites.state[row, 9]]
        opened.press("ArrowDown")
    opened.press("Escape")
    assert opened.values("map-0")[""] == "layer 1, position 9"


def test_the_map_goes_into_the_cache_entries_of_a_layer(show: Any, views: str) -> None:
    entries = small().requests[0].entries[2]
    opened = show(views)
    opened.focus("map-0")
    opened.press("b", "ArrowDown", "c", *["ArrowUp"] * 9)
    for row, entry in enumerate(ENTRIES):
        found = opened.values("map-0")
        assert (found[""], found["in"]) == (f"{entry}, position 9", "layer 2")
        assert found["state"] == STATES[entries.state[row, 9]]
        opened.press("ArrowDown")
    opened.press("Enter")
    assert opened.values("map-0")[""].startswith("layers.2.")


def test_the_list_of_what_to_show_leads_everywhere(show: Any, views: str) -> None:
    opened = show(views)
    what = opened.figure("map-0").get_by_role("combobox", name="Show")
    names = what.locator("option").all_text_contents()
    layers = [f"layer {n}" for n in range(4)]
    assert names == [
        "all layers",
        *(f"{part} of {layer}" for part in ("sites", "cache entries") for layer in layers),
    ]
    what.select_option(label="cache entries of layer 3")
    assert opened.values("map-0")["in"] == "layer 3"
    what.select_option(label="sites of layer 0")
    assert opened.values("map-0")["in"] == "layer 0"
    opened.figure("map-0").get_by_role("button", name="Open cache entries").press("Enter")
    assert opened.values("map-0")[""].startswith("K head")
    back = opened.figure("map-0").get_by_role("button", name="Back to layers")
    back.press("Space")
    assert opened.values("map-0")[""] == "layer 0, position 9"
    assert back.is_disabled()


def test_the_map_tells_which_forward_ran_a_row_and_which_token_it_chose(show: Any, views: str) -> None:
    opened = show(views)
    opened.focus("map-0")
    opened.press("b")
    found = opened.values("map-0")
    assert found["token"] == 'chooses generated token 2 " t32" in a, " t33" in b'
    assert (
        found["in a"]
        == f"forward 2, 1 row (1 decode of anchor); linear calls on {MV.removeprefix('reference/')}"
    )
    assert found["in b"] == (
        "forward 2, 6 rows (1 decode of anchor + 5 prefill of follower); linear calls on "
        f"{MM.removeprefix('reference/')}"
    )
    opened.press("f")
    assert opened.values("map-0")[""].endswith("position 11")
    opened.press("Home")
    assert opened.values("map-0")["token"] == "of the prompt, 1 of 8"


def test_the_map_goes_from_origin_to_origin(show: Any) -> None:
    request = report("reference").series.requests[0]  # type: ignore[union-attr]
    born = sorted((int(p), int(r)) for r, p in np.argwhere(request.layers.state == 3))
    assert len(born) > 2
    opened = show(page("reference"))
    opened.focus("map-0")
    opened.press("Home", *["ArrowUp"] * 30)
    for position, row in born:
        opened.press("n")
        assert opened.values("map-0")[""] == f"{request.layers.rows[row]}, position {position}"
    opened.press("p")
    position, row = born[-2]
    assert opened.values("map-0")[""] == f"{request.layers.rows[row]}, position {position}"


PIXEL = """
(canvas, [x, y]) => {
  const ratio = canvas.width / canvas.clientWidth;
  return [...canvas.getContext("2d").getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data].slice(0, 3);
}
"""
COLOUR = """
(_, name) => {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_map_is_painted_as_its_legend_says_and_can_be_clicked(show: Any, views: str, scheme: str) -> None:
    grid = small().requests[0].layers
    assert grid.ulp is not None
    opened = show(views, color_scheme=scheme)
    canvas = opened.figure("map-0").locator(".stage canvas")
    left, top, cell, row = (float(canvas.get_attribute(f"data-{x}")) for x in ("left", "top", "cell", "row"))
    names = ("equal", "origin", *(f"s{n}" for n in range(8)))
    colours = {name: canvas.evaluate(COLOUR, f"--dd-{name}") for name in names}
    opened.focus("map-0")
    # The ring around the cursor hides what is below it: first from above, then from below.
    for key, rows in (("ArrowUp", (1, 2, 3)), ("ArrowDown", (0, 1, 2))):
        opened.press("Home", *[key] * 4)
        for r in rows:
            for position in range(12):
                state = grid.state[r, position]
                step = sum(grid.ulp[r, position] >= limit for limit in ULP_STEPS)
                place = [left + (position + 0.5) * cell, top + (r + 0.5) * row]
                want = {1: "equal", 2: f"s{step}", 3: "origin"}[int(state)]
                assert canvas.evaluate(PIXEL, place) == colours[want], (r, position)
    for r, position in ((2, 7), (0, 11), (3, 0)):
        canvas.click(position={"x": left + (position + 0.5) * cell, "y": top + (r + 0.5) * row})
        assert opened.values("map-0")[""] == f"layer {r}, position {position}"


def test_positions_are_zoomed_into_and_followed(show: Any) -> None:
    positions = report("reference").series.requests[0].positions  # type: ignore[union-attr]
    opened = show(page("reference"))

    def in_view(*keys: str) -> tuple[int, int]:
        opened.press(*keys)
        first, last = opened.values("map-0")["in view"].removeprefix("positions ").split(" to ")
        return int(first), int(last)

    opened.focus("map-0")
    assert in_view("Home") == (0, positions - 1)
    first, last = in_view("+", "+")
    assert first == 0 and last == pytest.approx(positions / 4, abs=2)
    assert in_view("End") == (positions - 1 - last, positions - 1)
    position = positions - 1 - 10 - (last + 1)
    first, last = in_view("Shift+ArrowLeft", "PageUp")
    assert first <= position <= last < positions - 1
    assert in_view("-", "-", "-") == (0, positions - 1)
    assert in_view("b", *["+"] * 9)[0] > 0
    assert in_view("0") == (0, positions - 1)
    opened.figure("map-0").get_by_role("button", name="Zoom in").click()
    assert in_view()[1] - in_view()[0] < positions // 2 + 1


def test_the_timeline_says_what_every_forward_was(show: Any, views: str) -> None:
    series = small()
    opened = show(views)
    opened.focus("timeline-0")
    for run, points in (("a", series.a), ("b", series.b)):
        opened.press("Home")
        for n, point in enumerate(points):
            found = opened.values("timeline-0")
            assert found[""] == f"Run {run}, forward {n} of {len(points)}"
            assert found["rows M"] == str(point.rows)
            assert found["who"].splitlines() == [
                f"{m.rows} {m.phase} of {m.request}, from position {m.start}" for m in point.members
            ]
            assert found["linear calls"] == str(point.linear_path).removeprefix("reference/")
            assert found.get("events", "").splitlines() == list(point.events)
            assert found["writes"].startswith(f"cache entries of {point.writes} position")
            opened.press("ArrowRight")
        opened.press("ArrowDown")


def test_the_timeline_goes_to_birth_flip_and_events(show: Any, views: str) -> None:
    opened = show(views)
    opened.focus("timeline-0")
    opened.press("f")
    assert opened.values("timeline-0")[""] == "Run a, forward 4 of 8"
    opened.press("ArrowDown", "b")
    found = opened.values("timeline-0")
    assert (found[""], found["here"]) == ("Run b, forward 2 of 6", "the birth")
    opened.press("e")
    assert opened.values("timeline-0")["events"] == "trim of anchor, 3 asked, 3 done"
    opened.press("e")
    assert opened.values("timeline-0")["events"] == "wrap of anchor"
    opened.figure("timeline-0").get_by_role("button", name="Run a").press("Enter")
    assert opened.values("timeline-0")[""] == "Run a, forward 5 of 8"


def test_the_margins_say_what_every_token_had(show: Any, views: str) -> None:
    anchor = small().requests[0]
    opened = show(views)
    opened.focus("margins-0")
    opened.press("Home")
    for n, token in enumerate(anchor.tokens_a):
        found = opened.values("margins-0")
        assert found[""] == f"Token {n} of 6"
        assert found["text"] == f'"{token.text}" in a, "{anchor.tokens_b[n].text}" in b'
        assert float(found["margin in a"]) == token.margin
        moved = found["moved in b by"]
        assert moved == "not known" if token.delta is None else float(moved) == token.delta
        opened.press("ArrowRight")
    opened.press("f")
    assert opened.values("margins-0")["here"] == "the flip"
    opened.press("s")
    assert float(opened.values("margins-0")["margin in a"]) == 0.004
    opened.press("n")
    assert float(opened.values("margins-0")["margin in a"]) == 0.03


def test_keys_that_are_not_the_pictures_stay_the_readers(show: Any, views: str) -> None:
    opened = show(views)
    opened.focus("map-0")
    before = opened.values("map-0")
    opened.press("Control+ArrowRight", "Alt+n", "x", "Control+c")
    assert opened.values("map-0") == before
    opened.press("Tab")
    assert not opened.figure("map-0").locator(".stage").evaluate("(node) => node === document.activeElement")
