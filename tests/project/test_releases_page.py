"""docs/releases.md and the table of README say what the table of releases and the matrix say."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from mla_fusion.releases import RELEASES
from tests.project.pages import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("generate_releases")


def test_the_page_and_the_readme_are_current(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "run `make docs`"


def test_each_release_has_one_row(generator: ModuleType) -> None:
    lines = list(generator.support([]))
    for release in RELEASES:
        (row,) = (line for line in lines if line.startswith(f"| {release.torch_npu} |"))
        assert ("refused: install" in row) is (not release.works)


def test_nothing_failed_in_the_outcome_that_is_kept() -> None:
    rows = json.loads((ROOT / "tests" / "matrix" / "outcome.json").read_text())
    assert {row["torch_npu"] for row in rows} <= {
        release.torch_npu for release in RELEASES if release.tested
    }
    cells = [
        (row["torch_npu"], name, counts) for row in rows for name, counts in row["cells"].items()
    ]
    assert cells and [cell for cell in cells if cell[2].get("failed")] == []


def test_cells_name_tests_that_exist(generator: ModuleType) -> None:
    from tests.matrix.cells import REFUSED, WORKS

    for tests in (*WORKS.values(), *REFUSED.values()):
        for test in tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), test
            function = name.partition("[")[0]
            assert not name or re.search(
                rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE
            ), test
