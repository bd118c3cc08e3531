"""A graph that records gradients is left as is. Boxed, it frees what it used: else torch warns."""

import pytest
import torch
from torch import Tensor

import mla_fusion as mf


def test_gradients_are_those_of_the_model(recwarn: pytest.WarningsRecorder) -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight).square().sum()

    found = []
    for run in model, torch.compile(model, backend=mf.backend(), fullgraph=True):
        torch.manual_seed(0)
        x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        run(x, weight).backward()
        found.append((x.grad, weight.grad))
    torch.testing.assert_close(*found)
    assert not [each for each in recwarn if "boxed" in str(each.message)]
