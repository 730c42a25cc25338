"""How fast a report's page opens in a headless Chromium: 5,000 tokens and 32 layers."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from detdiff.errors import DetdiffError

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("browser", "report", "compare")]

ROUNDS = 5
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def run() -> list[dict[str, Any]]:
    """One row per page: its size, and the median seconds until every view has been drawn and can be used.

    Raises DetdiffError where there is no Chromium.
    """
    from large_pages import large_pages

    pages = large_pages()
    return [
        {"page": name, "MB": round(len(pages[name].encode()) / 1e6, 2), "seconds": round(seconds, 2)}
        for name, seconds in opened(pages).items()
    ]


def opened(pages: Mapping[str, str]) -> dict[str, float]:
    """The median seconds until each page, given as HTML, can be used. Raises DetdiffError where there is no Chromium."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise DetdiffError("no Chromium here; it is Debian's package `chromium`.")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox"])
        for name, text in pages.items():
            file = Path(folder) / "page.html"
            file.write_text(text, encoding="utf-8", newline="\n")
            taken = []
            for _ in range(ROUNDS):
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.goto(file.as_uri())
                page.wait_for_selector("html[data-ready]")
                # Milliseconds from the start of the navigation.
                taken.append(float(page.locator("html").get_attribute("data-ready") or 0) / 1000)
                page.close()
            found[name] = median(taken)
        browser.close()
    return found
