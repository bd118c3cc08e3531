"""What re-indexing and numbers make of a product: which elements, and by which factor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_fusion.facts.multiples import Multiple, multiples
from tests.facts.reading import T, behind, read
from tests.fx.tracing import outputs

W = 6
CODES = torch.arange(T * W).reshape(T, W)
Step = Callable[[Tensor], Tensor]


def last(step: Step) -> Multiple | None:
    graph = behind(step, W)
    (_,), (facts,) = read(graph)
    node = outputs(graph)[0]
    return next((form for form in multiples(graph, facts.cone) if form.node is node), None)


@pytest.mark.parametrize("factor", [1.0, 0.25, -2.0])
@pytest.mark.parametrize(
    "move",
    [
        lambda y: y.t(),
        lambda y: y[:, 2:],
        lambda y: y.view(T, 2, 3).split([1, 2], -1)[1],
        lambda y: y.view(-1),
    ],
)
def test_moved_and_multiplied(move: Step, factor: float) -> None:
    for step in (lambda y: move(y * factor).double(), lambda y: (move(y) * factor).double()):
        form = last(step)
        assert form is not None and form.factor == factor
        assert torch.equal(form.codes, move(CODES))


@pytest.mark.parametrize(
    "step",
    [
        lambda y: y + 1,
        lambda y: y.pow(2),
        lambda y: y * torch.arange(1, W + 1),  # a number for each column
        lambda y: y + y.flip(0),
        lambda y: y.sum(-1),
    ],
)
def test_what_is_no_multiple(step: Step) -> None:
    assert last(step) is None
