"""Tests of packed weights start from seeded numbers, with nothing compiled and nothing packed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()
