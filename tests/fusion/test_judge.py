"""The judge of generated graphs: which integers count as equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .generator.judge import _integers_differ

PLAIN = torch.arange(16, dtype=torch.int8)


def moved(places: int, by: int = 1) -> Tensor:
    """PLAIN with its first ``places`` entries changed."""
    other = PLAIN.clone()
    other[:places] += by
    return other


def test_integers_that_no_nudged_input_changes_are_equal() -> None:
    assert _integers_differ([PLAIN, PLAIN, PLAIN], moved(1))
    assert not _integers_differ([PLAIN, PLAIN, PLAIN], PLAIN.clone())


@pytest.mark.parametrize(
    "got, same", [(moved(2), True), (moved(3), False), (moved(1, by=2), False)]
)
def test_integers_of_a_rounding_differ_as_those_of_nudged_inputs(got: Tensor, same: bool) -> None:
    nudged = PLAIN.clone()
    nudged[-1] -= 1
    assert (_integers_differ([PLAIN, nudged], got) == "") is same
