"""All that README and docs show as code or command runs as shown, on a machine without an NPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exhaustive import one_in
from tests.project.pages import DOCS
from tests.project.snippets import blocks, run

# Pages whose blocks are cut from tests, or run by them.
ELSEWHERE = {
    "by-hand.md": "tests/by_hand/test_guide.py",
    "by-hand-more.md": "tests/by_hand/test_guide.py",
    "extending.md": "tests/project/test_extending.py",
    "rejections.md": "tests/project/test_rejections_page.py",
}
# Translations have the code of their originals (test_pages_in_step.py).
PAGES = [
    page
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
    if page.name not in ELSEWHERE and not page.stem.endswith(".zh")
]
RUN = [page for page in PAGES if any(block.kind in ("python", "sh") for block in blocks(page))]


@pytest.mark.parametrize("page", one_in(1, RUN), ids=lambda page: page.stem)
def test_a_page_runs_as_it_stands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "transformers" in page.read_text(encoding="utf-8"):
        pytest.importorskip("mla_fusion.models.hf").modeling()  # says what is missing
    monkeypatch.chdir(tmp_path)
    run(page)


def test_the_other_pages_are_run_elsewhere() -> None:
    assert all(
        (DOCS.parent / test).is_file() and (DOCS / page).is_file()
        for page, test in ELSEWHERE.items()
    )
