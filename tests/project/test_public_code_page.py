"""docs/public-code.md has a row, with the catalogue's verdict, for each form the benchmark runs."""

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


def test_every_implementation_and_model_has_a_row(benchmark: ModuleType) -> None:
    ours = [(entry.source, entry.name, entry.outcome) for entry in benchmark.public()]
    models = [
        ("transformers", name, (verdict,)) for name, verdict in benchmark.HUGGING_FACE.items()
    ]
    rows = [
        f"| {source} | {name} | {benchmark._words(outcome)} |"
        for source, name, outcome in ours + models
    ]
    missing = [row for row in rows if row not in PAGE]
    assert not missing, "python benchmarks/public_code.py --write"
    assert len(ours) >= 38 and len(models) >= 19


def test_nothing_is_silent() -> None:
    assert "silent" not in PAGE
