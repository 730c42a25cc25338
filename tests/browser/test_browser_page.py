"""A page as a whole: quiet, reachable by keyboard, readable in both themes, on a phone, on paper and without script."""

from __future__ import annotations

from typing import Any

import pytest
from drawn_pages import NAMES, drawing, page
from series_samples import small
from tiers import some_now

from detdiff.report.html import html


@pytest.mark.parametrize("name", some_now(NAMES, 0, 2, 5))
def test_a_page_is_quiet_and_its_views_come_alive(show: Any, name: str) -> None:
    opened = show(page(name))
    figures = opened.page.locator("figure.view").all()
    assert figures
    for figure in figures:
        assert "live" in figure.get_attribute("class").split()
        assert figure.locator(".picture svg").count() == 1 and figure.locator(".picture svg").is_visible()
        assert figure.locator(".dd-cursor rect").count() == 2 and figure.locator(".values h4").text_content()
    assert not opened.page.locator("#trouble").is_visible()


def test_the_tabulator_key_reaches_every_view_and_shows_where_it_is(show: Any) -> None:
    opened = show(page("reference"))
    views = {figure.get_attribute("id") for figure in opened.page.locator("figure.view.live").all()}
    reached, order = set(), []
    for _ in range(400):
        opened.press("Tab")
        at = opened.page.evaluate(
            """() => {
              const at = document.activeElement;
              if (!at || at === document.body) return null;
              const style = getComputedStyle(at);
              return {
                stage: at.classList.contains("picture") ? at.closest("figure").id : "",
                inside: at.closest("figure")?.id ?? "",
                shown: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
                visible: at.checkVisibility({ visibilityProperty: true }),
                said: at.tagName + " " + at.className + " " + at.textContent.slice(0, 40),
              };
            }"""
        )
        if at is None:
            break
        assert at["shown"] and at["visible"], at["said"]
        if at["stage"]:
            reached.add(at["stage"])
        if at["inside"] and (not order or order[-1] != at["inside"]):
            order.append(at["inside"])
    assert reached == views and len(views) == 6
    # One after the other, as they are read.
    assert len(order) == len(set(order))


def test_the_first_key_skips_to_the_report(show: Any) -> None:
    opened = show(page("reference"))
    opened.press("Tab")
    link = opened.page.locator(".skip")
    assert link.evaluate("(node) => node === document.activeElement && node.getBoundingClientRect().top >= 0")
    opened.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"


def test_a_link_to_a_folded_section_opens_it(show: Any) -> None:
    opened = show(page("reference"))
    assert not opened.page.locator("#environment table").first.is_visible()
    opened.page.locator('nav a[href="#environment"]').press("Enter")
    opened.page.locator("#environment table").first.wait_for(state="visible")


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("section", some_now(["timeline", "margins", "scenario"], 1))
def test_a_link_into_the_page_leads_there(show: Any, section: str, width: int) -> None:
    opened = show(page("reference"), width=width, at=f"#{section}")
    top, room = opened.page.evaluate(
        f"""[
          document.getElementById("{section}").getBoundingClientRect().top,
          document.documentElement.scrollHeight - innerHeight - scrollY,
        ]"""
    )
    assert 0 <= top <= 120 or (room < 2 and top > 0), (top, room)


def test_folds_open_by_keyboard(show: Any) -> None:
    opened = show(page("reference"))
    summary = opened.figure("map-0").locator("details.values-table summary")
    summary.press("Enter")
    assert opened.figure("map-0").locator("details.values-table table").is_visible()


# The contrast of WCAG 2.2 of everything that can be read, over the colours that are really behind it.
CONTRAST = """
() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = (colour) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parts(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((c) => {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  let texts = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || node.closest("script, style, title, desc, option, .dd-halo")) continue;
    if (!node.checkVisibility({ visibilityProperty: true })) continue;
    texts++;
    const style = getComputedStyle(node);
    const below = behind(node);
    const ink = over(parts(node instanceof SVGElement ? style.fill : style.color), below);
    const [light, dark] = [luminance(ink), luminance(below)].sort((x, y) => y - x);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${node.tagName} ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return [texts, found];
}
"""
UNFOLD = "() => document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"


@pytest.mark.parametrize("how", some_now(["light", "dark", "chosen-light", "chosen-dark"], 0))
def test_every_text_has_contrast(show: Any, how: str) -> None:
    system = {"light": "light", "dark": "dark", "chosen-light": "dark", "chosen-dark": "light"}[how]
    texts = 0
    for text in (page("reference"), html(drawing(small()))):
        opened = show(text, color_scheme=system)
        if how.startswith("chosen"):
            button = opened.page.get_by_role("button", name="Theme")
            while button.text_content() != f"Theme: {how.removeprefix('chosen-')}":
                button.press("Enter")
        opened.page.evaluate(UNFOLD)
        ground = opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == how.endswith("light")
        count, found = opened.page.evaluate(CONTRAST)
        assert found == []
        texts += count
    assert texts > 500


BADGES = (
    "bug",
    "numerics",
    "configuration",
    "nondeterminism",
    "identical",
    "undetermined",
    "inconclusive",
    "different",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_badge_has_contrast(show: Any, scheme: str) -> None:
    opened = show(page("identical"), color_scheme=scheme)
    for name in BADGES:
        opened.page.locator(".badge").first.evaluate(
            "(badge, name) => { badge.className = `badge kind-${name}`; }", name
        )
        assert opened.page.evaluate(CONTRAST)[1] == [], name


def test_a_text_without_contrast_is_found(show: Any) -> None:
    opened = show(page("identical"))
    opened.page.locator("h1").evaluate("(node) => { node.style.color = '#999'; }")
    (found,) = opened.page.evaluate(CONTRAST)[1]
    assert found.startswith("2.8") and " H1 The runs are identical" in found


BOX = "(selector) => { const box = document.querySelector(selector).getBoundingClientRect(); return [box.left, box.right]; }"

# What is wider than the screen, but for what scrolls inside of itself.
WIDE = """
() => {
  const scrolled = (node) => node.closest(".scroll, .picture, nav, pre");
  const wide = [...document.body.querySelectorAll("*")].filter((node) =>
    !node.closest("svg, .skip") && node.checkVisibility() && !scrolled(node.parentElement) &&
    node.getBoundingClientRect().right > innerWidth + 0.5);
  return [document.documentElement.scrollWidth, ...wide.map((node) => node.tagName + "." + node.className)];
}
"""


@pytest.mark.parametrize("name", some_now(["reference", "bug"], 0))
@pytest.mark.parametrize("script", [True, False], ids=["script", "no-script"])
def test_a_phone_needs_no_sideways_scrolling(show: Any, name: str, script: bool) -> None:
    opened = show(page(name), width=360, script=script)
    if script:
        opened.page.evaluate(UNFOLD)
    assert opened.page.evaluate(WIDE) == [360]


def test_what_is_too_wide_is_found(show: Any) -> None:
    opened = show(page("bug"), width=360)
    opened.page.locator("h1").evaluate("(node) => { node.style.width = '400px'; }")
    width, *found = opened.page.evaluate(WIDE)
    assert width > 360 and found == ["H1."]


def test_a_picture_keeps_its_size_on_a_narrow_screen_and_scrolls_to_its_cursor(show: Any) -> None:
    opened = show(page("reference"), width=360)
    picture = opened.figure("map-0").locator(".picture")
    whole, seen = picture.evaluate(
        "(node) => [node.querySelector('svg').getBoundingClientRect().width, node.clientWidth]"
    )
    assert whole > 600 > seen
    opened.focus("map-0")
    for key in ("End", "Home", "End"):
        opened.press(key)
        ring, frame = (
            opened.page.evaluate(BOX, selector) for selector in ("#map-0 .dd-cursor rect", "#map-0 .picture")
        )
        assert frame[0] <= ring[0] and ring[1] <= frame[1]


def test_the_page_says_the_same_without_script(show: Any) -> None:
    opened = show(page("reference"), script=False)
    for figure in opened.page.locator("figure.view").all():
        assert figure.locator(".picture svg").is_visible()
        assert not figure.locator("button, select, .values").count()
        figure.locator("summary").click()
        assert figure.locator("details table").is_visible()
    assert "Without JavaScript" in opened.page.locator("noscript").text_content()
    assert not opened.page.locator("#theme").is_visible()


def test_a_browser_that_cannot_unpack_says_so_and_keeps_the_pictures(chromium: Any, tmp_path: Any) -> None:
    (tmp_path / "page.html").write_text(page("bug"), encoding="utf-8")
    tab = chromium.new_page()
    tab.add_init_script("delete window.DecompressionStream")
    tab.goto((tmp_path / "page.html").as_uri())
    tab.wait_for_selector("html[data-ready]")
    assert "cannot unpack" in tab.locator("#trouble").text_content()
    assert tab.locator("figure#map-0 .picture").is_visible()
    tab.close()


@pytest.mark.parametrize("scheme", some_now(["light", "dark"], 1))
def test_paper_has_everything_and_no_buttons(show: Any, scheme: str) -> None:
    opened = show(page("reference"), color_scheme=scheme)
    opened.page.emulate_media(media="print", color_scheme=scheme)
    hidden = opened.page.evaluate(
        """() => [...document.querySelectorAll("main section, main p, main dl, main table, main pre, main svg, main h2, main h3")]
          .filter((node) => !node.closest(".values, .help, noscript, [hidden]"))
          .filter((node) => !node.checkVisibility() || !node.getBoundingClientRect().height)
          .map((node) => node.tagName + " " + node.textContent.slice(0, 60))"""
    )
    assert hidden == []
    buttons = opened.page.locator("button, select, nav, .dd-cursor").all()
    assert buttons and not any(button.is_visible() for button in buttons)
    assert (
        opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert opened.page.evaluate(CONTRAST)[1] == []
    assert opened.page.pdf().startswith(b"%PDF")


def test_who_wants_no_motion_gets_none(show: Any) -> None:
    opened = show(page("bug"), reduced_motion="reduce")
    moving = opened.page.evaluate(
        """() => [...document.querySelectorAll("*")].map((node) => getComputedStyle(node)).filter((style) =>
          style.scrollBehavior === "smooth" || style.animationName !== "none" || parseFloat(style.transitionDuration) > 0).length"""
    )
    assert moving == 0
    assert (
        show(page("bug"), reduced_motion="no-preference").page.evaluate(
            "getComputedStyle(document.documentElement).scrollBehavior"
        )
        == "smooth"
    )
