"""docs/rejections.md lists the codes that the pass gives."""

import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest

from mla_fusion.report.rejection import CODES
from mla_fusion.report.staging import REMEDIES
from tests.project.pages import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("generate")


def test_the_page_is_current(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "run `make docs`"


def test_a_stale_page_is_noticed(generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generator, "PAGE", tmp_path / "rejections.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0 and generator.main(["--check"]) == 0


def test_each_code_has_one_row_with_its_remedy(generator: ModuleType) -> None:
    rows = generator.page().partition("## Why a fusion is staged")[0].splitlines()
    for code, (meaning, remedy) in CODES.items():
        (row,) = (row for row in rows if row.startswith(f"| `{code}` |"))
        assert meaning.replace("|", "\\|") in row and remedy.replace("|", "\\|") in row


def test_each_reason_for_staging_has_one_row(generator: ModuleType) -> None:
    rows = generator.page().partition("## Why a fusion is staged")[2].splitlines()
    wanted = [f"| `{code}` | {remedy} |" for code, remedy in REMEDIES.items()]
    assert [row for row in rows if row.startswith("| `")] == wanted


def test_each_code_has_an_example_that_a_test_runs(generator: ModuleType) -> None:
    """The examples are cut from the tests, so each is either a listed near miss or a test itself."""
    examples, page = generator.examples(), generator.page()
    assert examples.keys() == CODES.keys()
    for code, source in examples.items():
        assert source.startswith(("class ", "def test_")), code
        assert f"`{code}`:\n\n```python\n{source}\n```" in page


def test_codes_of_one_family_stand_together() -> None:
    """The page has one heading for each family."""
    families = [code.partition(".")[0] for code in CODES]
    changes = sum(left != right for left, right in itertools.pairwise(families))
    assert changes + 1 == len(set(families))


def test_every_code_in_the_source_is_listed() -> None:
    """``Refuse("code", ...)`` with a code that is not in the table fails only when it is raised; find it here."""
    used = {
        match
        for path in (ROOT / "mla_fusion").rglob("*.py")
        for match in re.findall(r'(?:Refuse|Rejection)\(\s*f?"([a-z_.]+)', path.read_text())
    }
    assert used and used <= set(CODES)
