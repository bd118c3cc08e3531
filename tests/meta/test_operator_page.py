"""docs/operator.md and docs/other-operators.md say what the specification says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.meta.stricter import STRICTER
from tests.project.pages import script


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("generate_operator")


def test_the_page_is_current(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "run python docs/generate_operator.py"


def test_a_page_behind_the_specification_is_noticed(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generator, "PAGE", tmp_path / "operator.md")
    monkeypatch.setattr(generator, "OTHERS", tmp_path / "other-operators.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0 and generator.main(["--check"]) == 0
    generator.PAGE.write_text(generator.PAGE.read_text().replace("1536", "1535"))
    assert generator.main(["--check"]) == 1


def test_every_scenario_and_table_is_on_the_page(generator: ModuleType) -> None:
    text = generator.page() + generator.others()
    assert (
        all(f"| {wq}/{kv} |" in text for wq, kv in generator.pairs())
        and len(generator.pairs()) == 16
    )
    assert all(f"| {row.name} | {row.refused} |" in text and row.reason in text for row in STRICTER)
    assert all(f"| {name} |" in text for name in generator.TRAITS)
