"""The guide to hand-written calls is one program that runs, and the page of the documentation is that guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mla_fusion.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "mla_fusion" / "by_hand" / "guide.md"


def test_the_blocks_run_in_order() -> None:
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 15, "one for each step, a rewrite, a layer of Hugging Face, graphs, v2 and ATB"
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), namespace)


def test_the_page_is_the_guide() -> None:
    assert (ROOT / "docs" / "by-hand.md").read_text() == GUIDE.read_text()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide"]) == 0
    assert capsys.readouterr().out == GUIDE.read_text()
    assert main(["guide", "--out", str(tmp_path / "AGENTS.md")]) == 0
    assert (tmp_path / "AGENTS.md").read_text() == GUIDE.read_text()
    assert main(["guide", "--out", str(tmp_path / "new" / "AGENTS.md")]) == 2  # no such folder
    assert main(["guide", "--out", str(tmp_path / "AGENTS.md" / "below")]) == 2
