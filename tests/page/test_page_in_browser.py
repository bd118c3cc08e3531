"""The page in headless Chromium: it loads nothing, logs nothing, and fits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mla_fusion as mf
from tests.page import pages

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="no Chromium on this machine"
)


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
