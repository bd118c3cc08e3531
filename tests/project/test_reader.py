"""What a reader asks has a short answer, two clicks from README; and pages are short, in lines of
100 columns.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

from tests.project.pages import DOCS

ROOT = DOCS.parent
README = ROOT / "README.md"
CLICKS, WORDS = 2, 50

_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#[^)]*)?\)")


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


def answer(page: Path, heading: str) -> str:
    """The first paragraph, list or table under a heading; a list or table that a paragraph leads to
    is not in it.
    """
    found = re.findall(
        rf"^#+ {re.escape(heading)}\n+(.*?)(?:\n\n|\Z)",
        page.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    assert len(found) == 1, f"{page.name} has {len(found)} headings {heading!r}"
    return str(found[0])


def words(text: str) -> int:
    """Without the targets of links and the signs of Markdown."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"\]\([^)]*\)", "]", text)))


def test_every_answer_of_the_questions_is_short() -> None:
    headings = re.findall(r"^### (.*)$", (DOCS / "faq.md").read_text(), re.MULTILINE)
    long = {heading: words(answer(DOCS / "faq.md", heading)) for heading in headings}
    assert len(headings) >= 20 and not {
        heading: count for heading, count in long.items() if count >= WORDS
    }


def test_every_page_is_two_clicks_from_readme() -> None:
    pages = {page for page in DOCS.glob("*.md") if not page.stem.endswith(".zh")}
    assert pages <= reached(CLICKS)


PAGES = [*sorted(DOCS.glob("*.md")), README, ROOT / "README.zh.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_have_at_most_100_columns(page: Path) -> None:
    """But for rows of tables, code, and what is one word: a link."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    long = [
        line
        for line in text.split("\n")
        if columns(line) > 100 and not line.startswith(("|", "    "))
    ]
    assert [line for line in long if " " in line.strip()] == []


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in line)


def test_pages_are_short() -> None:
    """300 lines a page; 3,100 in all of those that are written by hand, without the tables that
    scripts write.
    """
    by_hand = 0
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 300, page.name
        if not re.search(r"Generated\s.*?`docs/generate\w*\.py`", text[:2500], re.DOTALL):
            by_hand += len(
                re.sub(
                    r"<!-- (\w+): written by .*?<!-- /\1 "
                    r"-->\n",
                    "",
                    text,
                    flags=re.DOTALL,
                ).splitlines()
            )
    assert by_hand <= 3100, by_hand
