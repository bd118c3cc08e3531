"""The documentation site builds without a network, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
# Attributes by which a page loads something, and elements whose href does.
LOADING = ("src", "srcset", "data", "poster")
LOADING_LINKS = ("stylesheet", "icon", "preload", "preconnect", "modulepreload", "prefetch")


class Page(HTMLParser):
    """What a page loads, where it leads, and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.loads += [given[name] for name in LOADING if given.get(name)]
        if tag == "link" and any(kind in given.get("rel", "") for kind in LOADING_LINKS):
            self.loads.append(given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of a strict build, by path. Warnings fail it."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


def test_every_page_is_built(site: dict[Path, Page]) -> None:
    names = {path.stem for path in site}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= names


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    for page in site.values():
        assert [
            url
            for url in page.loads
            if urlsplit(url).scheme not in ("", "data") or url.startswith("//")
        ] == []
        style = re.findall(
            r"@import|url\(\s*['\"]?(?:https?:)?//", page.path.read_text(encoding="utf-8")
        )
        assert style == []


def test_stylesheets_load_nothing_from_elsewhere(site: dict[Path, Page]) -> None:
    folder = next(iter(site)).parent
    sheets = list(folder.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        assert not re.search(
            r"@import|url\(\s*['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")
        )


def test_internal_links_resolve(site: dict[Path, Page]) -> None:
    broken = []
    for page in site.values():
        if page.path.name == "404.html":  # its links start at the root of a server
            continue
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (
                anchor and target in site and anchor not in site[target].anchors
            ):
                broken.append((page.path.name, link))
    assert broken == []
