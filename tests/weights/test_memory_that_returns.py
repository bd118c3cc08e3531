"""Weights are exchanged for others and back, as averages are to be evaluated: what was changed
while it was out is packed anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.harness import assert_no_worse, clones, eager, exact

pytestmark = pytest.mark.usefixtures("fresh")
Chosen = Callable[[str], bool]


def _exchange(model: nn.Module, average: nn.Module, chosen: Chosen) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), average.parameters(), strict=True):
        if chosen(name):
            mine.data, theirs.data = theirs.data, mine.data


@pytest.mark.parametrize(
    "chosen", [lambda name: True, lambda name: name.startswith("q_b")], ids=["all", "one of them"]
)
def test_both_are_evaluated_in_turn(chosen: Chosen) -> None:
    model, args = prologues.Neox(), base.paged_args()
    average = copy.deepcopy(model)
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)

    def assert_current() -> None:
        given = clones(args)
        with torch.no_grad():
            found = [run(*given), *given]
        assert_no_worse(exact(model, args), eager(model, clones(args)), found, slack=1.2)

    for _ in range(3):
        assert_current()
        _exchange(model, average, chosen)
        assert_current()
        _exchange(model, average, chosen)
        assert_current()
        with torch.no_grad():  # counted, of the average: the model's parameters see nothing
            for parameter in average.parameters():
                parameter.mul_(1.5)
    assert mf.reports()[-1].fused
