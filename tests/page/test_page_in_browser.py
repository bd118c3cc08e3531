"""The page in headless Chromium: it loads nothing, logs nothing, fits, and is red where it says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mla_fusion as mf
from tests.exhaustive import one_in
from tests.page import pages

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="no Chromium on this machine"
)
RED = {"light": "rgb(198, 40, 40)", "dark": "rgb(255, 111, 97)"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "CI tests pages: install Chromium (Debian: chromium)"

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens the page of a report; at the end nothing was asked for and nothing logged."""
    asked: list[str] = []
    logged: list[str] = []

    def open_(report: mf.Report, **options: Any) -> Any:
        view = browser.new_page(**options)
        view.on("request", lambda request: asked.append(request.url))
        view.on("console", lambda message: logged.append(message.text))
        view.on("pageerror", lambda error: logged.append(str(error)))
        file = report.to_html(tmp_path / "deep" / "report.html")
        view.goto(file.as_uri())
        assert asked == [file.as_uri()] and not logged
        return view

    yield open_


@pytest.mark.parametrize("scheme", one_in(1, ["light", "dark"]))
@pytest.mark.parametrize(
    ("name", "red"),
    one_in(
        1,
        [
            ("eps_outside", ["q_a_layernorm's add"]),
            ("Unabsorbed", ["no W_uk product"]),
            ("PagedRotateHalf", []),
        ],
    ),
)
def test_red_is_what_the_message_names(visit: Any, name: str, red: list[str], scheme: str) -> None:
    view = visit(pages.report_of(name), color_scheme=scheme)
    strokes = view.eval_on_selector_all(
        "svg g",
        "boxes => boxes.map(box => [box.querySelector('title').textContent.split('\\n')[0],"
        " getComputedStyle(box.querySelector('rect')).stroke])",
    )
    assert [title for title, stroke in strokes if stroke == RED[scheme]] == red
    assert len(strokes) > 4


REPORTS = {
    "fused": lambda: pages.fused(2),
    "staged": lambda: pages.report_of("SglangDecode"),
    "refused": lambda: pages.report_of("eps_outside"),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_fits_wide_and_narrow_screens_and_prints(visit: Any, kind: str) -> None:
    view = visit(REPORTS[kind]())
    view.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    for width in (1280, 420):
        view.set_viewport_size({"width": width, "height": 800})
        assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert view.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("kind", REPORTS)
def test_boxes_do_not_overlap_and_hold_their_text(visit: Any, kind: str) -> None:
    view = visit(REPORTS[kind]())
    drawings = view.eval_on_selector_all(
        "svg",
        "all => all.map(one => [...one.querySelectorAll('rect, text')].map(part => {"
        " const {x, y, width, height} = part.getBBox();"
        " return [part.tagName, x, y, x + width, y + height]; }))",
    )
    assert drawings
    for drawing in drawings:
        boxes = [corners for kind, *corners in drawing if kind == "rect"]
        for at, (left, top, right, bottom) in enumerate(boxes):
            for x0, y0, x1, y1 in boxes[:at]:
                assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top
        for kind, left, top, right, bottom in drawing:
            inside = [
                x0 <= left and y0 <= top and right <= x1 and bottom <= y1
                for x0, y0, x1, y1 in boxes
            ]
            assert kind == "rect" or any(inside)


def test_sixty_one_layers_are_one_card(visit: Any) -> None:
    from dataclasses import replace

    report = pages.fused(2)
    first, second = report.fused
    others = [replace(second, layer=f"layers.{place}") for place in range(1, 61)]
    view = visit(replace(report, fused=[first, *others]))
    assert view.locator("article.fused").count() == 1
    assert not view.get_by_text("layers.60", exact=True).is_visible()
    view.get_by_text("61 layers", exact=True).click()
    assert view.get_by_text("layers.60", exact=True).is_visible()
