"""Two projections each quantise x by equal steps of their own, in whatever way: the kernel is given
the one, which is shown to be the other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import paged_args
from tests.catalogue.int8 import Full
from tests.catalogue.int8_plain import PlainLinear, largest
from tests.harness import assert_no_worse, eager, exact, outcome, traced, traced_graph

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def to_seven_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.round(x * 63 / largest(x)).to(torch.int8), largest(x) / 63


def by_powers_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(torch.ceil(torch.log2(largest(x) / 127)))
    return torch.round(x / scale).to(torch.int8), scale


def with_zeros(x: Tensor) -> tuple[Tensor, Tensor]:
    most = largest(x)
    scale = torch.where(most == 0, torch.ones_like(most), most) / 127
    return torch.round(x / scale).clamp(-127, 127).to(torch.int8), scale


def truncated(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 127 / largest(x)).to(torch.int8), largest(x) / 127


def doubled_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = to_seven_bits(x)
    return values, scale * 2


def linear(quantise: Quantise) -> type[PlainLinear]:
    return type("Linear", (PlainLinear,), {"quantise": lambda self, x: quantise(x.float())})


class Twice(Full):
    linear = PlainLinear

    def __init__(self, query: Quantise, key: Quantise) -> None:
        super().__init__()
        for name, quantise in (("q_a_proj", query), ("kv_a_proj_with_mqa", key)):
            width_in, width_out = getattr(self, name).weight.shape
            setattr(self, name, linear(quantise)(width_in, width_out))


@pytest.mark.parametrize("quantise", [to_seven_bits, by_powers_of_two, with_zeros, truncated])
def test_equal_steps_are_one_x(quantise: Quantise) -> None:
    torch.manual_seed(0)
    model, args = Twice(quantise, quantise), paged_args(32)
    gm, weights = traced(model, args)
    assert outcome(mf.fuse(gm, mf.Config(strict=True))) == ("in place",)
    fused = tuple(a.clone() for a in args)
    run = torch.fx.Interpreter(gm)
    found = run.run(*weights, *fused, enable_io_processing=False)
    unfused = eager(model, tuple(a.clone() for a in args))
    assert_no_worse(exact(model, args), unfused, [*found, *fused])


@pytest.mark.parametrize(
    "query, key",
    [(to_seven_bits, truncated), (truncated, to_seven_bits), (to_seven_bits, doubled_scale)],
)
def test_other_steps_are_another_x(query: Quantise, key: Quantise) -> None:
    gm = traced_graph(Twice(query, key), *paged_args(32))
    assert not mf.fuse(gm, mf.Config(strict=True)).fused
