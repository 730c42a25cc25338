"""The map, the timeline and the margins as they are used: by keyboard, with the right values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn_pages import drawing, page, report
from series_samples import ENTRIES, MM, MV, SITES, small

from detdiff.report.html import html
from detdiff.report.views.map_cells import ULP_STEPS

STATES = (
    "not compared",
    "bit-equal",
    "propagated: its inputs differed already",
    "origin: inputs equal, outputs not",
)


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
    assert found[""] == "layers.1.attn.q_proj, position 9"
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
        assert found[""] == f"{entry}, position 9"
        assert found["state"] == STATES[entries.state[row, 9]]
        opened.press("ArrowDown")
    opened.press("Enter")
    assert opened.values("map-0")[""].startswith("layers.2.")


def test_the_list_of_what_to_show_leads_everywhere(show: Any, views: str) -> None:
    opened = show(views)
    what = opened.figure("map-0").get_by_role("combobox", name="Show")
    names = what.locator("option").all_text_contents()
    layers = [f"layer {n}" for n in range(4)]
    # Those of the layer in which the first difference arose come first.
    arising = ["sites of layer 1", "cache entries of layer 1"]
    every = [f"{part} of {layer}" for part in ("sites", "cache entries") for layer in layers]
    assert names == ["all layers", *arising, *(name for name in every if name not in arising)]
    what.select_option(label="cache entries of layer 3")
    assert opened.values("map-0")[""].startswith("K head")
    what.select_option(label="sites of layer 0")
    assert opened.values("map-0")[""].startswith("layers.0.")
    opened.figure("map-0").get_by_role("button", name="Open cache entries").press("Enter")
    assert opened.values("map-0")[""].startswith("K head")
    back = opened.figure("map-0").get_by_role("button", name="Back to layers")
    back.press("Space")
    assert opened.values("map-0")[""] == "layer 0, position 9"
    assert back.count() == 0


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
    arising = sorted((int(p), int(r)) for r, p in np.argwhere(request.layers.state == 3))
    assert len(arising) > 2
    opened = show(page("reference"))
    opened.focus("map-0")
    opened.press("Home", *["ArrowUp"] * 30)
    for position, row in arising:
        opened.press("n")
        assert opened.values("map-0")[""] == f"{request.layers.rows[row]}, position {position}"
    opened.press("p")
    position, row = arising[-2]
    assert opened.values("map-0")[""] == f"{request.layers.rows[row]}, position {position}"


# The colour of the cells at a place of the picture, without the ring of the cursor.
PAINTED = """
(figure, [row, column]) => {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
  const ratio = box.width / svg.viewBox.baseVal.width;
  const rows = svg.dataset.rows.split(" ").map(Number);
  const x = box.left + ratio * (Number(svg.dataset.left) + (column + 0.5) * Number(svg.dataset.step));
  const y = box.top + ratio * (rows[2 * row] + rows[2 * row + 1] / 2);
  svg.querySelector(".dd-cursor").setAttribute("visibility", "hidden");
  for (const mark of svg.querySelectorAll(".dd-flip, .dd-under")) mark.setAttribute("visibility", "hidden");
  const hit = document.elementsFromPoint(x, y).find((node) => node instanceof SVGPathElement);
  return [hit ? hit.getAttribute("class") : "", x, y];
}
"""


def test_the_map_is_painted_as_its_values_say_and_can_be_clicked(show: Any, views: str) -> None:
    grid = small().requests[0].layers
    assert grid.ulp is not None
    opened = show(views)
    figure = opened.figure("map-0")
    figure.scroll_into_view_if_needed()
    for row in range(4):
        for position in range(12):
            step = sum(grid.ulp[row, position] >= limit for limit in ULP_STEPS)
            want = {1: "dd-equal", 2: f"dd-s{step}", 3: "dd-origin"}[int(grid.state[row, position])]
            painted, x, y = figure.evaluate(PAINTED, [row, position])
            assert want in painted.split(), (row, position)
            opened.page.mouse.click(x, y)
            assert opened.values("map-0")[""] == f"layer {row}, position {position}"


def test_a_picture_is_zoomed_into_and_follows_its_cursor(show: Any) -> None:
    opened = show(page("reference"))
    picture = opened.figure("map-0").locator(".picture")

    def widths() -> tuple[float, float, float]:
        found = picture.evaluate(
            "(node) => [node.querySelector('svg').clientWidth, node.clientWidth, node.scrollLeft]"
        )
        return tuple(found)  # type: ignore[return-value]

    opened.focus("map-0")
    opened.press("Home")
    fitting = widths()[0]
    opened.press("+", "+")
    whole, seen, at = widths()
    assert whole > 3 * fitting > seen and at == 0
    opened.press("End")
    assert widths()[2] > whole / 2
    opened.press("0")
    assert widths()[0] == fitting
    opened.figure("map-0").get_by_role("button", name="Zoom in").click()
    assert widths()[0] > fitting


def test_the_timeline_says_what_every_forward_was(show: Any, views: str) -> None:
    series = small()
    opened = show(views)
    opened.focus("timeline-0")
    for run, points in (("a", series.a), ("b", series.b)):
        opened.press("Home")
        for n, point in enumerate(points):
            found = opened.values("timeline-0")
            forwards = f"{len(points)} forwards"
            assert found[""] == f"Run {run}, {forwards}, forward {n}"
            assert found["rows M"] == str(point.rows)
            assert found["who"].splitlines() == [
                f"{m.rows} {m.phase} of {m.request}, from position {m.start}" for m in point.members
            ]
            assert found["linear calls"] == str(point.linear_path).removeprefix("reference/")
            assert found.get("events", "").splitlines() == list(point.events)
            assert found["writes"].startswith(f"cache entries of {point.writes} position")
            opened.press("ArrowRight")
        opened.press("ArrowDown")


def test_the_timeline_goes_to_origin_flip_and_events(show: Any, views: str) -> None:
    opened = show(views)
    opened.focus("timeline-0")
    opened.press("f")
    assert opened.values("timeline-0")[""] == "Run a, 8 forwards, forward 4"
    opened.press("ArrowDown", "b")
    found = opened.values("timeline-0")
    assert (found[""], found["here"]) == ("Run b, 6 forwards, forward 2", "the origin")
    opened.press("e")
    assert opened.values("timeline-0")["events"] == "trim of anchor, 3 asked, 3 done"
    opened.press("e")
    assert opened.values("timeline-0")["events"] == "wrap of anchor"
    opened.press("ArrowUp")
    assert opened.values("timeline-0")[""] == "Run a, 8 forwards, forward 5"


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
    opened.press("p", "p")
    assert float(opened.values("margins-0")["margin in a"]) == 2.5


def test_the_lens_says_what_every_layer_preferred(show: Any, views: str) -> None:
    opened = show(views)
    opened.focus("lens-0")
    opened.press("Home")
    for point in small().requests[0].lens:
        found = opened.values("lens-0")
        assert (found[""], float(found["in a"]), float(found["in b"])) == (
            f"After layer {point.layer}",
            point.a,
            point.b,
        )
        opened.press("ArrowRight")
    opened.press("t")
    assert opened.values("lens-0")["here"] == "b turns"


def test_keys_that_are_not_the_pictures_stay_the_readers(show: Any, views: str) -> None:
    opened = show(views)
    opened.focus("map-0")
    before = opened.values("map-0")
    opened.press("Control+ArrowRight", "Alt+n", "x", "Control+c")
    assert opened.values("map-0") == before
    opened.press("Tab")
    assert (
        not opened.figure("map-0").locator(".picture").evaluate("(node) => node === document.activeElement")
    )
