"""Every page is two clicks from README, and short."""

from __future__ import annotations

import re
from pathlib import Path

from tests.project.pages import DOCS

ROOT = DOCS.parent
README = ROOT / "README.md"
CLICKS = 2

_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#[^)]*)?\)")
_WRITTEN = re.compile(r"<!-- (\w+): written by .*?<!-- /\1 -->\n", re.DOTALL)


def links(page: Path) -> set[Path]:
    """Pages of the documentation that a page links."""
    targets = (
        (page.parent / link).resolve()
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if link
    )
    return {
        target for target in targets if target.suffix == ".md" and not target.stem.endswith(".zh")
    }


def reached(clicks: int) -> set[Path]:
    pages = {README}
    for _ in range(clicks):
        pages |= {target for page in pages if page.is_file() for target in links(page)}
    return pages


def test_every_page_is_two_clicks_from_readme() -> None:
    pages = {page for page in DOCS.glob("*.md") if not page.stem.endswith(".zh")}
    assert pages <= reached(CLICKS)


def test_pages_are_short() -> None:
    """300 lines a page; 3,100 in all of those written by hand, without the tables of scripts."""
    by_hand = 0
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 300, page.name
        if not re.search(r"Generated\s.*?`docs/generate\w*\.py`", text[:2500], re.DOTALL):
            by_hand += len(_WRITTEN.sub("", text).splitlines())
    assert by_hand <= 3100, by_hand
