"""docs/public-code.md has a row, with the verdict that the catalogue has, for every form that the
benchmark runs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public-code.md").read_text()


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return import_module("public_code")
    finally:
        sys.path.pop(0)


def test_every_implementation_has_a_row(benchmark: ModuleType) -> None:
    rows = [
        f"| {entry.source} | {entry.name} | {benchmark._words(entry.outcome)} |"
        for entry in benchmark.public()
    ]
    assert [row for row in rows if row not in PAGE] == [], (
        "python benchmarks/public_code.py --write"
    )
    assert len(rows) >= 38


def test_every_model_of_hugging_face_has_a_row(benchmark: ModuleType) -> None:
    wanted = benchmark.HUGGING_FACE.items()
    rows = [
        f"| transformers | {name} | {benchmark._words((verdict,))} |" for name, verdict in wanted
    ]
    assert [row for row in rows if row not in PAGE] == [], (
        "python benchmarks/public_code.py --write"
    )
    assert len(rows) >= 19


def test_nothing_is_silent() -> None:
    assert "silent" not in PAGE
