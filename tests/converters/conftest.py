"""The spellings of tests/fusion, loaded by path: under pytest's importlib mode tests are no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[1] / "fusion" / "spellings.py"


@pytest.fixture(scope="session")
def spellings() -> Any:
    spec = importlib.util.spec_from_file_location("converter_spellings", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
