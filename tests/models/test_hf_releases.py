"""What releases of transformers differ in, and the page that says so."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from mla_fusion.models.features import FEATURES, OLDEST
from mla_fusion.models.hf import modeling
from tests.project.pages import script

ROOT = Path(__file__).parents[2]


def numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")[:2]]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("generate_hf")


def test_the_page_is_current(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "run `make docs`"


def test_every_release_of_the_matrix_was_run(generator: ModuleType) -> None:
    rows = json.loads(generator.hf.KEPT.read_text())
    assert [row["transformers"] for row in rows] == list(generator.hf.RELEASES)
    assert list(generator.hf.failures(rows)) == []
    assert max(row["largest_ratio"] for row in rows) <= 1.1
    assert all({"deepseek_v2", "deepseek_v3"} <= set(row["models"]) for row in rows)


def test_the_extra_takes_the_oldest_release() -> None:
    assert f'hf = ["transformers>={OLDEST}' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.since)
def test_the_installed_release_has_what_it_should(feature) -> None:
    """``since`` is what messages tell users to install."""
    source = modeling()
    from transformers.cache_utils import StaticLayer

    asked = {
        "the attention's class": source.DeepseekV3Attention,
        "the class of a static layer": StaticLayer,
        "the model's forward": source.DeepseekV3ForCausalLM.forward,
    }
    assert feature.has(asked[feature.asked_of]) == (
        numbers(version("transformers")) >= numbers(feature.since)
    )
    assert feature.install == f"pip install 'transformers>={feature.since}'"
