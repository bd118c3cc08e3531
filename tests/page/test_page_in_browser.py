"""The page in headless Chromium: it loads nothing, logs nothing, and answers to pointer and
keyboard.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page import pages

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="no Chromium on this machine"
)
MIB = 1 << 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "CI tests pages: install Chromium (Debian: chromium)"

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """An open page, with what it asked for and what it logged."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(path.as_uri())

    def style(self, selector: str, name: str) -> str:
        return str(
            self.page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}")
        )

    def focused(self) -> str:
        return str(self.page.evaluate("document.activeElement.getAttribute('aria-label')"))


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Any]:
    opened: list[Visit] = []

    def open_(report: Any, **options: Any) -> Visit:
        opened.append(Visit(browser, report.to_html(tmp_path / "report.html"), **options))
        return opened[-1]

    yield open_
    for item in opened:
        assert [url for url in item.requests if not url.startswith("file:")] == []
        assert len(item.requests) == 1
        assert item.errors == []
        item.page.close()


def test_drawings_answer_to_keyboard_and_pointer(visit: Any) -> None:
    at = visit(pages.fused(1))
    page = at.page
    page.hover("svg.drawing >> nth=0 >> .role-norm >> nth=0")
    pane = page.locator(".detail").first
    assert pane.locator(".formula").inner_text().endswith("eps 1e-06")
    assert pane.locator("li").count() == 8
    assert "in rms_norm" in pane.locator(".source").first.inner_text()
    assert page.locator("svg.drawing").first.locator(".edge.lit").count() > 1
    page.focus("svg.drawing .dot[tabindex='0']")
    page.keyboard.press("End")  # no key of ours
    first = at.focused()
    page.keyboard.press("ArrowRight")
    second = at.focused()
    assert second != first and page.locator("svg.drawing").first.locator(".dot.shown").count() == 1
    assert pane.locator("strong").inner_text() in second
    page.evaluate(
        "document.querySelector('svg.drawing .dot').dispatchEvent(new MouseEvent('mouseenter'))"
    )
    assert pane.locator("strong").inner_text() in second  # scrolled below a pointer at rest
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.hover("svg.drawing >> nth=0 >> .role-output >> nth=0")
    assert pane.locator("strong").inner_text() in second  # kept
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft")
    assert page.locator("svg.drawing").first.locator(".dot[tabindex='0']").count() == 1
    outline = page.evaluate(
        "getComputedStyle(document.activeElement.querySelector('rect')).strokeWidth"
    )
    assert outline == "3px"


REACHED = """() => {
    const dots = [...document.querySelector('svg.drawing').querySelectorAll('.dot')], reached = [0];
    for (const index of reached)
        for (const key of ['ArrowRight', 'ArrowDown', 'ArrowLeft', 'ArrowUp']) {
            dots[index].focus();
            dots[index].dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
            const found = dots.indexOf(document.activeElement);
            if (!reached.includes(found)) reached.push(found);
        }
    return [reached.length, dots.length];
}"""


def test_every_box_is_within_reach_of_the_arrow_keys(visit: Any) -> None:
    """In one go: a key at a time from here takes seconds."""
    reached, dots = visit(pages.fused(1)).page.evaluate(REACHED)
    assert reached == dots > 10


def test_the_theme_follows_the_system_until_chosen(visit: Any) -> None:
    at = visit(pages.fused(1), color_scheme="dark")
    dark = at.style("body", "backgroundColor")
    assert at.page.get_attribute("#theme", "aria-pressed") == "true"
    at.page.click("#theme")
    light = at.style("body", "backgroundColor")
    assert (dark, light) == ("rgb(19, 23, 27)", "rgb(247, 248, 249)")
    at.page.click("#theme")
    assert at.style("body", "backgroundColor") == dark


def test_sixty_one_layers_are_one_card(visit: Any, tmp_path: Path) -> None:
    at = visit(pages.many(61))
    assert (tmp_path / "report.html").stat().st_size < 3 * MIB
    assert at.page.locator("article.fused").count() == 1
    layers = at.page.locator("details.layers")
    assert "61 layers" in layers.locator("summary").inner_text()
    assert not layers.locator("tbody tr").first.is_visible()
    layers.locator("summary").focus()
    at.page.keyboard.press("Enter")
    assert layers.locator("tbody tr").count() == 61 and layers.locator("tbody tr").last.is_visible()
    at.page.locator("details.every summary").click()
    assert at.page.locator("details.every .dot").count() == len(
        pages.many(61).pictures[0].before.dots
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_edge_at_fault_is_red(visit: Any, scheme: str) -> None:
    at = visit(pages.left(pages.Biased), color_scheme=scheme)
    assert at.page.locator(".edge.failing").count() == 1
    assert at.style(".dot.failing rect", "stroke") == at.style(".edge.failing .wire", "stroke")
    red = {"light": "rgb(198, 40, 40)", "dark": "rgb(255, 111, 97)"}[scheme]
    assert at.style(".edge.failing .wire", "stroke") == red
    assert at.style(".edge:not(.failing) .wire", "stroke") != red


def test_prints_and_fits_three_widths(visit: Any) -> None:
    at = visit(pages.many(61))
    widths = """[document.documentElement.scrollWidth,
                 document.querySelector('svg.drawing').getBoundingClientRect().right]"""
    for width in (400, 900, 1300):
        at.page.set_viewport_size({"width": width, "height": 900})
        whole, drawing = at.page.evaluate(widths)
        assert whole <= width, "drawings scroll, the page does not"
        assert drawing <= width or width < 1300, "the first drawing is seen whole"
    assert at.page.pdf(format="A4").startswith(b"%PDF")
    at.page.emulate_media(media="print")
    assert (
        not at.page.locator("#theme").is_visible()
        and at.page.locator("svg.drawing").first.is_visible()
    )
    assert at.page.evaluate("document.documentElement.scrollWidth") <= 1300
    at.page.emulate_media(media="screen")
    order = at.page.eval_on_selector_all("h2", "headings => headings.map(heading => heading.id)")
    assert order.index("fused") < order.index("timeline"), "the verdict first"


def test_text_stays_in_its_box(visit: Any) -> None:
    at = visit(pages.fused(1))
    at.page.locator("details.every summary").click()
    too_wide = at.page.eval_on_selector_all(
        "svg .dot",
        """dots => dots.filter(dot => [...dot.querySelectorAll('text')].some(
             text => text.getBBox().width > dot.querySelector('rect').getBBox().width)).length""",
    )
    assert too_wide == 0
