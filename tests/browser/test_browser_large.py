"""A report of 5,000 tokens and 32 layers: small enough to send, and right all the way down.

How fast such a page opens is measured by `python -m benchmarks pages`.
"""

from __future__ import annotations

from typing import Any

import pytest
from large_pages import large_pages, noisy
from series_samples import large

from detdiff.report.html import LARGEST


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return large_pages()


@pytest.mark.parametrize("name", ["usual", "noise", "many heads"])
def test_it_is_small_and_opens(show: Any, pages: dict[str, str], name: str) -> None:
    assert len(pages[name].encode()) <= LARGEST == 2_000_000
    assert show(pages[name]).page.locator("html").get_attribute("data-ready")


def test_a_page_that_had_no_room_says_what_is_missing(show: Any, pages: dict[str, str]) -> None:
    notes = {name: show(text).page.locator(".top .note").all_text_contents() for name, text in pages.items()}
    assert not [note for note in notes["usual"] if "small" in note]
    assert "Left out to keep this page small: the largest ULP of each site." in notes["noise"]
    assert not [note for note in notes["noise"] if "groups" in note]
    assert [note for note in notes["many heads"] if "in groups of" in note]


def test_every_cell_can_be_reached(show: Any, pages: dict[str, str]) -> None:
    request = large().requests[0]
    opened = show(pages["usual"])
    opened.focus("map-0")
    opened.press("b", "Enter")
    found = opened.values("map-0")
    assert (found["in"], found["state"]) == ("layer 3", "origin: born here")
    assert found[""] == f"layers.3.attn.q_proj, position {request.prompt + 250}"
    opened.press("End", "c", *["ArrowUp"] * 9, "ArrowDown")
    found = opened.values("map-0")
    state = ("bit-equal", "propagated: its inputs differed already")[request.entries[3].state[1, 4999] - 1]
    assert (found[""], found["state"]) == ("K head 1, position 4999", state)


def test_what_is_drawn_in_groups_is_the_strongest_of_each(show: Any, pages: dict[str, str]) -> None:
    request = noisy(large(), 16).requests[0]
    opened = show(pages["many heads"])
    opened.focus("map-0")
    opened.figure("map-0").get_by_role("combobox", name="Show").select_option(label="sites of layer 7")
    opened.press("Home", *["ArrowUp"] * 13)
    first, last = opened.values("map-0")[""].rpartition("positions ")[2].split(" to ")
    assert first == "0"
    state = request.sites[7].state[0, : int(last) + 1].max()
    assert opened.values("map-0")["state"].startswith(
        ("not compared", "bit-equal", "propagated", "origin")[state]
    )
