"""Functions of which no element was compared are not proved equal."""

from __future__ import annotations

import pytest
import torch

import mla_fusion as mf


@pytest.mark.parametrize("rows", [0, 2])
def test_results_without_elements(rows: int) -> None:
    found = mf.audit(lambda x: x * 2, lambda x: x + x, torch.ones(rows, 8))
    assert found.equal is (True if rows else None)
    assert [item.code for item in found.findings] == ([] if rows else ["results.empty"])


def test_other_results_without_elements() -> None:
    assert mf.audit(lambda x: x * 2, lambda x: x * 3, torch.ones(0, 8)).equal is None


def test_one_of_two_results_has_elements() -> None:
    found = mf.audit(lambda x: (x * 2, x[:0]), lambda x: (x + x, x[:0]), torch.ones(2, 8))
    assert found.equal
