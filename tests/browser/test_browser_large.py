"""A report of 5,000 tokens and 32 layers: small enough to send, and right all the way down.

How fast such a page opens is measured by `python -m benchmarks pages`.
"""

from __future__ import annotations

from typing import Any

import pytest
from large_pages import large_pages
from series_samples import large
from tiers import some_now

from detdiff.report.html import LARGEST


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return large_pages()


@pytest.mark.parametrize("name", some_now(["usual", "noise", "many heads"]))
def test_it_is_small_and_every_view_comes_alive(show: Any, pages: dict[str, str], name: str) -> None:
    assert len(pages[name].encode()) <= LARGEST == 2_000_000
    opened = show(pages[name])
    assert opened.page.locator("figure.view.live").count() == opened.page.locator("figure.view").count() == 4


@pytest.mark.thorough
def test_a_page_that_had_no_room_says_what_is_missing(show: Any, pages: dict[str, str]) -> None:
    notes = {name: show(text).page.locator(".top .note").all_text_contents() for name, text in pages.items()}
    assert not [note for note in notes["usual"] if "small" in note]
    (missing,) = [note for note in notes["many heads"] if "small" in note]
    assert missing.startswith("Left out of Map of anchor to keep this page small: ")
    assert missing.endswith("cache entries of layer 31 (" + missing.rpartition("(")[2])


@pytest.mark.thorough
def test_a_cell_of_many_positions_says_which_of_them_matter(show: Any, pages: dict[str, str]) -> None:
    request = large().requests[0]
    arising = request.prompt + 250
    opened = show(pages["usual"])
    opened.focus("map-0")
    opened.press("b")
    found = opened.values("map-0")
    first, last = map(int, found[""].rpartition("positions ")[2].split(" to "))
    assert last - first == 20 and first <= arising <= last
    assert (found["state"], found["origin at"]) == (
        "origin: inputs equal, outputs not",
        f"position {arising}",
    )
    differing = int((request.layers.state[3, first : last + 1] > 1).sum())
    assert found["differ"] == f"{differing} of 21 positions"
    opened.press("Enter")
    # The sites of the layer in which it arose are there position by position as well.
    what = opened.figure("map-0").get_by_role("combobox", name="Show")
    (near,) = [
        name
        for name in what.locator("option").all_text_contents()
        if name.startswith("sites of layer 3, pos")
    ]
    what.select_option(label=near)
    assert opened.values("map-0")[""].startswith("layers.3.")
    opened.press("b")
    assert opened.values("map-0")[""] == f"layers.3.attn.q_proj, position {arising}"
    opened.press("Escape")
    assert opened.values("map-0")[""] == f"layer 3, position {arising}"
    state = request.layers.state[3]
    for position in range(arising + 1, arising + 9):
        opened.press("ArrowRight")
        assert opened.values("map-0")["state"].startswith(
            ("not compared", "bit-equal", "propagated", "origin")[state[position]]
        )


@pytest.mark.thorough
def test_a_column_of_many_forwards_tells_of_the_one_that_is_marked(show: Any, pages: dict[str, str]) -> None:
    origin = large().requests[0].origin_forwards
    assert origin is not None
    opened = show(pages["usual"])
    opened.focus("timeline-0")
    opened.press("ArrowDown", "b")
    found = opened.values("timeline-0")
    assert (found["here"], found["forward"]) == ("the origin", str(origin[1]))
    assert "64 prefill of follower, from position 0" in found["who"]
