"""The guide to hand-written calls is a program that runs; two pages of the docs are that guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mla_fusion.tools.cli import main

ROOT = Path(__file__).parents[2]
PAGES = {"by-hand.md": "guide.md", "by-hand-more.md": "guide_more.md"}
PARTS = [(ROOT / "mla_fusion" / "tools" / "by_hand" / name).read_text() for name in PAGES.values()]
GUIDE = "\n".join(PARTS)


def test_the_blocks_run_in_order() -> None:
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 14, (
        "one for each step, a rewrite, a layer of Hugging Face, graphs, and ATB"
    )
    for block in blocks:
        exec(compile(block, "guide", "exec"), namespace)


def test_the_pages_are_the_guide() -> None:
    assert [(ROOT / "docs" / page).read_text() for page in PAGES] == PARTS


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide"]) == 0
    assert capsys.readouterr().out == GUIDE
    assert main(["guide", "--out", str(tmp_path / "AGENTS.md")]) == 0
    assert (tmp_path / "AGENTS.md").read_text() == GUIDE
    assert main(["guide", "--out", str(tmp_path / "new" / "AGENTS.md")]) == 2  # no such folder
    assert main(["guide", "--out", str(tmp_path / "AGENTS.md" / "below")]) == 2
