"""How a packed weight is turned back into its parameter, and which packings cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fusion.weights.inverse import inverse


def transposed(weight: Tensor) -> Tensor:
    return weight.t().clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize(
    "packing, shape",
    [
        (transposed, (6, 8)),
        (lambda w: torch.ops.npu.npu_format_cast(w, 29), (6, 8)),
        (lambda w: torch.ops.npu.npu_format_cast(transposed(w), 29), (6, 8)),
        (lambda w: w.permute(2, 0, 1).reshape(4, 6).clone(), (2, 3, 4)),
        (
            lambda w: w.view(2, 3, 4).transpose(1, 2).clone(memory_format=torch.contiguous_format),
            (2, 3, 4),
        ),
        (lambda w: w.view(1, 8).clone(), (8,)),
        (lambda w: w.squeeze(1).t().contiguous().clone(), (6, 1, 8)),
    ],
)
def test_inverse(packing: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    program = make_fx(packing)(weight)
    found = inverse(program, weight)
    assert found is not None and torch.equal(found(program(weight)), weight)


@pytest.mark.parametrize(
    "packing, shape",
    [
        (lambda w: w[:, :4].clone(), (6, 8)),
        (lambda w: w.index_select(1, torch.tensor([1, 0])).clone(), (6, 2)),
        (lambda w: torch.cat([w[:, 4:], w[:, :4]], 1), (6, 8)),
        (lambda w: w.unsqueeze(0).expand(3, 6, 8).clone(), (6, 8)),
        (lambda w: w.to(torch.bfloat16), (6, 8)),
        (lambda w: w * 2, (6, 8)),
        (lambda w: w.view(torch.int32).t().clone(), (6, 8)),
        # its one axis is spread
        (lambda w: w.view(2, 3).t().clone(memory_format=torch.contiguous_format), (6,)),
    ],
)
def test_no_inverse(packing: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    assert inverse(make_fx(packing)(weight), weight) is None


def test_no_inverse_of_two_parameters() -> None:
    weight = torch.randn(3, 4)
    assert inverse(make_fx(lambda a, b: F.linear(a, b))(weight, weight), weight) is None
