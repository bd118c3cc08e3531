"""The spellings of tests/fusion, for tests that compile them."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def spellings() -> ModuleType:
    from tests.catalogue import spellings

    return spellings
