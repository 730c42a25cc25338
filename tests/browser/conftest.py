"""A headless Chromium for the tests of the pages. Where there is none they are skipped, but not on CI."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "report"), str(TESTS / "compare")]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --renderer-process-limit=1"
).split()

# Drawings are unpacked while the page goes on, so what a key did is there a moment later.
_DRAWN = """
  const pause = () => new Promise((done) => setTimeout(() => requestAnimationFrame(done)));
  await pause();
  while (document.querySelector("[aria-busy=true]")) await pause();
"""
_VALUES = (
    f"async (id) => {{{_DRAWN}"
    + """
  const region = document.getElementById(id).querySelector(".values");
  const found = { "": region.querySelector("h4").textContent };
  for (const name of region.querySelectorAll("dt")) found[name.textContent] = name.nextSibling.textContent;
  return found;
}
"""
)
# Chromium's advice on the pixels that tests read.
_ADVICE = "willReadFrequently"


@dataclass
class Opened:
    """A page that was opened, and all that should not have happened: messages of the console, requests, dialogs."""

    page: Any
    trouble: list[str] = field(default_factory=list)

    def figure(self, id: str) -> Any:
        """A view by its id, such as ``map-0``."""
        return self.page.locator(f"figure#{id}")

    def focus(self, id: str) -> None:
        """Into the picture of a view, as the tabulator key gets there."""
        self.figure(id).locator(".picture").focus()

    def press(self, *keys: str) -> None:
        """Keys, one after the other, on what has the focus; each comes when what the one before did is drawn."""
        for key in keys:
            self.page.keyboard.press(key)
            self.page.evaluate(f"async () => {{{_DRAWN}}}")

    def values(self, id: str) -> dict[str, str]:
        """What is said beside a view; its heading is under an empty name."""
        found: dict[str, str] = self.page.evaluate(_VALUES, id)
        return found


def _unavailable(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{why}, and on CI the pages are looked at")
    pytest.skip(why)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for the tests of a file."""
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        _unavailable("no Chromium here; it is Debian's package `chromium`")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _unavailable("no playwright here; it is in the extra `dev`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        # The first page stays, and with it the process that draws the pages of its context: to start one takes most of a test.
        browser.new_context().new_page()
        yield browser
        browser.close()


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens a page from its text. Whatever was wrong with it fails the test at its end."""
    opened: list[Opened] = []

    def show(
        text: str,
        *,
        width: int = 1280,
        name: str = "page.html",
        at: str = "",
        script: bool = True,
        **media: Any,
    ) -> Opened:
        (tmp_path / name).write_text(text, encoding="utf-8", newline="\n")
        address = (tmp_path / name).as_uri()
        page = chromium.contexts[0].new_page() if script else chromium.new_page(java_script_enabled=False)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(**media)
        found = Opened(page)
        opened.append(found)
        page.on(
            "console",
            lambda said: None if _ADVICE in said.text else found.trouble.append(f"console: {said.text}"),
        )
        page.on("pageerror", lambda error: found.trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (found.trouble.append("dialog"), dialog.dismiss()))

        def asked(route: Any) -> None:
            if route.request.url.partition("#")[0] == address:
                route.continue_()
            else:
                found.trouble.append(f"request: {route.request.url}")
                route.abort()

        page.route("**/*", asked)
        page.goto(f"{address}{at}")
        if script:
            page.wait_for_selector("html[data-ready]")
        return found

    yield show
    for each in opened:
        each.page.close()
    assert [trouble for each in opened for trouble in each.trouble] == []
