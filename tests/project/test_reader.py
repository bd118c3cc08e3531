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

# question: (page, heading, what the answer has to say)
QUESTIONS = {
    "What is this?": ("index.md", "mla_fusion", "rewrites it into one kernel"),
    "Does it need an NPU to try?": ("faq.md", "Does it need an NPU to try?", "No."),
    "How do I install it where torch and torch_npu are?": (
        "quick-start.md",
        "On an NPU machine",
        "leaves them as",
    ),
    "Is it faster?": ("faq.md", "Is it faster?", "3 to 8 %"),
    "Can vLLM-Ascend use it?": ("faq.md", "Can vLLM-Ascend use it?", "Not as released"),
    "Which releases?": ("faq.md", "Which releases work?", "2.7.1 to 2.14.0"),
    "What does it do without CANN?": ("faq.md", "What does it do without CANN?", "stand-ins"),
    "Can I train with it?": ("faq.md", "Can it train?", "no backward"),
    "How do I see why nothing fused?": ("faq.md", "How do I see why nothing fused?", "remedy"),
    "Is it safe under dynamic=True?": (
        "faq.md",
        "Is it safe under torch.compile dynamic=True?",
        "Yes",
    ),
    "Which epsilon?": ("faq.md", "Which epsilon is used?", "read off each norm"),
    "What does staged cost me?": ("faq.md", "What does staged cost me?", "4 launches"),
    "What if my cache is 576 wide?": ("faq.md", "What if my cache is 576 wide?", "staged"),
    "What must slots be?": ("staged.md", "What slots must be", "takes each slot at its word"),
    "How is a fusion known to be exact?": (
        "faq.md",
        "How is a fusion known to be exact?",
        "exact arithmetic",
    ),
    "What is assumed?": ("faq.md", "What is taken for granted?", "not negative, distinct"),
    "int8?": ("faq.md", "int8?", "W8A8 dynamic"),
    "LoRA?": ("faq.md", "LoRA?", "Merged into the weights"),
    "May I change weights?": ("weights.md", "Weights that change", "may change weights"),
    "Why did memory grow?": ("faq.md", "Why did memory grow?", "By packed copies"),
    "My model is a Hugging Face one?": (
        "faq.md",
        "My model is a Hugging Face one?",
        "turns its attentions into the form that fuses",
    ),
    "Which attentions of a model are converted?": ("hugging-face.md", "Which models", "qualifies"),
    "Does it work with tensor parallelism?": ("faq.md", "Tensor parallel?", "heads of one rank"),
    "Do my old cache and its other readers go on?": (
        "faq.md",
        "Does it change what my cache holds?",
        "rows of exactly your layout",
    ),
    "What if the pass fails?": ("faq.md", "What if the pass fails?", "stays as it was and runs"),
    "How do I leave a layer alone?": ("faq.md", "What if the pass fails?", "Config(skip="),
    "How much longer does compilation take?": ("faq.md", "How long does the pass take?", "1.5 s"),
    "Is the cache copied?": ("faq.md", "Is the KV cache copied at every step?", "In place, no"),
    "Prefill?": ("faq.md", "Prefill, or mixed batches?", "per graph, not per step"),
    "More tokens than MLAPO takes?": ("faq.md", "More than 1,024 tokens?", "has none"),
    "Why did the text change after a while?": (
        "faq.md",
        "Why do tokens differ after a while?",
        "round at different places",
    ),
    "How do I get from staged to in place?": (
        "staged.md",
        "How to get in place",
        'Do everything under "to write in place:"',
    ),
    "Who checks the slots?": ("faq.md", "Who checks slots that are out of range?", "checked"),
    "My operator is unknown to the pass?": (
        "extending.md",
        "Your own operator",
        "Say what the operator computes",
    ),
    "Can I save what I compiled?": ("faq.md", "Can I save what I compiled?", "With the hook, yes"),
    "What may change between releases?": ("stability.md", "Stability", "Before 1.0"),
    "What ran on an NPU?": ("verified.md", "On a device", "Nothing here has run on an NPU"),
}
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


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_in_few_words(question: str) -> None:
    name, heading, said = QUESTIONS[question]
    page = DOCS / name
    assert page in reached(CLICKS)
    text = answer(page, heading)
    assert said in " ".join(text.split()).replace("**", ""), text
    assert words(text) < WORDS, f"{words(text)} words"


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
